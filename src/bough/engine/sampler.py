"""Sampling parameters of a request, and the sampler of the running sequence on every device."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bough.errors import UsageError
from bough.kernels.native import argmax_rows
from bough.kernels.sampling import SampledRows, make_workspace, rank_rows, sample_rows
from bough.kernels.sampling.state import NoiseCache, RowOwners, SamplingState
from bough.kernels.sampling.workspace import Workspace
from bough.models.step import Step

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
    recommended: bool = False  # for the model, and a request has asked for nothing else

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

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return the parameters with a request's own values."""
        recommended = self.recommended and not values.keys() - {"seed", "logit_bias", "logprobs"}
        return replace(self, recommended=recommended, **values)

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
    """Samples for the running sequences over static buffers, so that a CUDA graph can hold the calls."""

    def __init__(self, slots: int, rows: int, vocabulary: int, device: torch.device):
        self._device, self._vocabulary = device, vocabulary
        self._state = SamplingState.empty(rows, vocabulary, device, slots=slots)
        self._workspace = make_workspace(rows, vocabulary, device)
        self.rank = Ranking(self._state, self._workspace)
        words = self._state.allowed.shape
        self._staged_masks = torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")

    @property
    def counts(self) -> Tensor:
        """[slots, V] float32: occurrences of each generated token; accepting a path adds to it."""
        return self._state.counts

    def begin(
        self,
        slot: int,
        params: SamplingParams,
        prompt: list[int],
        *,
        masked: bool,
        generated: Sequence[int] = (),
    ) -> None:
        """Start a request in a slot; `masked`: a constraint gives masks for its rows.

        `generated`: for a request that goes on, its tokens without the last one, the root of its next tree.
        """
        assert params.seed is not None
        params.check_vocabulary(self._vocabulary)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self._device)
        self._state.begin(
            slot,
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
        if generated:
            tokens = torch.tensor(generated, dtype=torch.int64, device=self._device)
            self.counts[slot].copy_(tokens.bincount(minlength=self._vocabulary))

    def use_masks(self, slot: int, used: bool) -> None:
        """Set whether the rows of a slot's next step have masks, which `set_masks` gives."""
        self._state.use_masks(slot, used)

    def set_masks(self, row: int, masks: Sequence[np.ndarray | None]) -> None:
        """Set which tokens may follow the step's rows from `row` on: [V / 32] int32, a bit a token.

        None: any token.
        """
        for place, mask in enumerate(masks, row):
            self._staged_masks[place] = -1 if mask is None else torch.tensor(mask)
        end = row + len(masks)
        self._state.allowed[row:end].copy_(self._staged_masks[row:end], non_blocking=True)

    def sample(self, logits: Tensor, step: Step) -> Tensor:
        """Sample a token [R] after each row of a step's trees, logits [R, V]."""
        assert step.ancestors is not None
        if not logits.is_cuda and step.first is None and self._state.argmax[int(step.slots)]:
            return argmax_rows(logits)
        tree = (step.tokens.flatten(), step.row_owners(), step.ancestors.flatten())
        rows = SampledRows(logits.contiguous(), step.positions.flatten() + 1, *tree)
        return sample_rows(rows, self._state, self._workspace)

    def sample_first(self, logits: Tensor, slot: int, position: int) -> Tensor:
        """Sample the token [1] at `position`, the first after a prompt, from logits [1, V]."""
        # Each a tensor of its own: kernels would be compiled again for addresses that are aligned less.
        at, slots = (torch.tensor([value], device=self._device) for value in (position, slot))
        none = torch.zeros_like(at)
        rows = SampledRows(logits.contiguous(), at, none, RowOwners(slots, none), none)
        return sample_rows(rows, self._state, self._workspace)


class Ranking:
    """Ranks a draft's rows as each request samples: a `Rank`."""

    def __init__(self, state: SamplingState, workspace: Workspace | NoiseCache):
        self._state, self._workspace = state, workspace

    def __call__(
        self, logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Rank a draft's rows [S, K, V] as each request samples: the `count` best ids and log probabilities.

        Adds the noise that verification will add: what it lifts is what will be sampled. Masks are not
        applied: what they forbid is rejected when the tree is verified.
        """
        shape = logits.shape[:2]
        starts = torch.arange(len(slots), device=slots.device)
        slots, starts = (part[:, None].expand(shape).reshape(-1).contiguous() for part in (slots, starts))
        tables = (positions.flatten(), anchors.contiguous(), RowOwners(slots, starts))
        rows = SampledRows(logits.flatten(0, 1).contiguous(), *tables)
        ids, scores = rank_rows(rows, count, self._state, self._workspace)
        return ids.unflatten(0, shape), scores.unflatten(0, shape)

    def perturb(self, change: Tensor, slots: Tensor) -> Tensor:
        """See Rank."""
        return self._state.perturb(change, slots)


def token_logprobs(logits: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """Return the log probabilities of `tokens` under rows of the target's logits [R, V]."""
    table = logits.float().log_softmax(-1)
    own = table.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    top = table.topk(min(alternatives, table.shape[1]), -1)
    pairs = zip(tokens, own, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprob(token, value, list(zip(ids, values, strict=True))) for token, value, ids, values in pairs
    ]
