"""What a request asks of the draw, checked once."""

import secrets
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from treeflash.errors import UsageError
from treeflash.kernels.sampling import draw


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one, shown in the statistics

    def __post_init__(self) -> None:
        self._check("temperature", 0 <= self.temperature <= 100, "between 0 and 100")
        self._check("top_k", self.top_k >= 0, "0 (all) or a positive number")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2^64 - 1")

    def _check(self, name: str, sound: bool, needed: str) -> None:
        if not sound:
            raise UsageError(f"{name} is {getattr(self, name)}, needed {needed}")

    def seeded(self) -> Self:
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    def draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """One token [R] for each row of logits [R, V]; positions [R] are where the tokens will stand."""
        assert self.seed is not None
        return draw(
            logits,
            positions,
            seed=self.seed,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )
