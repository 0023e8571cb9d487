"""A request's sampling parameters and token counts as tensors, and sampling with them in plain torch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from treeflash.kernels.sampling.penalties import penalised
from treeflash.kernels.sampling.reference import gumbel, rank, sample

PENALISED, BIASED, MASKED = 1, 2, 4
_TEMPERATURE, _TOP_P, _LEAST, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_TOP_K, _SEED, _FLAGS = range(3)


@dataclass(frozen=True, slots=True)
class SamplingState:
    """A request's sampling parameters and what it has generated; kernels read it at every launch."""

    numbers: Tensor  # [6] float32: temperature, top-p, log of min-p, repetition, presence, frequency
    integers: Tensor  # [3] int64: top-k, seed, flags
    prompt: Tensor  # [V] bool
    counts: Tensor  # [V] float32: occurrences of each generated token, without the rows of the current tree
    bias: Tensor  # [V] float32
    allowed: Tensor  # [rows, V / 32] int32: a grammar's bits for each row, the lowest bit first

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device | str) -> "SamplingState":
        """Return the state of a greedy request that has generated nothing."""
        state = cls(
            torch.zeros(6, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
            torch.zeros(vocabulary, dtype=torch.bool, device=device),
            torch.zeros(vocabulary, device=device),
            torch.zeros(vocabulary, device=device),
            torch.full((rows, -(-vocabulary // 32)), -1, dtype=torch.int32, device=device),
        )
        state.begin()
        return state

    def begin(
        self,
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
        self.prompt.zero_()
        self.counts.zero_()
        self.bias.zero_()
        if prompt is not None and penalties:
            self.prompt[prompt] = True
        if biased is not None and bias is not None and len(biased):
            flags += BIASED
            self.bias.index_add_(0, biased, bias)
        # The seed's bits in a signed word.
        signed = seed - 2**64 if seed >= 2**63 else seed
        self.numbers.copy_(numbers)
        self.integers.copy_(torch.tensor([top_k, signed, flags]))

    def settings(self) -> dict:
        """Return the parameters on the host, as `sample` takes them."""
        numbers, integers = self.numbers.tolist(), self.integers.tolist()
        return {
            "temperature": numbers[_TEMPERATURE],
            "top_k": integers[_TOP_K],
            "top_p": numbers[_TOP_P],
            "min_p": math.exp(numbers[_LEAST]),
            "seed": integers[_SEED] % 2**64,
        }


class NoiseCache:
    """Gumbel noise of the last positions [V each]: consecutive trees sample the same positions again."""

    def __init__(self) -> None:
        self._seed = -1
        self._rows: dict[int, Tensor] = {}

    def at(self, seed: int, positions: Tensor, vocabulary: int) -> Tensor:
        """Return the noise [R, V] of the positions [R]."""
        wanted = positions.tolist()
        if seed != self._seed:
            self._seed, self._rows = seed, {}
        missing = sorted(set(wanted) - self._rows.keys())
        if missing:
            ids = torch.arange(vocabulary, device=positions.device)
            fresh = gumbel(seed, ids, torch.tensor(missing, device=positions.device)[:, None])
            self._rows = {at: row for at, row in self._rows.items() if at >= min(wanted)}
            self._rows.update(zip(missing, fresh, strict=True))
        return torch.stack([self._rows[at] for at in wanted])


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    state: SamplingState,
    cache: NoiseCache | None = None,
) -> Tensor:
    """The package's function of this name on any device, with the parameters read to the host."""
    settings = state.settings()
    noise = None
    if cache is not None and settings["temperature"] > 0 and not _filters(settings):
        noise = cache.at(settings["seed"], positions, logits.shape[1])
    return sample(adjusted(logits, tokens, ancestors, state), positions, noise=noise, **settings)


def _filters(settings: dict) -> bool:
    return settings["top_k"] > 0 or settings["top_p"] < 1 or settings["min_p"] > 0


def rank_rows(
    logits: Tensor, positions: Tensor, anchor: Tensor, count: int, state: SamplingState
) -> tuple[Tensor, Tensor]:
    """The package's function of this name on any device."""
    above = torch.ones(len(logits), dtype=torch.int64, device=logits.device)
    logits = adjusted(logits, anchor, above, state, masks=False)
    ids, scores = rank(logits, positions, count=count, **state.settings())
    missing = count - ids.shape[1]
    ids = ids.masked_fill(scores == -torch.inf, 0)
    return pad(ids, (0, missing)), pad(scores, (0, missing), value=-torch.inf)


def adjusted(
    logits: Tensor, tokens: Tensor, ancestors: Tensor, state: SamplingState, *, masks: bool = True
) -> Tensor:
    numbers, flags = state.numbers.tolist(), int(state.integers[_FLAGS])
    if flags & PENALISED:
        visible = (ancestors[:, None] >> torch.arange(len(tokens), device=logits.device)) & 1
        logits = penalised(
            logits,
            state.prompt,
            state.counts,
            tokens,
            visible,
            repetition=numbers[_REPETITION],
            presence=numbers[_PRESENCE],
            frequency=numbers[_FREQUENCY],
        )
    if flags & BIASED:
        logits = logits + state.bias
    if masks and flags & MASKED:
        allowed = state.allowed[: len(logits)]
        rows = (allowed != -1).any(-1).nonzero()[:, 0]  # the others allow every token
        bits = (allowed[rows, :, None] >> torch.arange(32, device=logits.device)) & 1
        limited = logits[rows].masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
        logits = logits.index_copy(0, rows, limited)
    return logits
