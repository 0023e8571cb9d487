"""The requests' sampling parameters and token counts as tensors, and sampling with them in plain torch."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.kernels import native
from bough.kernels.sampling.reference import SHARPNESS, gumbel, penalised, rank, sample

PENALISED, BIASED, MASKED = 1, 2, 4
_LARGEST = 1e30  # of a score's change, which may be far from 0 at a tiny temperature
_WARM = 8  # on the host alone: a temperature above 0
_TEMPERATURE, _TOP_P, _LEAST, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_TOP_K, _SEED, _FLAGS = range(3)


@dataclass(frozen=True, slots=True)
class RowOwners:
    """Which sequence each row of a step belongs to."""

    slots: Tensor  # [R] int64; -1: padding
    starts: Tensor  # [R] int64: the first row of its sequence

    @classmethod
    def one(cls, slot: int, rows: int, device: torch.device | str) -> "RowOwners":
        """Return the owners of `rows` rows of one sequence."""
        slots, starts = torch.tensor([[slot], [0]], device=device).expand(2, rows).contiguous()
        return cls(slots, starts)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of a step's trees, or of a draft, and where the tokens after them stand."""

    logits: Tensor  # [R, V] float32
    positions: Tensor  # [R] of the tokens
    tokens: Tensor  # [R] of the rows; of a draft, that before a row is at owners.starts
    owners: RowOwners
    ancestors: Tensor | None = None  # [R]: bit j set, row j of its tree is this row or above it


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The requests' sampling parameters and what they have generated; kernels read it at every launch."""

    numbers: Tensor  # [slots, 6] float32: temperature, top-p, log of min-p, repetition, presence, frequency
    integers: Tensor  # [slots, 3] int64: top-k, seed, flags
    prompt: Tensor  # [slots, V] bool
    counts: Tensor  # [slots, V] float32: occurrences of generated tokens, without rows of the current tree
    bias: Tensor  # [slots, V] float32
    allowed: Tensor  # [rows, V / 32] int32: a grammar's bits for each row of a step, the lowest bit first
    flags: list[int]  # by slot, on the host
    argmax: list[bool]  # by slot, on the host: whether its request samples the largest logit as it is

    @classmethod
    def empty(
        cls, rows: int, vocabulary: int, device: torch.device | str, *, slots: int = 1
    ) -> "SamplingState":
        """Return the state of greedy requests that have generated nothing."""
        state = cls(
            torch.zeros(slots, 6, device=device),
            torch.zeros(slots, 3, dtype=torch.int64, device=device),
            torch.zeros(slots, vocabulary, dtype=torch.bool, device=device),
            torch.zeros(slots, vocabulary, device=device),
            torch.zeros(slots, vocabulary, device=device),
            torch.full((rows, -(-vocabulary // 32)), -1, dtype=torch.int32, device=device),
            [0] * slots,
            [True] * slots,
        )
        for slot in range(slots):
            state.begin(slot)
        return state

    def begin(
        self,
        slot: int = 0,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        seed: int = 0,
        prompt: Tensor | None = None,
        biased: Tensor | None = None,
        bias: Tensor | None = None,
        masked: bool = False,
    ) -> None:
        """Start a request: its parameters, the prompt's tokens [n], and a bias for some tokens."""
        # Smaller temperatures are denormal, which some devices flush to zero.
        cool = max(temperature, 1e-30) if temperature > 0 else 0.0
        least = math.log(min_p) if min_p > 0 else -math.inf
        numbers = torch.tensor([cool, top_p, least, repetition, presence, frequency])
        penalties = repetition != 1 or presence != 0 or frequency != 0
        flags = PENALISED * penalties + MASKED * masked
        self.prompt[slot].zero_()
        self.counts[slot].zero_()
        self.bias[slot].zero_()
        if prompt is not None and penalties:
            self.prompt[slot, prompt] = True
        if biased is not None and bias is not None and len(biased):
            flags += BIASED
            self.bias[slot].index_add_(0, biased, bias)
        self.flags[slot] = flags + _WARM * (cool > 0)
        self.argmax[slot] = not self.flags[slot]
        # The seed's bits in a signed word.
        signed = seed - 2**64 if seed >= 2**63 else seed
        self.numbers[slot].copy_(numbers)
        self.integers[slot].copy_(torch.tensor([top_k, signed, flags]))

    def use_masks(self, slot: int, used: bool) -> None:
        """Set whether the rows of a running request have masks."""
        if bool(self.flags[slot] & MASKED) != used:
            self.flags[slot] ^= MASKED
            self.argmax[slot] = not self.flags[slot]
            self.integers[slot, _FLAGS].fill_(self.flags[slot] & ~_WARM)

    def perturb(self, change: Tensor, slots: Tensor) -> Tensor:
        """Return what a change of logits [S, ...] changes in what `rank_rows` scores for slots [S]."""
        temperature = self.numbers[slots, _TEMPERATURE].view(-1, *[1] * (change.ndim - 1))
        factor = torch.where(temperature > 0, SHARPNESS / temperature, 1.0)
        return (change * factor).clamp(-_LARGEST, _LARGEST)

    def settings(self, slot: int) -> dict:
        """Return the parameters on the host, as `sample` takes them."""
        numbers, integers = self.numbers[slot].tolist(), self.integers[slot].tolist()
        return {
            "temperature": numbers[_TEMPERATURE],
            "top_k": integers[_TOP_K],
            "top_p": numbers[_TOP_P],
            "min_p": math.exp(numbers[_LEAST]),
            "seed": integers[_SEED] % 2**64,
        }


class NoiseCache:
    """Gumbel noise of each slot's last positions [V each]: consecutive trees sample the same positions."""

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}  # by slot
        self._rows: dict[int, dict[int, Tensor]] = {}  # by slot and position

    def at(self, slot: int, seed: int, positions: Tensor, vocabulary: int) -> Tensor:
        """Return the noise [R, V] of the positions [R]."""
        numbers, rows = positions.tolist(), self._rows.get(slot, {})
        if seed != self._seeds.get(slot):
            self._seeds[slot], rows = seed, {}
        missing = sorted(set(numbers) - rows.keys())
        if missing:
            ids = torch.arange(vocabulary, device=positions.device)
            fresh = gumbel(seed, ids, torch.tensor(missing, device=positions.device)[:, None])
            rows = {at: row for at, row in rows.items() if at >= min(numbers)}
            rows.update(zip(missing, fresh, strict=True))
        self._rows[slot] = rows
        return torch.stack([rows[at] for at in numbers])


def sample_rows(sampled: SampledRows, state: SamplingState, cache: NoiseCache | None = None) -> Tensor:
    """The package's function of this name on any device, with the parameters read to the host."""
    logits, positions, ancestors = sampled.logits, sampled.positions, sampled.ancestors
    assert ancestors is not None
    parts = []
    for slot, start, rows in _by_sequence(sampled.owners):
        if slot < 0:
            parts.append(torch.zeros_like(positions[rows]))
        elif state.argmax[slot] and not logits.is_cuda:
            parts.append(native.argmax_rows(logits[rows]))
        else:
            settings, noise = state.settings(slot), None
            if cache is not None and settings["temperature"] > 0 and not _filters(settings):
                noise = cache.at(slot, settings["seed"], positions[rows], logits.shape[1])
            tree = sampled.tokens[
                start : start + 64
            ]  # of the rows, and perhaps others that their bits leave out
            values = adjusted(logits[rows], tree, ancestors[rows], state, slot, masks=state.allowed[rows])
            parts.append(sample(values, positions[rows], noise=noise, **settings))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_sequence(owners: RowOwners) -> list[tuple[int, int, slice]]:
    """Return the slot, the first row and the rows of each sequence of a step."""
    slots, starts = owners.slots.tolist(), owners.starts.tolist()
    begins = [row for row, start in enumerate(starts) if row == 0 or start != starts[row - 1]]
    bounds = pairwise([*begins, len(slots)])
    return [(slots[begin], starts[begin], slice(begin, end)) for begin, end in bounds]


def _filters(settings: dict) -> bool:
    return settings["top_k"] > 0 or settings["top_p"] < 1 or settings["min_p"] > 0


def rank_rows(sampled: SampledRows, count: int, state: SamplingState) -> tuple[Tensor, Tensor]:
    """The package's function of this name on any device."""
    logits, anchors = sampled.logits, sampled.tokens
    parts = []
    for slot, start, rows in _by_sequence(sampled.owners):
        values, ranking = logits[rows], None
        if state.argmax[slot] and not logits.is_cuda:
            ranking = native.rank_rows(values, count)
        if ranking is None:
            above = torch.ones(len(values), dtype=torch.int64, device=logits.device)
            values = adjusted(values, anchors[start : start + 1], above, state, slot)
            ids, scores = rank(values, sampled.positions[rows], count=count, **state.settings(slot))
            missing = count - ids.shape[1]
            ids = ids.masked_fill(scores == -torch.inf, 0)
            ranking = pad(ids, (0, missing)), pad(scores, (0, missing), value=-torch.inf)
        parts.append(ranking)
    if len(parts) == 1:
        return parts[0]
    ids, scores = (torch.cat(part) for part in zip(*parts, strict=True))
    return ids, scores


def adjusted(
    logits: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    state: SamplingState,
    slot: int,
    *,
    masks: Tensor | None = None,
) -> Tensor:
    """Return the logits [R, V] of one sequence as its request wants them; masks [R, V / 32] of the rows."""
    numbers, flags = state.numbers[slot].tolist(), int(state.integers[slot, _FLAGS])
    if flags & PENALISED:
        visible = (ancestors[:, None] >> torch.arange(len(tokens), device=logits.device)) & 1
        logits = penalised(
            logits,
            state.prompt[slot],
            state.counts[slot],
            tokens,
            visible,
            repetition=numbers[_REPETITION],
            presence=numbers[_PRESENCE],
            frequency=numbers[_FREQUENCY],
        )
    if flags & BIASED:
        logits = logits + state.bias[slot]
    if masks is not None and flags & MASKED:
        rows = (masks != -1).any(-1).nonzero()[:, 0]  # the others allow every token
        bits = (masks[rows, :, None] >> torch.arange(32, device=logits.device)) & 1
        limited = logits[rows].masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
        logits = logits.index_copy(0, rows, limited)
    return logits
