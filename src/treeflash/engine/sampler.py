"""Sampling parameters of a request, and the sampler of the running sequence on every device."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from treeflash.errors import UsageError
from treeflash.kernels.sampling import SamplingState, make_workspace, rank_rows, sample_rows

_LEAST = -1e30  # the least logit that may still be sampled


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of prompt and output; 1: none
    presence_penalty: float = 0.0  # on tokens of the output
    frequency_penalty: float = 0.0  # on tokens of the output, once per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to a token's logit
    logprobs: int | None = None  # alternatives to report beside each token's own; None: no log probabilities
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
        """Return the same parameters with a seed."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    @property
    def filters(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise if `logit_bias` names a token that the model does not have."""
        outside = [token for token in self.logit_bias if not 0 <= token < vocabulary]
        if outside:
            raise UsageError(
                f"logit_bias has token {outside[0]}, the vocabulary has ids 0 to {vocabulary - 1}",
                param="logit_bias",
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability in the target's own distribution, before temperature, filters and penalties."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Sampler:
    """Samples for the running sequence over static buffers, so that a CUDA graph can hold the calls."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device):
        self._device, self._vocabulary = device, vocabulary
        self._state = SamplingState.empty(rows, vocabulary, device)
        self._workspace = make_workspace(rows, vocabulary, device)
        words = self._state.allowed.shape
        self._staged_masks = torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")

    @property
    def counts(self) -> Tensor:
        """[V] float32: occurrences of each generated token; accepting a path adds to it."""
        return self._state.counts

    def begin(self, params: SamplingParams, prompt: list[int], *, masked: bool) -> None:
        """Start a request; `masked`: a constraint gives masks for its rows."""
        assert params.seed is not None
        params.check_vocabulary(self._vocabulary)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self._device)
        self._state.begin(
            **params.filters,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            seed=params.seed,
            prompt=torch.tensor(prompt, dtype=torch.int64, device=self._device),
            biased=torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self._device),
            # A bias of -inf must not weigh as much as a mask: some token has to be sampled.
            bias=bias.clamp(min=_LEAST if masked else -torch.inf),
            masked=masked,
        )

    def set_masks(self, masks: Sequence[np.ndarray | None]) -> None:
        """Set which tokens may follow the first rows: [V / 32] int32, a bit a token; None: any token."""
        for row, mask in enumerate(masks):
            self._staged_masks[row] = -1 if mask is None else torch.tensor(mask)
        count = len(masks)
        self._state.allowed[:count].copy_(self._staged_masks[:count], non_blocking=True)

    def sample(self, logits: Tensor, positions: Tensor, tokens: Tensor, ancestors: Tensor) -> Tensor:
        """Sample a token [R] after each row of a tree: logits [R, V], positions [R] of the new tokens.

        tokens [T] of the tree's rows; ancestors [R]: bit j set, row j is this row or above it.
        """
        return sample_rows(logits.contiguous(), positions, tokens, ancestors, self._state, self._workspace)

    def rank(self, logits: Tensor, positions: Tensor, anchor: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Rank a draft's rows [K, V] as the request samples: the `count` best ids and log probabilities.

        Adds the noise that verification will add: what it lifts is what will be sampled. Masks are not
        applied: what they forbid is rejected when the tree is verified.
        """
        return rank_rows(logits.contiguous(), positions, anchor, count, self._state, self._workspace)


def token_logprobs(logits: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """Return the log probabilities of `tokens` under rows of the target's logits [R, V]."""
    table = logits.float().log_softmax(-1)
    own = table.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    top = table.topk(min(alternatives, table.shape[1]), -1)
    pairs = zip(tokens, own, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprob(token, value, list(zip(ids, values, strict=True))) for token, value, ids, values in pairs
    ]
