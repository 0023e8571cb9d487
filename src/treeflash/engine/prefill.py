"""How a prompt is read in chunks: their size, what one takes of a GPU's memory, what the draft needs of them.

The size follows from the card alone, so that where a prompt is cut follows from its tokens.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from treeflash.models.decoder import Decoder
from treeflash.models.dflash import PIECE
from treeflash.models.spec import ModelSpec
from treeflash.models.step import MAX_ROWS, Step
from treeflash.spec.draft import Drafter
from treeflash.state.sequences import SequenceStates

CPU_CHUNK = 512  # a larger one is no faster there, and tells less often how far it is
# Bytes of a GPU, and tokens: the more rows share an expanded weight, the less it costs (18% of the arithmetic
# at 2048 on an H200, 4.5% at 8192).
CHUNKS = ((60 << 30, 8192), (30 << 30, 4096), (0, 2048))
EXPANDED_WEIGHTS = 1 << 26  # float16, at a time, for products of many rows
EXPANDED_PAGES = 64 << 20  # bytes of keys and values brought together at a time


def chunk_size(kind: str, memory: int) -> int:
    """Tokens of a chunk on a device of this kind (cpu, cuda) with so many bytes that may be used."""
    if kind == "cpu":
        return CPU_CHUNK
    return next(tokens for least, tokens in CHUNKS if memory >= least)


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


def prefill_bytes(spec: ModelSpec, chunk: int, taps: int = 0) -> int:
    """Most that a chunk takes on a GPU beside weights and states; `taps`: layers that a draft reads."""
    width = spec.width

    # The residual stream and what is added to it, of this layer's halves and the one before; packed for a
    # product.
    stream = 6 * 4 * width + 2 * width
    inner = max(spec.feed_forward, spec.experts.shared_width if spec.experts else 0)
    stages = [4 * 2 * inner + 2 * inner + 4 * width]
    query = spec.heads * spec.head_dim * (2 if spec.family.gated_query else 1)
    qkv = query + 2 * spec.kv_heads * spec.head_dim
    heads = 4 * spec.heads * spec.head_dim
    stages += [4 * qkv + 2 * heads, 4 * qkv + heads + heads // 2 + 4 * width]
    if spec.delta is not None:
        delta = spec.delta
        joined = delta.channels + delta.inner + 2 * delta.value_heads
        # Queries, keys, what is erased and what is seen in 16 bits; values, whose place the outputs take.
        run = 2 * (delta.channels - delta.inner) + 6 * delta.inner + 2 * 64 * delta.value_heads
        stages += [4 * joined + run, 4 * joined + 6 * delta.inner + 4 * width]
    tapped = 4 * taps * width
    fixed = 2 * EXPANDED_WEIGHTS + EXPANDED_PAGES + min(chunk, PIECE) * (2 * taps + 12) * width
    return chunk * (stream + max(stages) + tapped) + fixed
