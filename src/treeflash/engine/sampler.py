"""What a request asks of the draw, and the draw itself with what the request has seen so far."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from treeflash.errors import UsageError
from treeflash.kernels.sampling import (
    DrawState,
    draw,
    draw_rows,
    gumbel,
    make_workspace,
    penalised,
    rank,
    rank_rows,
)

_LEAST = -1e30  # of a logit that may be drawn


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of the prompt and the answer; 1: none
    presence_penalty: float = 0.0  # on tokens of the answer
    frequency_penalty: float = 0.0  # the same for each time they occur
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to a token's logit
    logprobs: int | None = None  # how many alternatives to report beside each token's own; None: nothing
    seed: int | None = None  # None: a fresh one, shown in the statistics

    def __post_init__(self) -> None:
        self._check("temperature", 0 <= self.temperature <= 100, "between 0 and 100")
        self._check("top_k", self.top_k >= 0, "0 (all) or a positive number")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100")
        self._check("presence_penalty", -100 <= self.presence_penalty <= 100, "between -100 and 100")
        self._check("frequency_penalty", -100 <= self.frequency_penalty <= 100, "between -100 and 100")
        sound = all(not math.isnan(bias) and bias < math.inf for bias in self.logit_bias.values())
        self._check("logit_bias", sound, "numbers below infinity")
        self._check("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "between 0 and 100")
        self._check("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2^64 - 1")

    def _check(self, name: str, sound: bool, needed: str) -> None:
        if not sound:
            raise UsageError(f"{name} is {getattr(self, name)}, needed {needed}", param=name)

    def seeded(self) -> Self:
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    @property
    def filters(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }

    @property
    def penalties(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of the target's own distribution, before temperature, filters and penalties."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class FixedDraws:
    """The draws of whatever request is under way, over tensors that stay where they are.

    The same tokens as a `Sampler`'s own. But for a request's start nothing comes from the host or goes there.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device):
        self._device = device
        self._state = DrawState.empty(rows, vocabulary, device)
        self._workspace = make_workspace(rows, vocabulary, device)
        on_device = device.type == "cuda"
        self._allowed = torch.empty(self._state.allowed.shape, dtype=torch.int32, pin_memory=on_device)

    @property
    def written(self) -> Tensor:
        """[V] float32: how often each token stands in the answer; walks count what they accept."""
        return self._state.written

    def begin(self, params: SamplingParams, prompt: list[int], *, masked: bool) -> None:
        assert params.seed is not None
        biases = list(params.logit_bias.values())
        # As in a `Sampler`: a bias of -inf may not weigh as much as a mask.
        floor = _LEAST if masked else -torch.inf
        self._state.ask(
            **params.filters,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            seed=params.seed,
            prompt=torch.tensor(prompt, dtype=torch.int64, device=self._device),
            biased=torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self._device),
            bias=torch.tensor(biases, dtype=torch.float32, device=self._device).clamp(min=floor),
            masked=masked,
        )

    def allow(self, masks: Sequence[np.ndarray | None]) -> None:
        """What may follow the first rows, a mask a row; None: anything."""
        for row, mask in enumerate(masks):
            self._allowed[row] = -1 if mask is None else torch.tensor(mask)
        count = len(masks)
        self._state.allowed[:count].copy_(self._allowed[:count], non_blocking=True)

    def draw(self, logits: Tensor, positions: Tensor, tokens: Tensor, ancestors: Tensor) -> Tensor:
        """A token [R] behind each row of a tree: logits [R, V], positions [R] where the tokens will stand."""
        return draw_rows(logits.contiguous(), positions, tokens, ancestors, self._state, self._workspace)

    def rank(self, logits: Tensor, positions: Tensor, anchor: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """As a sampler's, without masks: what they forbid falls when the tree is looked at."""
        return rank_rows(logits.contiguous(), positions, anchor, count, self._state, self._workspace)


class Sampler:
    """One request's draws."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: list[int],
        vocabulary: int,
        device: torch.device,
        *,
        fixed: FixedDraws | None = None,
        masked: bool = False,
    ):
        """`fixed`: draws there, of rows that will have masks or will not."""
        assert params.seed is not None
        self.fixed = fixed
        self.params, self._seed = params, params.seed
        self._vocabulary, self._device = vocabulary, device
        self._noise: dict[int, Tensor] = {}
        if params.penalties:
            self._prompt = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._prompt[torch.tensor(prompt, device=device)] = True
            self._counts = torch.zeros(vocabulary, device=device)
        outside = [token for token in params.logit_bias if not 0 <= token < vocabulary]
        if outside:
            raise UsageError(
                f"logit_bias has token {outside[0]}, the vocabulary has ids 0 to {vocabulary - 1}",
                param="logit_bias",
            )
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(params.logit_bias.values()), device=device)
        if fixed is not None:
            fixed.begin(params, prompt, masked=masked)

    def draw(
        self,
        logits: Tensor,
        positions: Tensor,
        tokens: Tensor,
        visible: Tensor,
        masks: Sequence[np.ndarray | None] = (),
    ) -> Tensor:
        """A token [R] behind each row: logits [R, V], positions [R] where the tokens will stand.

        tokens [T] and visible [R, T]: undecided text above each row, itself included. masks: for each row a
        bit a token that may be drawn [V / 32] int32, or None; no masks at all: every token may.
        """
        params = self.params
        logits = self._masked(self._adjusted(logits, tokens, visible), masks)
        noise = None
        if params.temperature > 0 and params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
            noise = self._noise_at(positions.tolist())
        return draw(logits, positions, seed=self._seed, noise=noise, **params.filters)

    def rank(
        self,
        logits: Tensor,
        positions: Tensor,
        anchor: Tensor,
        count: int,
        *,
        first: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A draft's rows [K, V] as the request will draw: the `count` best ids and their log probabilities.

        With the noise that verification will add, since it is known: what it lifts is what will be drawn.
        `first`: the mask of the first row; those of the others depend on what comes.
        """
        params = self.params
        logits = self._adjusted(logits, anchor, torch.ones(len(logits), 1, device=self._device))
        logits = self._masked(logits, [first])
        return rank(logits, positions, count=count, seed=self._seed, **params.filters)

    def accept(self, tokens: list[int]) -> None:
        """Tokens of the answer that are decided and no longer part of a tree."""
        if self.fixed is None and self.params.penalties and tokens:
            ids = torch.tensor(tokens, device=self._device)
            self._counts.scatter_add_(0, ids, torch.ones(len(tokens), device=self._device))

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[TokenLogprob]:
        """Of `tokens` behind rows of the target's logits [R, V]."""
        assert self.params.logprobs is not None
        table = logits.float().log_softmax(-1)
        own = table.gather(1, torch.tensor(tokens, device=self._device)[:, None])[:, 0].tolist()
        top = table.topk(min(self.params.logprobs, table.shape[1]), -1)
        pairs = zip(tokens, own, top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            TokenLogprob(token, value, list(zip(ids, values, strict=True)))
            for token, value, ids, values in pairs
        ]

    def _adjusted(self, logits: Tensor, tokens: Tensor, visible: Tensor) -> Tensor:
        params = self.params
        if params.penalties:
            logits = penalised(
                logits,
                self._prompt,
                self._counts,
                tokens,
                visible,
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )
        if len(self._biased):
            logits = logits.index_add(1, self._biased, self._bias.expand(len(logits), -1))
        return logits

    def _masked(self, logits: Tensor, masks: Sequence[np.ndarray | None]) -> Tensor:
        """logits [R, V] with -inf for what the masks of its first rows forbid."""
        rows = [row for row, mask in enumerate(masks) if mask is not None]
        if not rows:
            return logits
        words = torch.from_numpy(np.stack([mask for mask in masks if mask is not None])).to(self._device)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self._device)) & 1
        allowed = bits.flatten(1)[:, : self._vocabulary].bool()
        index = torch.tensor(rows, device=self._device)
        # A bias of -inf may not weigh as much as the mask: some token has to be drawn.
        limited = logits[index].clamp(min=_LEAST).masked_fill(~allowed, -torch.inf)
        return logits.index_copy(0, index, limited)

    def _noise_at(self, positions: list[int]) -> Tensor:
        """[R, V]; every position's is made once, though trees look at it several times."""
        missing = sorted(set(positions) - self._noise.keys())
        if missing:
            ids = torch.arange(self._vocabulary, device=self._device)
            fresh = gumbel(self._seed, ids, torch.tensor(missing, device=self._device)[:, None])
            self._noise = {at: row for at, row in self._noise.items() if at >= min(positions)}
            self._noise.update(zip(missing, fresh, strict=True))
        return torch.stack([self._noise[at] for at in positions])
