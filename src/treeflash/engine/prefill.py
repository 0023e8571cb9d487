"""How a prompt is processed in chunks, and which of their rows the draft needs."""

from collections.abc import Iterable

import torch
from torch import Tensor

from treeflash.models.decoder import Decoder
from treeflash.models.step import MAX_ROWS, Step
from treeflash.spec.draft import Drafter
from treeflash.state.sequences import SequenceStates


def rows_wanted(start: int, stop: int, ends: Iterable[int], reach: int) -> int:
    """Of the chunk's last positions, how many a draft that looks `reach` back still needs.

    ends: where its state is used or kept, the prompt's end among them.
    """
    needed = min(end for end in ends if end >= stop) - reach
    return min(stop - start, max(0, stop - needed))


def read_chunk(
    target: Decoder, states: SequenceStates, drafter: Drafter, step: Step, tokens: list[int], wanted: int
) -> Tensor:
    """The last row's hidden state [1, width]; all else of a chunk is large, and gone when this returns."""
    output = target.forward(step, states.buffers, taps=drafter.taps, tapped=wanted)
    states.advance(step)
    drafter.append(tokens, output.features[0])
    return output.hidden[:, -1].clone()


def compile_chunk(target: Decoder, states: SequenceStates, slot: int) -> None:
    """Runs a small chunk that leaves nothing, so that the first prompt does not wait for its kernels."""
    rows = min(2 * MAX_ROWS, states.max_ctx)
    states.reserve(slot, rows)
    slots = torch.tensor([slot], device=target.device)
    step = Step.chunk(slots, torch.zeros_like(slots).expand(1, rows), states.buffers.lengths[slots])
    target.forward(step, states.buffers)
