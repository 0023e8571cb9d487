"""Triton kernels of split-KV attention: splits of the context in parallel, then one merge in a fixed order.

The query heads of a KV head are rows of one matmul. The splits depend on the context's length alone, and a
row's sums do not depend on the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeflash.kernels.attention import reference
from treeflash.kernels.kv_cache.format import HeadPool
from treeflash.kernels.kv_cache.rotation import group_size
from treeflash.kernels.kv_cache.triton_kernels import form, load_rows, rotate, rotation_matrix, takes, tensors
from treeflash.kernels.runtime.device import capability_of
from treeflash.kernels.runtime.triton_pdl import launch_options, wait_for_inputs
from treeflash.kernels.tree import MAX_ROWS

SPLITS = 64  # of the context, at most; one more holds the step's own rows
SINKS = tl.constexpr(reference.SINKS)
LOG2_E = 1.4426950408889634


@triton.jit
def _accumulate(queries, keys, values, seen, top, weight, sum_, PRECISION: tl.constexpr):
    """Add one block of K and V [N, D] to the running maximum, weight and sum of each row."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # For a row without a visible key so far any finite number will do.
    level = tl.where(higher == -float("inf"), 0.0, higher)
    shares = tl.exp2(scores - level[:, None])
    fade = tl.exp2(top - level)
    weight = weight * fade + tl.sum(shares, 1)
    sum_ = sum_ * fade[:, None] + tl.dot(shares.to(values.dtype), values, input_precision=PRECISION)
    return higher, weight, sum_


@triton.jit
def _split(SPLITS: tl.constexpr):
    """The program's split: the step's own rows start first, splits that a short context leaves empty last."""
    number = tl.program_id(2)
    return tl.where(number == 0, SPLITS, number - 1)


@triton.jit
def _extent(span, split, SPLITS: tl.constexpr):
    """First and last key of a split of `span` keys, and the number of splits with keys; the last has none.

    64 keys at least and half of the splits up to 8192 keys, since a split's sums are written and read again;
    all of them from 16384 on, for two programs on each of an H200's 132 SMs with 4 KV heads and a row.
    """
    size = tl.maximum(tl.cdiv(span, SPLITS), tl.minimum(tl.cdiv(span, SPLITS // 2), 256))
    size = tl.maximum(tl.cdiv(size, 64) * 64, 64)
    first = tl.where(split < SPLITS, tl.minimum(split * size, span), span)
    return first, tl.minimum(first + size, span), tl.cdiv(span, size)


@triton.jit
def _store_split(
    part_top, part_weight, part_sum, active, used, item, head, split, tile, rows, count, top, weight, sum_,
    KV: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a split's result for `count` rows."""
    at = ((item * KV + head) * (SPLITS + 1) + split) * count + rows
    dims, live = tl.arange(0, BLOCK), rows < count
    tl.store(part_top + at, top, mask=live)
    tl.store(part_weight + at, weight, mask=live)
    tl.store(part_sum + at[:, None] * D + dims[None, :], sum_, mask=live[:, None] & (dims < D)[None, :])
    if (split == SPLITS) & (head == 0) & (tile == 0):
        tl.store(active + item, used)


@triton.jit
def _queries(
    q, item, head, tile, T, scale, ROTATION: tl.constexpr, TYPE: tl.constexpr, KV: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK] queries of a tile, node-major, scaled; rotated in groups of ROTATION unless 0."""
    # A rotated group of values is a row of its own.
    PARTS: tl.constexpr = BLOCK // ROTATION if ROTATION else 1
    WIDTH: tl.constexpr = BLOCK // PARTS
    part = tl.arange(0, BLOCK_M * PARTS)
    rows, dims = (
        tile * BLOCK_M + part // PARTS,
        (part % PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :],
    )
    node = rows // GROUP
    at = ((item * T + node) * KV * GROUP + head * GROUP + rows % GROUP)[:, None] * D + dims
    queries = tl.load(q + at, mask=(node < T)[:, None] & (dims < D), other=0.0).to(tl.float32) * scale
    queries = queries.to(TYPE)
    if ROTATION:
        rotated = tl.dot(queries, rotation_matrix(ROTATION, False)) * (ROTATION**-0.5)
        queries = tl.reshape(rotated.to(TYPE), (BLOCK_M, BLOCK))
    return queries


@triton.jit(do_not_specialize=["T", "table_stride", "window"])
def _paged_kernel(
    q, key_codes, key_scales, value_codes, value_scales, table, lengths, ancestors, positions,
    part_top, part_weight, part_sum, active, scale, T, table_stride, window,
    KV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROTATION: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One KV head, one split, BLOCK_M of its rows (node-major) a program."""
    tile, split, unit = tl.program_id(0), _split(SPLITS), tl.program_id(1).to(tl.int64)
    item, head = unit // KV, unit % KV
    length = tl.load(lengths + item).to(tl.int32)
    # A window's context: the first tokens and the root's window, from `low` on; other rows see no more.
    sinks, low = length, length
    if WINDOW:
        sinks = tl.minimum(length, SINKS)
        low = tl.maximum((length - window + 1) // 64 * 64, sinks)
    first, last, used = _extent(sinks + length - low, split, SPLITS)
    own = tl.where(split == SPLITS, T, 0)
    if (first < last) | (own > 0):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        node = rows // GROUP
        live = node < T
        queries = _queries(q, item, head, tile, T, scale, ROTATION, KEY_TYPE, KV, GROUP, D, BLOCK, BLOCK_M)
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        sum_ = tl.zeros((BLOCK_M, BLOCK), tl.float32)
        table += item * table_stride
        oldest = rows
        if WINDOW:
            oldest = tl.load(positions + item * T + node, mask=live, other=0).to(tl.int32) - window + 1
        for start in range(first, last, BLOCK_N):
            offset = tl.arange(0, BLOCK_N)
            present = start + offset < last
            begin = start
            if WINDOW:
                # Both parts begin at multiples of 64, unless the context ends in the first.
                begin = tl.where(start < sinks, start, start - sinks + low)
            index = begin + offset
            if PAGE % BLOCK_N == 0:
                # A block is in one page; a scalar page index lets the following copies be pipelined.
                page = tl.load(table + begin // PAGE).to(tl.int64)
                base, row = (page * KV + head) * PAGE + begin % PAGE, offset
            else:
                page = tl.load(table + index // PAGE, mask=present, other=0).to(tl.int64)
                base, row = 0, (page * KV + head) * PAGE + index % PAGE
            k = load_rows(key_codes, key_scales, base, row, present, KEYS, D, BLOCK, KEY_TYPE)
            v = load_rows(value_codes, value_scales, base, row, present, VALUES, D, BLOCK, VALUE_TYPE)
            seen = present[None, :]
            if WINDOW:
                seen = seen & ((index < SINKS)[None, :] | (index[None, :] >= oldest[:, None]))
            top, weight, sum_ = _accumulate(queries, k, v, seen, top, weight, sum_, PRECISION)
        bits = tl.load(ancestors + item * T + node, mask=live, other=0)
        for start in tl.range(0, own, BLOCK_N, num_stages=1):
            row = start + tl.arange(0, BLOCK_N)
            present = row < T
            index = length + row
            page = tl.load(table + index // PAGE, mask=present, other=0).to(tl.int64)
            pool_row = (page * KV + head) * PAGE + index % PAGE
            k = load_rows(key_codes, key_scales, 0, pool_row, present, KEYS, D, BLOCK, KEY_TYPE)
            v = load_rows(value_codes, value_scales, 0, pool_row, present, VALUES, D, BLOCK, VALUE_TYPE)
            seen = (((bits[:, None] >> row[None, :].to(tl.int64)) & 1) != 0) & present[None, :]
            if WINDOW:
                held = tl.load(positions + item * T + row, mask=present, other=0).to(tl.int32)
                seen = seen & ((held < SINKS)[None, :] | (held[None, :] >= oldest[:, None]))
            top, weight, sum_ = _accumulate(queries, k, v, seen, top, weight, sum_, PRECISION)
        _store_split(
            part_top, part_weight, part_sum, active, used, item, head, split, tile, rows, T * GROUP,
            top, weight, sum_, KV, SPLITS, D, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "ring", "window"])
def _ring_kernel(
    q, own_keys, own_values, positions, keys, values, slots, lengths, starts,
    part_top, part_weight, part_sum, active, scale, T, ring, window,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same over a ring, which holds position p at p modulo ring; window 0: none."""
    tile, split, unit = tl.program_id(0), _split(SPLITS), tl.program_id(1).to(tl.int64)
    item, head = unit // KV, unit % KV
    slot = tl.load(slots + item).to(tl.int64)
    length = tl.load(lengths + slot).to(tl.int32)
    begin = tl.load(starts + slot).to(tl.int32)
    first, last, used = _extent(tl.minimum(length, ring), split, SPLITS)
    own = tl.where(split == SPLITS, T, 0)
    if (first < last) | (own > 0):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        node = rows // GROUP
        live = node < T
        TYPE: tl.constexpr = keys.dtype.element_ty
        queries = _queries(q, item, head, tile, T, scale, 0, TYPE, KV, GROUP, D, BLOCK, BLOCK_M)
        query = tl.load(positions + item * T + node, mask=live, other=0).to(tl.int32)
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        sum_ = tl.zeros((BLOCK_M, BLOCK), tl.float32)
        for start in range(first, last, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            present = index < last
            # The newest position below `length` that the ring holds at this index.
            held = length - 1 - (length - 1 - index) % ring
            ring_row = (slot * ring + index) * KV + head
            k = load_rows(keys, keys, 0, ring_row, present, "float", D, BLOCK, TYPE)
            v = load_rows(values, values, 0, ring_row, present, "float", D, BLOCK, TYPE)
            apart = query[:, None] - held[None, :]
            seen = (present & (held >= begin))[None, :] & ((window == 0) | (tl.abs(apart) < window))
            if CAUSAL:
                seen = seen & (apart >= 0)
            top, weight, sum_ = _accumulate(queries, k, v, seen, top, weight, sum_, PRECISION)
        for start in tl.range(0, own, BLOCK_N, num_stages=1):
            row = start + tl.arange(0, BLOCK_N)
            present = row < T
            held = tl.load(positions + item * T + row, mask=present, other=0).to(tl.int32)
            own_row = (item * T + row) * KV + head
            k = load_rows(own_keys, own_keys, 0, own_row, present, "float", D, BLOCK, TYPE)
            v = load_rows(own_values, own_values, 0, own_row, present, "float", D, BLOCK, TYPE)
            apart = query[:, None] - held[None, :]
            seen = (present & (held >= begin))[None, :] & ((window == 0) | (tl.abs(apart) < window))
            if CAUSAL:
                seen = seen & (apart >= 0)
            top, weight, sum_ = _accumulate(queries, k, v, seen, top, weight, sum_, PRECISION)
        _store_split(
            part_top, part_weight, part_sum, active, used, item, head, split, tile, rows, T * GROUP,
            top, weight, sum_, KV, SPLITS, D, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _merge_kernel(
    part_top, part_weight, part_sum, active, gate, out, gate_row, gate_head, T,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROTATION: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, GATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query head of one row a program: merge splits by log-sum-exp, rotate back, apply the gate."""
    query_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    item, node = row // T, row % T
    head = query_head // GROUP
    wait_for_inputs(OVERLAP)
    used = tl.load(active + item, cache_modifier=".cg")
    count = T * GROUP
    base = (item * KV + head) * (SPLITS + 1) * count + node * GROUP + query_head % GROUP
    split = tl.arange(0, PARTS)
    filled = (split < used) | (split == SPLITS)
    tops = tl.load(part_top + base + split * count, filled, -float("inf"), cache_modifier=".cg")
    level = tl.max(tops, 0)
    weights = tl.load(part_weight + base + split * count, filled, 0.0, cache_modifier=".cg")
    weight = tl.sum(weights * tl.exp2(tops - level), 0)
    dims = tl.arange(0, BLOCK)
    sum_ = tl.zeros((BLOCK,), tl.float32)
    # The context's splits in their order, then the step's own rows.
    for start in range(0, used + 1, STEP):
        number = start + tl.arange(0, STEP)
        number = tl.where(number == used, SPLITS, number)
        some = (start + tl.arange(0, STEP)) <= used
        at = base + number * count
        share = tl.exp2(tl.load(part_top + at, some, -float("inf"), cache_modifier=".cg") - level)
        source, inside = part_sum + at[:, None] * D + dims[None, :], some[:, None] & (dims < D)[None, :]
        part = tl.load(source, inside, 0.0, cache_modifier=".cg")
        sum_ += tl.sum(part * share[:, None], 0)
    result = sum_ / weight
    if ROTATION:
        result = rotate(result, ROTATION, True)
    if GATE:
        source = gate + row * gate_row + query_head * gate_head + dims
        result *= tl.sigmoid(tl.load(source, dims < D, 0.0, cache_modifier=".cg").to(tl.float32))
    tl.store(out + (row * KV * GROUP + query_head) * D + dims, result, mask=dims < D)


def tiles(dim: int, row_bytes: int, capability: tuple[int, int] | None) -> dict[str, int]:
    """Return rows (nodes x query heads) and keys at a time, stages, warps; by shared memory and registers.

    row_bytes: of a stored key or value, whichever is larger; capability: of an NVIDIA card, None for others.
    sm_75 has 64 KiB a program, sm_86 and sm_89 99 KiB. The number of rows of a step is no parameter, since a
    row's sums must not depend on it. 64 rows in 4 warps hold their sums in half of an SM's registers, so that
    one program's matmuls overlap with the other's decoding; 128 rows in 8 warps take as many instructions for
    the 144 rows of a tree of 24 nodes, and leave no room for a second program.
    """
    wide = max(dim, row_bytes // 2)
    if capability is None or capability < (8, 0):
        warps = 8 if capability is not None and wide > 128 else 4
        return {"BLOCK_M": 32 if wide > 128 else 64, "BLOCK_N": 16, "num_stages": 1, "num_warps": warps}
    keys = 64 if wide <= 128 else 32 if wide <= 256 else 16
    # Two more stages keep one more block in flight, since a block's page index is a load of its own; small
    # blocks need that to hide the memory's latency.
    roomy = capability in ((8, 0), (9, 0), (10, 0))
    stages = 5 if roomy and row_bytes < 2 * dim else 3
    return {"BLOCK_M": 64, "BLOCK_N": keys, "num_stages": stages, "num_warps": 4}


class SplitResults:
    """Buffers of the splits' results, and their merge."""

    def __init__(self, q: Tensor, kv_heads: int):
        batch, rows, heads, dim = q.shape
        self._q, self._kv_heads, self._group = q, kv_heads, heads // kv_heads
        splits = (batch, kv_heads, SPLITS + 1, rows * self._group)
        self.tops, self.weights = (torch.empty(splits, device=q.device) for _ in range(2))
        self.sums = torch.empty(*splits, dim, device=q.device)
        self.active = torch.empty(batch, dtype=torch.int32, device=q.device)

    def grid(self, block: int) -> tuple[int, int, int]:
        batch, rows = self._q.shape[:2]
        return triton.cdiv(rows * self._group, block), batch * self._kv_heads, SPLITS + 1

    def merge(self, gate: Tensor | None, rotation: int = 0) -> Tensor:
        """Return the output [B, T, H, D], rotated back in groups of `rotation` values unless it is 0."""
        batch, rows, heads, dim = self._q.shape
        out = torch.empty(batch, rows, heads, dim, device=self._q.device)
        gates = out if gate is None else gate
        if gates.stride(-1) != 1 or gates.stride(0) != rows * gates.stride(1):
            gates = gates.contiguous()
        _merge_kernel[(heads, batch * rows)](
            self.tops, self.weights, self.sums, self.active, gates, out, gates.stride(1), gates.stride(2),
            rows,
            KV=self._kv_heads, GROUP=self._group, D=dim, BLOCK=triton.next_power_of_2(dim), ROTATION=rotation,
            SPLITS=SPLITS, PARTS=triton.next_power_of_2(SPLITS + 1), STEP=32, GATE=gate is not None,
            num_warps=8, **launch_options(out.device),
        )  # fmt: skip
        return out


def _type(pool: HeadPool) -> tl.dtype:
    """Return the type of the operands of a matmul with rows of a pool."""
    if pool.codes.dtype == torch.float32:
        return tl.float32
    if pool.codes.dtype == torch.bfloat16:
        # Only the interpreter runs on a CPU, and its matmul treats bfloat16 as integers.
        return tl.float32 if pool.codes.device.type == "cpu" else tl.bfloat16
    return tl.float16


def paged_attention(
    q: Tensor,
    keys: HeadPool,
    values: HeadPool,
    page_table: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    positions: Tensor | None = None,
    *,
    window: int | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention; for a tree of at most MAX_ROWS rows, the root at position `lengths`.

    Two launches for all formats: queries are rotated in the first, the output back in the second.
    """
    q = q.contiguous()
    batch, rows, heads, dim = q.shape
    kv_heads, page = keys.codes.shape[1:3]
    assert rows <= MAX_ROWS, f"{rows} rows, at most {MAX_ROWS}"
    assert takes(keys) and takes(values) and keys.dim == values.dim == dim, f"heads of {dim}"
    assert keys.codes.shape[:3] == values.codes.shape[:3], f"{keys.codes.shape}, {values.codes.shape}"
    assert heads % kv_heads == 0, f"{heads} heads over {kv_heads}"
    assert window is None or (positions is not None and positions.shape == (batch, rows)), "no positions"
    parts, rotation = SplitResults(q, kv_heads), group_size(dim)
    row_bytes = max(keys.format.code_bytes(dim), values.format.code_bytes(dim))
    chosen = tiles(dim, row_bytes, capability_of(q.device))
    _paged_kernel[parts.grid(chosen["BLOCK_M"])](
        q, *tensors(keys), *tensors(values), page_table, lengths, ancestors.contiguous(),
        ancestors if positions is None else positions.contiguous(),
        parts.tops, parts.weights, parts.sums, parts.active,
        dim**-0.5 * LOG2_E, rows, page_table.stride(0), window or 0,
        KV=kv_heads, GROUP=heads // kv_heads, PAGE=page, D=dim, BLOCK=triton.next_power_of_2(dim),
        ROTATION=rotation if keys.format.quantised else 0, KEYS=form(keys), VALUES=form(values),
        KEY_TYPE=_type(keys), VALUE_TYPE=_type(values), SPLITS=SPLITS, WINDOW=window is not None,
        PRECISION="ieee", **chosen,
    )  # fmt: skip
    return parts.merge(gate, rotation if values.format.quantised else 0)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    starts: Tensor,
    *,
    window: int | None,
    causal: bool,
) -> Tensor:
    """See reference.block_attention."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    rows, heads, dim = q.shape[1:]
    kv_heads = k.shape[2]
    assert ring_keys.dtype == ring_values.dtype and ring_keys.shape == ring_values.shape, f"{ring_keys.dtype}"
    assert ring_keys.is_contiguous() and ring_values.is_contiguous(), f"{ring_keys.stride()}"
    assert dim >= 16 and heads % kv_heads == 0, f"heads of {dim}, {heads} over {kv_heads}"
    parts = SplitResults(q, kv_heads)
    chosen = tiles(dim, dim * ring_keys.element_size(), capability_of(q.device))
    _ring_kernel[parts.grid(chosen["BLOCK_M"])](
        q, k, v, positions.contiguous(), ring_keys, ring_values, slots, lengths, starts,
        parts.tops, parts.weights, parts.sums, parts.active, dim**-0.5 * LOG2_E, rows, ring_keys.shape[1],
        window or 0,
        KV=kv_heads, GROUP=heads // kv_heads, D=dim, BLOCK=triton.next_power_of_2(dim), SPLITS=SPLITS,
        CAUSAL=causal, PRECISION="ieee", **chosen,
    )  # fmt: skip
    return parts.merge(None)
