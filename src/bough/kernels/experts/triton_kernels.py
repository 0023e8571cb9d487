"""Routing, grouping and combining in Triton, and the experts' matmuls for GPUs without CUDA C++ kernels.

Nothing is read back: the number of chunks stays on the device, grids have the size of the worst case.
Those with OVERLAP use programmatic dependent launch, see runtime/triton_pdl.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.experts.stack import ExpertStack, Routing, most_chunks
from bough.kernels.quant_matmul.rows import PackedRows, empty_rows
from bough.kernels.quant_matmul.triton_kernels import (
    _fields,
    _low,
    _weights,
    constants,
    row_factor,
    table_of,
)
from bough.kernels.runtime.triton_pdl import launch_options, wait_for_inputs

_OUTPUTS = 4  # of the router in one program: the program's weights stay in registers
_ROWS_EACH = 4  # rows of a program of the router
_FEW_ROWS = 4  # up to here one program routes and groups, without a second launch
_SOME_ROWS = 64  # up to here a warp routes each row
_PAIRS = 64  # that are placed or compared at a time
_MATRIX_ROWS = 64
_WARPS = 2  # with two warps one instruction serves every number of tokens
TOKENS = 16  # of a chunk in the Triton matmul


@triton.jit(do_not_specialize=["rows"])
def _router_kernel(
    x, router, gate, logits, packed, scale_out, rows, group_stride, row_stride,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logits [rows, EXPERTS + 1], the shared expert's gate last; the first programs pack the rows."""
    n, k = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, BLOCK)
    inside = k < WIDTH
    weight = tl.load(
        router + n[:, None] * WIDTH + k[None, :], mask=(n < EXPERTS)[:, None] & inside[None, :], other=0.0
    )
    gate_output = (n == EXPERTS)[:, None] & inside[None, :]
    weight += tl.load(gate + tl.zeros_like(n)[:, None] + k[None, :], mask=gate_output, other=0.0)
    wait_for_inputs(OVERLAP)
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        value = tl.load(x + row * WIDTH + k, inside, 0.0, cache_modifier=".cg")
        sums = tl.sum(weight * value[None, :], 1)
        tl.store(logits + row * (EXPERTS + 1) + n, sums, mask=n <= EXPERTS)
        if tl.program_id(0) == 0:
            times, inverse = row_factor(tl.max(tl.abs(value), 0))
            tl.store(scale_out + row, inverse)
            at = k // 32 * group_stride + row * row_stride + k % 32
            tl.store(packed + at, (value * times).to(tl.float16), mask=k < PADDED)


@triton.jit
def _place(expert_ids, order, pairs, first, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """Write PAIRS pairs to their places in the order of experts."""
    pair = first + tl.arange(0, PAIRS)
    mine = tl.load(expert_ids + pair, mask=pair < pairs, other=EXPERTS, cache_modifier=".cg")
    place = tl.zeros((PAIRS,), tl.int32)
    for start in range(0, pairs, PAIRS):
        other = start + tl.arange(0, PAIRS)
        theirs = tl.load(expert_ids + other, mask=other < pairs, other=EXPERTS, cache_modifier=".cg")
        before = theirs[None, :] < mine[:, None]
        before |= (theirs[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(order + place, pair, mask=pair < pairs)


@triton.jit
def _write_chunks(
    expert_ids, chunks, count, pairs, BLOCK: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr
):
    """Write the chunks of all experts and their number."""
    expert = tl.arange(0, BLOCK)
    users = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, PAIRS):
        other = start + tl.arange(0, PAIRS)
        theirs = tl.load(expert_ids + other, mask=other < pairs, other=-1, cache_modifier=".cg")
        users += tl.sum((theirs[None, :] == expert[:, None]).to(tl.int32), 1)
    pieces = (users + TOKENS - 1) // TOKENS
    first, at = tl.cumsum(users, 0) - users, tl.cumsum(pieces, 0) - pieces
    tl.store(count, tl.sum(pieces, 0))
    for piece in range(0, tl.max(pieces, 0)):
        chunk = chunks + (at + piece) * 4
        inside = piece < pieces
        tl.store(chunk, expert, mask=inside)
        tl.store(chunk + 1, first + piece * TOKENS, mask=inside)
        tl.store(chunk + 2, tl.minimum(users - piece * TOKENS, TOKENS), mask=inside)
        tl.store(chunk + 3, expert, mask=inside)  # its place, where all experts have one


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits, weights, expert_ids, order, chunks, count, rows,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, USED: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The experts of ROWS rows and their weights; with GROUP, of all rows, also the order and the chunks."""
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    wait_for_inputs(OVERLAP)
    at = row.to(tl.int64)[:, None] * (EXPERTS + 1) + expert[None, :]
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    values = tl.load(logits + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
    largest, total = tl.max(values, 1), tl.zeros((ROWS,), tl.float32)
    weight, index = tl.zeros((ROWS, RANKS), tl.float32), tl.zeros((ROWS, RANKS), tl.int32)
    for number in range(USED):
        best = tl.max(values, 1)
        # NaN equals nothing: the number stays that of an expert.
        best_expert = tl.min(tl.where(values == best[:, None], expert[None, :], EXPERTS - 1), 1)
        share = tl.exp(best - largest)
        total += share
        weight = tl.where((rank == number)[None, :], share[:, None], weight)
        index = tl.where((rank == number)[None, :], best_expert[:, None], index)
        values = tl.where(expert[None, :] == best_expert[:, None], float("-inf"), values)
    pair = row[:, None] * USED + rank[None, :]
    mine = (row < rows)[:, None] & (rank < USED)[None, :]
    tl.store(weights + pair, weight / total[:, None], mask=mine)
    tl.store(expert_ids + pair, index, mask=mine)
    if GROUP:
        tl.debug_barrier()  # the other threads' choices are read from memory
        for first in range(0, rows * USED, PAIRS):
            _place(expert_ids, order, rows * USED, first, EXPERTS, PAIRS)
        _write_chunks(expert_ids, chunks, count, rows * USED, BLOCK, PAIRS, TOKENS)


@triton.jit(do_not_specialize=["pairs"])
def _group_kernel(
    expert_ids, order, chunks, count, pairs,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The order of pairs, PAIRS a program; program 0 writes the chunks."""
    wait_for_inputs(OVERLAP)
    if tl.program_id(0) == 0:
        _write_chunks(expert_ids, chunks, count, pairs, BLOCK, PAIRS, TOKENS)
    else:
        _place(expert_ids, order, pairs, (tl.program_id(0) - 1) * PAIRS, EXPERTS, PAIRS)


@triton.jit(do_not_specialize=["share"])
def _matmul_kernel(
    data, cold, table, row_scale, x, x_scale, y, chunks, count, order, depth, rows, expert_tiles, share,
    group_stride, row_stride,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    OFFSET: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, TILE_BYTES: tl.constexpr,
):  # fmt: skip
    """y [pairs, rows]: ROWS rows of one expert's matrix times the x of one chunk; see quant_matmul."""
    if tl.program_id(1) < tl.load(count):
        PER: tl.constexpr = 2 if LOW == 16 else 4
        HALVES: tl.constexpr = 2 if LOW == 4 else 1
        WORDS: tl.constexpr = UNIT // (PER * HALVES)
        x_type: tl.constexpr = tl.int32 if LOW == 16 else tl.int64
        chunk = chunks + tl.program_id(1) * 4
        expert, place, users, at = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
        weights_from = data
        if at < 0:
            weights_from = cold
            at = -1 - at
        weights_from += at.to(tl.int64) * depth * expert_tiles * TILE_BYTES
        m = tl.arange(0, COLUMNS)[None, :]
        pair = tl.load(order + place + m, mask=m < users, other=0)
        source = pair // share
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        g, r = (n & 7)[:, None], ((n >> 3) & 1)[:, None]
        c, k = tl.arange(0, WORDS)[None, :], tl.arange(0, WORDS)[:, None]
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        x_words = x.to(tl.pointer_type(x_type)) + (k // (32 // PER)) * (HALVES * group_stride // PER)
        x_words += source.to(tl.int64) * (row_stride // PER) + k % (32 // PER)
        for step in range(0, depth):
            tile = weights_from + ((step * expert_tiles + n // 16).to(tl.int64) * TILE_BYTES)[:, None]
            low = _low(tile, g, r, c, LOW)
            for h in tl.static_range(HALVES):
                high, scale, minimum = _fields(tile, low, g, r, c, h, LOW, HIGH, SCALES, UNIT)
                words = x_words + (step * (UNIT // 32) + h) * (group_stride // PER)
                several = tl.load(words, mask=m < users, other=0)
                for q in tl.static_range(PER):
                    weight = _weights(low, high, scale, minimum, table, r, c, h, q, LOW, HIGH, OFFSET, TABLE)
                    part = (several >> (16 * q)).to(tl.int16).to(tl.float16, bitcast=True)
                    sums = tl.dot(weight.to(tl.float16), part, sums)
        sums = sums * tl.load(row_scale + expert * expert_tiles * 16 + n)[:, None]
        sums = sums * tl.load(x_scale + source, mask=m < users, other=0.0)
        target = y + pair.to(tl.int64) * rows + n[:, None]
        tl.store(target, sums, mask=(n[:, None] < rows) & (m < users))


@triton.jit
def _combine_kernel(
    shared, logits, y, weights, out,
    EXPERTS: tl.constexpr, USED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The outputs of a row's experts, in order of their ranks, added to the gated shared one."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait_for_inputs(OVERLAP)
    gate = tl.sigmoid(tl.load(logits + row * (EXPERTS + 1) + EXPERTS, cache_modifier=".cg"))
    total = tl.load(shared + row * WIDTH + column, inside, 0.0, cache_modifier=".cg") * gate
    for rank in tl.static_range(USED):
        weight = tl.load(weights + row * USED + rank, cache_modifier=".cg")
        at = y + (row * USED + rank) * WIDTH + column
        total += tl.load(at, inside, 0.0, cache_modifier=".cg") * weight
    tl.store(out + row * WIDTH + column, total, mask=inside)


def router(x: Tensor, weight: Tensor, gate: Tensor) -> tuple[PackedRows, Tensor]:
    """Return x [M, width] packed for a matmul, and the logits [M, E + 1] of weight [E, width] and gate."""
    rows, width = x.shape
    assert x.dtype == torch.float32 and x.is_contiguous(), (x.dtype, x.stride())
    assert weight.is_contiguous() and weight.shape[1] == width == len(gate), (weight.shape, gate.shape)
    experts = len(weight)
    assert rows * max(width, experts + 1) < 1 << 31, (rows, width, experts)
    packed = empty_rows(rows, width, x.device)
    logits = torch.empty(rows, experts + 1, device=x.device)
    grid = (triton.cdiv(experts + 1, _OUTPUTS), triton.cdiv(rows, _ROWS_EACH))
    _router_kernel[grid](
        x, weight, gate, logits, packed.data, packed.scale, rows, *packed.strides,
        EXPERTS=experts, WIDTH=width, PADDED=packed.padded_columns, OUTPUTS=_OUTPUTS,
        BLOCK=triton.next_power_of_2(packed.padded_columns), num_warps=8, **launch_options(x.device),
    )  # fmt: skip
    return packed, logits


def route(logits: Tensor, used: int, tokens: int) -> Routing:
    """Return the experts of the rows of logits [M, E + 1], and their pairs in chunks of at most `tokens`."""
    rows, experts, device = len(logits), logits.shape[1] - 1, logits.device
    weights = torch.empty(rows, used, device=device)
    expert_ids = torch.empty(rows, used, dtype=torch.int32, device=device)
    order = torch.empty(rows * used, dtype=torch.int32, device=device)
    chunks = torch.empty(most_chunks(rows * used, experts, tokens), 4, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    sizes = {"EXPERTS": experts, "BLOCK": max(16, triton.next_power_of_2(experts)), "PAIRS": _PAIRS}
    options = {**sizes, "TOKENS": tokens, **launch_options(device)}
    few = rows <= _FEW_ROWS
    block, warps = (triton.next_power_of_2(rows), 8) if few else (1, 1) if rows <= _SOME_ROWS else (16, 8)
    _route_kernel[(triton.cdiv(rows, block),)](
        logits, weights, expert_ids, order, chunks, count, rows,
        USED=used, RANKS=triton.next_power_of_2(used), ROWS=block, GROUP=few, num_warps=warps, **options,
    )  # fmt: skip
    if not few:
        grid = (1 + triton.cdiv(rows * used, _PAIRS),)
        _group_kernel[grid](expert_ids, order, chunks, count, rows * used, num_warps=8, **options)
    return Routing(weights, expert_ids, order, chunks, count, tokens)


def matmul(x: PackedRows, stack: ExpertStack, routing: Routing, cold: Tensor, out: Tensor) -> None:
    blocks = triton.cdiv(stack.rows, _MATRIX_ROWS)
    depth, expert_tiles = stack.data.shape[1:3]
    _matmul_kernel[(blocks, len(routing.chunks))](
        stack.data, cold, table_of(stack.layout, out.device), stack.row_scale, x.data, x.scale, out,
        routing.chunks, routing.count, routing.order, depth, stack.rows, expert_tiles,
        routing.pairs // x.rows, *x.strides,
        COLUMNS=TOKENS, ROWS=_MATRIX_ROWS, **constants(stack.layout), num_warps=_WARPS, num_stages=3,
    )  # fmt: skip


def combine(shared: Tensor, logits: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
    """See reference.combine; logits [M, E + 1], the gate's last; outputs [M * k, width]."""
    rows, width = shared.shape
    assert shared.is_contiguous() and outputs.is_contiguous(), (shared.stride(), outputs.stride())
    out = torch.empty(rows, width, device=shared.device)
    block = 1024
    _combine_kernel[(triton.cdiv(width, block), rows)](
        shared, logits, outputs, weights, out,
        EXPERTS=logits.shape[1] - 1, USED=weights.shape[1], WIDTH=width, BLOCK=block, num_warps=4,
        **launch_options(shared.device),
    )  # fmt: skip
    return out
