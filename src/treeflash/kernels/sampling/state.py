"""What a request asks of its draws, as tensors that kernels read at every launch; the plain draw."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from treeflash.kernels.sampling.penalties import penalised
from treeflash.kernels.sampling.reference import draw, rank

PENALISED, BIASED, MASKED = 1, 2, 4
_TEMPERATURE, _TOP_P, _LEAST, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_TOP_K, _SEED, _FLAGS = range(3)


@dataclass(frozen=True, slots=True)
class DrawState:
    """What a request asks of its draws and what it has written; kernels read it anew at every launch."""

    numbers: Tensor  # [6] float32: temperature, top-p, log of min-p, repetition, presence, frequency
    integers: Tensor  # [3] int64: top-k, seed, flags
    prompt: Tensor  # [V] bool
    written: Tensor  # [V] float32: how often each token stands in the answer, the tree's rows aside
    bias: Tensor  # [V] float32
    allowed: Tensor  # [rows, V / 32] int32: a grammar's bits for each row, the lowest bit first

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device | str) -> "DrawState":
        """Greedy, nothing written."""
        state = cls(
            torch.zeros(6, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
            torch.zeros(vocabulary, dtype=torch.bool, device=device),
            torch.zeros(vocabulary, device=device),
            torch.zeros(vocabulary, device=device),
            torch.full((rows, -(-vocabulary // 32)), -1, dtype=torch.int32, device=device),
        )
        state.ask()
        return state

    def ask(
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
        """A new request: its numbers, the prompt's tokens [n], what to add to some logits."""
        # Smaller temperatures are denormal, which some devices take for zero.
        cool = max(temperature, 1e-30) if temperature > 0 else 0.0
        least = math.log(min_p) if min_p > 0 else -math.inf
        numbers = torch.tensor([cool, top_p, least, repetition, presence, frequency])
        penalties = repetition != 1 or presence != 0 or frequency != 0
        flags = PENALISED * penalties + MASKED * masked
        self.prompt.zero_()
        self.written.zero_()
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
        """The numbers on the host, as `draw` takes them."""
        numbers, integers = self.numbers.tolist(), self.integers.tolist()
        return {
            "temperature": numbers[_TEMPERATURE],
            "top_k": integers[_TOP_K],
            "top_p": numbers[_TOP_P],
            "min_p": math.exp(numbers[_LEAST]),
            "seed": integers[_SEED] % 2**64,
        }


def draw_rows(
    logits: Tensor, positions: Tensor, tokens: Tensor, ancestors: Tensor, state: DrawState
) -> Tensor:
    """As the package's function of this name, on any device, with the numbers fetched to the host."""
    return draw(adjusted(logits, tokens, ancestors, state), positions, **state.settings())


def rank_rows(
    logits: Tensor, positions: Tensor, anchor: Tensor, count: int, state: DrawState
) -> tuple[Tensor, Tensor]:
    """As the package's function of this name."""
    above = torch.ones(len(logits), dtype=torch.int64, device=logits.device)
    logits = adjusted(logits, anchor, above, state, masks=False)
    ids, scores = rank(logits, positions, count=count, **state.settings())
    missing = count - ids.shape[1]
    ids = ids.masked_fill(scores == -torch.inf, 0)
    return pad(ids, (0, missing)), pad(scores, (0, missing), value=-torch.inf)


def adjusted(
    logits: Tensor, tokens: Tensor, ancestors: Tensor, state: DrawState, *, masks: bool = True
) -> Tensor:
    numbers, flags = state.numbers.tolist(), int(state.integers[_FLAGS])
    if flags & PENALISED:
        visible = (ancestors[:, None] >> torch.arange(len(tokens), device=logits.device)) & 1
        logits = penalised(
            logits,
            state.prompt,
            state.written,
            tokens,
            visible,
            repetition=numbers[_REPETITION],
            presence=numbers[_PRESENCE],
            frequency=numbers[_FREQUENCY],
        )
    if flags & BIASED:
        logits = logits + state.bias
    if masks and flags & MASKED:
        bits = (state.allowed[: len(logits), :, None] >> torch.arange(32, device=logits.device)) & 1
        logits = logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
    return logits
