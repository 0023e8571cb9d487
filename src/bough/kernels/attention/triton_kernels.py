"""Triton kernels of split-KV attention: splits of the context in parallel, then one merge in a fixed order.

The query heads of a KV head are rows of one matmul. Over the KV cache a row's bits depend on its path alone:
tree.cu describes the partial results. Over a draft's ring the splits follow the ring's length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.attention import records
from bough.kernels.attention.records import PagedContext
from bough.kernels.kv_cache.format import HeadPool, KVRing
from bough.kernels.kv_cache.rotation import group_size
from bough.kernels.kv_cache.triton_kernels import form, load_rows, rotate, rotation_matrix, takes, tensors
from bough.kernels.runtime.device import capability_of
from bough.kernels.runtime.triton_pdl import launch_options, wait_for_inputs

SPLITS, TIERS = records.SPLITS, records.TIERS
TAILS = 2  # partial results after the splits: a row's last two blocks
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
    sum_ = tl.dot(shares.to(values.dtype), values, sum_ * fade[:, None], input_precision=PRECISION)
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
def _store_part(
    part_top, part_weight, part_sum, head, slot, query, count, stored, top, weight, sum_,
    SLOTS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the partial results of queries `query` of `count`, those that are `kept`."""
    at = (head * SLOTS + slot) * count + query
    dims = tl.arange(0, BLOCK)
    tl.store(part_top + at, top, mask=stored)
    tl.store(part_weight + at, weight, mask=stored)
    tl.store(part_sum + at[:, None] * D + dims[None, :], sum_, mask=stored[:, None] & (dims < D)[None, :])


@triton.jit
def _queries(
    q, start, end, head, scale, ROTATION: tl.constexpr, TYPE: tl.constexpr, KV: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK] queries of a KV head from number `start` (row-major) up to `end`, scaled; rotated in
    groups of ROTATION unless 0.
    """
    # A rotated group of values is a row of its own.
    PARTS: tl.constexpr = BLOCK // ROTATION if ROTATION else 1
    WIDTH: tl.constexpr = BLOCK // PARTS
    part = tl.arange(0, BLOCK_M * PARTS)
    query, dims = start + part // PARTS, (part % PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = ((query // GROUP * KV + head) * GROUP + query % GROUP)[:, None] * D + dims
    queries = tl.load(q + at, mask=(query < end)[:, None] & (dims < D), other=0.0).to(tl.float32) * scale
    queries = queries.to(TYPE)
    if ROTATION:
        rotated = tl.dot(queries, rotation_matrix(ROTATION, False)) * (ROTATION**-0.5)
        queries = tl.reshape(rotated.to(TYPE), (BLOCK_M, BLOCK))
    return queries


@triton.jit
def _bit_count(bits):
    """How many of the 64 bits are set."""
    bits = bits.to(tl.uint64)
    bits -= (bits >> 1) & 0x5555555555555555
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits += bits >> 8
    bits += bits >> 16
    return ((bits + (bits >> 32)) & 127).to(tl.int32)


@triton.jit
def _sequence(
    first, tile, row, sequences, most, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, RAGGED: tl.constexpr
):
    """The sequence of `row`, or below 0 of `tile`; the tile's number in it; its first row and their count."""
    if RAGGED:
        item = -1
        for b in range(0, sequences):
            begin, end = tl.load(first + b), tl.load(first + b + 1)
            tiles = tl.cdiv((end - begin) * GROUP, BLOCK_M).to(tl.int32)
            here = tl.where(row < 0, tile < tiles, row < end)
            item = tl.where((item < 0) & here, b, item)
            tile = tl.where(item < 0, tile - tiles, tile)
        begin = tl.load(first + tl.maximum(item, 0))
        end = tl.load(first + tl.maximum(item, 0) + 1)
        # A tile after the last: no rows.
        return tl.maximum(item, 0), tile, begin, tl.where(item < 0, 0, end - begin).to(tl.int32)
    else:
        tiles = tl.cdiv(most * GROUP, BLOCK_M)
        item = tl.where(row < 0, tile // tiles, row // most)
        return item, tile % tiles, item.to(tl.int64) * most, most


@triton.jit
def _splits_of(
    block, SPLITS: tl.constexpr, SPLITS0: tl.constexpr, TIER0: tl.constexpr, SPLITS1: tl.constexpr,
    TIER1: tl.constexpr,
):  # fmt: skip
    """How many splits a row in this block has."""
    return tl.where(block <= TIER0, SPLITS0, tl.where(block <= TIER1, SPLITS1, SPLITS))


@triton.jit
def _add_committed(
    q, key_codes, key_scales, value_codes, value_scales, table, ancestors, part_top, part_weight, part_sum,
    scale, rows, window, length, head, turn, tile, start_row, count,
    KV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROTATION: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr, SPLITS: tl.constexpr, SPLITS0: tl.constexpr, TIER0: tl.constexpr,
    SPLITS1: tl.constexpr, TIER1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One slot of a tile of BLOCK_M queries: the block before the root's (turn 0) or a split."""
    PER: tl.constexpr = 64 // BLOCK_N
    offset, root, split = tl.arange(0, BLOCK_N), length // 64, turn - 1
    query = start_row * GROUP + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = query < (start_row + count) * GROUP
    position = length + _bit_count(tl.load(ancestors + query // GROUP, mask=live, other=1)) - 1
    newest_block = position // 64
    splits = _splits_of(newest_block, SPLITS, SPLITS0, TIER0, SPLITS1, TIER1)
    # Rows of this tile may be in the block after the root's, and there have another number of splits.
    deep = tl.max(newest_block, 0) - root
    before = _splits_of(root, SPLITS, SPLITS0, TIER0, SPLITS1, TIER1)
    after = _splits_of(root + deep, SPLITS, SPLITS0, TIER0, SPLITS1, TIER1)
    passes = tl.where((before != after) & (turn > 0), 2, 1)
    for again in tl.range(0, tl.where(count > 0, passes, 0), num_stages=1):
        stride = tl.where(again == 0, before, after)
        # Blocks of the split, up to `last`, that rows with this number of splits have.
        last = root - 2 + tl.where(before != after, again, deep)
        some = (split < stride) & (split <= last)
        begin, sink, slot = split, 0, split
        if WINDOW:
            oldest = tl.maximum(length - window + 1, 0) // 64
            begin += tl.maximum(tl.cdiv(oldest - begin, stride), 0) * stride
            sink = ((split == 0) & (begin > 0) & (SINKS > 0)).to(tl.int32)
        blocks = sink + tl.maximum(tl.cdiv(last + 1 - begin, stride), 0)
        # The last block of this slot that a query has; below 0: it has no such slot.
        newest = tl.where(splits == stride, newest_block - 2, -1)
        if turn == 0:
            begin, sink, blocks, slot, some = root - 1, 0, 1, SPLITS, root > 0
            newest = tl.where(newest_block == root, root - 1, -1)
        newest = tl.where(live, newest, -1)
        if some:
            queries = _queries(
                q, start_row * GROUP + tile * BLOCK_M, (start_row + count) * GROUP, head, scale,
                ROTATION, KEY_TYPE, KV, GROUP, D, BLOCK, BLOCK_M,
            )  # fmt: skip
            top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            weight = tl.zeros((BLOCK_M,), tl.float32)
            sum_ = tl.zeros((BLOCK_M, BLOCK), tl.float32)
            for step in range(0, blocks * PER):
                block = begin + (step // PER - sink) * stride
                if WINDOW:
                    block = tl.where(step // PER < sink, 0, block)
                index = block * 64 + step % PER * BLOCK_N
                present = offset < BLOCK_N
                if PAGE % BLOCK_N == 0:
                    # Keys are in one page; a scalar page index lets the following copies be pipelined.
                    page = tl.load(table + index // PAGE).to(tl.int64)
                    base, pool_row = (page * KV + head) * PAGE + index % PAGE, offset
                else:
                    page = tl.load(table + (index + offset) // PAGE).to(tl.int64)
                    base, pool_row = 0, (page * KV + head) * PAGE + (index + offset) % PAGE
                k = load_rows(key_codes, key_scales, base, pool_row, present, KEYS, D, BLOCK, KEY_TYPE)
                v = load_rows(
                    value_codes, value_scales, base, pool_row, present, VALUES, D, BLOCK, VALUE_TYPE
                )
                seen = (block <= newest)[:, None] & present[None, :]
                if WINDOW:
                    at = (index + offset)[None, :]
                    seen = seen & ((at < SINKS) | (at > (position - window)[:, None]))
                top, weight, sum_ = _accumulate(queries, k, v, seen, top, weight, sum_, PRECISION)
            _store_part(
                part_top, part_weight, part_sum, head, slot, query, rows * GROUP, newest >= 0,
                top, weight, sum_, SPLITS + 2, D, BLOCK,
            )  # fmt: skip


@triton.jit
def _add_assembled(
    q, key_codes, key_scales, value_codes, value_scales, table, ancestors, part_top, part_weight, part_sum,
    active, scale, rows, window, length, head, row,
    KV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROTATION: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr, SPLITS: tl.constexpr, SPLITS0: tl.constexpr, TIER0: tl.constexpr,
    SPLITS1: tl.constexpr, TIER1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The last blocks of one row that hold rows of the tree."""
    bits = tl.load(ancestors + row)
    position = length + _bit_count(bits) - 1
    newest = position // 64
    query, live = row * GROUP + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_M) < GROUP
    if head == 0:
        used = _splits_of(newest, SPLITS, SPLITS0, TIER0, SPLITS1, TIER1)
        tl.store(active + row, tl.minimum(used, tl.maximum(newest - 1, 0)))
    if newest == 0:
        none = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        tl.store(part_top + (head * (SPLITS + 2) + SPLITS) * rows * GROUP + query, none, mask=live)
    queries = _queries(
        q, row * GROUP, (row + 1) * GROUP, head, scale, ROTATION, KEY_TYPE, KV, GROUP, D, BLOCK, BLOCK_M
    )
    # An ancestor's depth: how many are above it.
    other, offset = tl.arange(0, 64), tl.arange(0, BLOCK_N)
    above = ((bits >> other.to(tl.int64)) & 1).to(tl.int32)
    depth = tl.where(above != 0, tl.cumsum(above, 0) - 1, -1)
    for block in tl.range(length // 64, newest + 1, num_stages=1):
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        sum_ = tl.zeros((BLOCK_M, BLOCK), tl.float32)
        for step in tl.range(0, 64 // BLOCK_N, num_stages=1):
            at = block * 64 + step * BLOCK_N + offset
            present = at <= position
            # The tree's row r is at index length + r.
            staged = tl.sum(tl.where(depth[None, :] == (at - length)[:, None], other[None, :], 0), 1)
            index = tl.where(at < length, at, length + staged)
            page = tl.load(table + index // PAGE, mask=present, other=0).to(tl.int64)
            pool_row = (page * KV + head) * PAGE + index % PAGE
            k = load_rows(key_codes, key_scales, 0, pool_row, present, KEYS, D, BLOCK, KEY_TYPE)
            v = load_rows(value_codes, value_scales, 0, pool_row, present, VALUES, D, BLOCK, VALUE_TYPE)
            seen = live[:, None] & present[None, :]
            if WINDOW:
                seen = seen & ((at < SINKS) | (at > position - window))[None, :]
            top, weight, sum_ = _accumulate(queries, k, v, seen, top, weight, sum_, PRECISION)
        _store_part(
            part_top, part_weight, part_sum, head, SPLITS + 1 - (newest - block), query, rows * GROUP, live,
            top, weight, sum_, SPLITS + 2, D, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "sequences", "tiles", "table_stride", "window"])
def _paged_kernel(
    q, key_codes, key_scales, value_codes, value_scales, table, lengths, first, ancestors,
    part_top, part_weight, part_sum, active, scale, rows, sequences, tiles, table_stride, window,
    KV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROTATION: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr, SPLITS: tl.constexpr, SPLITS0: tl.constexpr, TIER0: tl.constexpr,
    SPLITS1: tl.constexpr, TIER1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One KV head of one slot of BLOCK_M queries, or of the last blocks of one row, a program.

    A block is added BLOCK_N keys at a time.
    """
    # Rows first: splits that a short context leaves empty come last.
    number, units = tl.program_id(0) - rows * KV, tiles * KV
    head = (tl.program_id(0) % KV).to(tl.int64)
    row = tl.where(number < 0, tl.program_id(0) // KV, -1)
    item, tile, start_row, count = _sequence(
        first, number % units // KV, row, sequences, rows // sequences, GROUP, BLOCK_M, RAGGED
    )
    length = tl.load(lengths + item).to(tl.int32)
    table += item.to(tl.int64) * table_stride
    if number >= 0:
        _add_committed(
            q, key_codes, key_scales, value_codes, value_scales, table, ancestors, part_top, part_weight,
            part_sum, scale, rows, window, length, head, number // units, tile, start_row, count,
            KV, GROUP, PAGE, D, BLOCK, ROTATION, KEYS, VALUES, KEY_TYPE, VALUE_TYPE, SPLITS, SPLITS0, TIER0,
            SPLITS1, TIER1, BLOCK_M, BLOCK_N, WINDOW, SINKS, PRECISION,
        )  # fmt: skip
    elif count > 0:
        _add_assembled(
            q, key_codes, key_scales, value_codes, value_scales, table, ancestors, part_top, part_weight,
            part_sum, active, scale, rows, window, length, head, row,
            KV, GROUP, PAGE, D, BLOCK, ROTATION, KEYS, VALUES, KEY_TYPE, VALUE_TYPE, SPLITS, SPLITS0, TIER0,
            SPLITS1, TIER1, BLOCK_M, BLOCK_N, WINDOW, SINKS, PRECISION,
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
    block_rows = tl.where(split == SPLITS, T, 0)
    if (first < last) | (block_rows > 0):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        node = rows // GROUP
        live = node < T
        TYPE: tl.constexpr = keys.dtype.element_ty
        first_query = item * T * GROUP + tile * BLOCK_M
        queries = _queries(
            q, first_query, (item + 1) * T * GROUP, head, scale, 0, TYPE, KV, GROUP, D, BLOCK, BLOCK_M
        )
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
        for start in tl.range(0, block_rows, BLOCK_N, num_stages=1):
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
        _store_part(
            part_top, part_weight, part_sum, head, split, first_query + tl.arange(0, BLOCK_M),
            tl.num_programs(1) // KV * T * GROUP, live, top, weight, sum_, SPLITS + 1, D, BLOCK,
        )  # fmt: skip
        if (split == SPLITS) & (head == 0):
            tl.store(active + item * T + node, used, mask=live)


@triton.jit(do_not_specialize=["slot_stride"])
def _merge_kernel(
    part_top, part_weight, part_sum, active, gate, out, end, gate_row, gate_head, slot_stride,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROTATION: tl.constexpr,
    SPLITS: tl.constexpr, TAILS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, GATE: tl.constexpr,
    RAGGED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query head of one row a program: merge its partial results, rotate back, apply the gate."""
    query_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_inputs(OVERLAP)
    used = tl.load(active + row, cache_modifier=".cg")
    is_padding = False
    if RAGGED:
        # Nothing was stored for padding rows.
        is_padding = row >= tl.load(end)
        used = tl.where(is_padding, 0, used)
    base = (query_head // GROUP) * (SPLITS + TAILS) * slot_stride + row * GROUP + query_head % GROUP
    slot = tl.arange(0, PARTS)
    filled = (slot < used) | ((slot >= SPLITS) & (slot < SPLITS + TAILS))
    tops = tl.load(part_top + base + slot * slot_stride, filled, -float("inf"), cache_modifier=".cg")
    level = tl.max(tops, 0)
    filled = tops > -float("inf")
    weights = tl.load(part_weight + base + slot * slot_stride, filled, 0.0, cache_modifier=".cg")
    weight = tl.sum(weights * tl.exp2(tops - level), 0)
    dims = tl.arange(0, BLOCK)
    sum_ = tl.zeros((BLOCK,), tl.float32)
    # The splits in their order, then what follows them. Where no key was visible nothing was stored.
    for start in range(0, used + TAILS, STEP):
        number = start + tl.arange(0, STEP)
        some = number < used + TAILS
        at = base + tl.where(number < used, number, number - used + SPLITS) * slot_stride
        top = tl.load(part_top + at, some, -float("inf"), cache_modifier=".cg")
        inside = (top > -float("inf"))[:, None] & (dims < D)[None, :]
        part = tl.load(part_sum + at[:, None] * D + dims[None, :], inside, 0.0, cache_modifier=".cg")
        sum_ += tl.sum(part * tl.exp2(top - level)[:, None], 0)
    result = sum_ / weight
    if RAGGED:
        result = tl.where(is_padding, 0.0, result)
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
        # With 16 keys in eight warps values of less than 8 bits failed the tests of tree attention.
        keys = 32 if warps == 8 and wide <= 256 else 16
        return {"BLOCK_M": 32 if wide > 128 else 64, "BLOCK_N": keys, "num_stages": 1, "num_warps": warps}
    keys = 64 if wide <= 128 else 32 if wide <= 256 else 16
    # Two more stages keep one more block in flight, since a block's page index is a load of its own; small
    # blocks need that to hide the memory's latency.
    roomy = capability in ((8, 0), (9, 0), (10, 0))
    stages = 5 if roomy and row_bytes < 2 * dim else 3
    return {"BLOCK_M": 64, "BLOCK_N": keys, "num_stages": stages, "num_warps": 4}


class SplitResults:
    """Buffers of the partial results of queries q [R, H, D], SPLITS and `tails` a query, and their merge."""

    def __init__(self, q: Tensor, kv_heads: int, tails: int):
        rows, heads, dim = q.shape
        self._q, self._kv_heads, self._group, self._tails = q, kv_heads, heads // kv_heads, tails
        slots = (kv_heads, SPLITS + tails, rows * self._group)
        self.tops, self.weights = (torch.empty(slots, device=q.device) for _ in range(2))
        self.sums = torch.empty(*slots, dim, device=q.device)
        self.active = torch.empty(rows, dtype=torch.int32, device=q.device)  # splits that a row has

    def merge(self, gate: Tensor | None, rotation: int = 0, end: Tensor | None = None) -> Tensor:
        """Return the output [R, H, D], rotated back in groups of `rotation` values unless it is 0.

        Rows from `end` [1] on are padding, and zero.
        """
        rows, heads, dim = self._q.shape
        out = torch.empty(rows, heads, dim, device=self._q.device)
        gates = out if gate is None else gate
        if gates.stride(-1) != 1:
            gates = gates.contiguous()
        _merge_kernel[(heads, rows)](
            self.tops, self.weights, self.sums, self.active, gates, out, self.active if end is None else end,
            gates.stride(0), gates.stride(1), rows * self._group,
            KV=self._kv_heads, GROUP=self._group, D=dim, BLOCK=triton.next_power_of_2(dim), ROTATION=rotation,
            SPLITS=SPLITS, TAILS=self._tails, PARTS=triton.next_power_of_2(SPLITS + self._tails), STEP=32,
            GATE=gate is not None, RAGGED=end is not None, num_warps=8, **launch_options(out.device),
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


def takes_paged_attention(q: Tensor, context: PagedContext, **options: object) -> bool:
    return context.ancestors is not None and takes(context.keys) and takes(context.values)


def paged_attention(q: Tensor, context: PagedContext, *, gate: Tensor | None = None) -> Tensor:
    """See cpu.paged_attention: of trees, whose rows may be ragged.

    Two launches for all formats: queries are rotated in the first, the output back in the second.
    """
    keys, values, lengths, first, shape = (
        context.keys,
        context.values,
        context.lengths,
        context.first,
        q.shape,
    )
    q, ancestors, gate = context.tree_rows(q, gate)
    (rows, heads, dim), sequences = q.shape, len(lengths)
    kv_heads, page = keys.codes.shape[1:3]
    assert takes(keys) and takes(values) and keys.dim == values.dim == dim, f"heads of {dim}"
    parts, rotation, group = SplitResults(q, kv_heads, TAILS), group_size(dim), heads // kv_heads
    row_bytes = max(keys.format.code_bytes(dim), values.format.code_bytes(dim))
    sizes = tiles(dim, row_bytes, capability_of(q.device))
    block = sizes["BLOCK_M"]
    assert group <= block, f"{group} query heads of a KV head, at most {block}"
    if first is None:
        count = sequences * triton.cdiv(rows // sequences * group, block)
    else:
        count = rows * group // block + sequences
    _paged_kernel[((count * (SPLITS + 1) + rows) * kv_heads,)](
        q, *tensors(keys), *tensors(values), context.page_table, lengths, lengths if first is None else first,
        ancestors, parts.tops, parts.weights, parts.sums, parts.active,
        dim**-0.5 * LOG2_E, rows, sequences, count, context.page_table.stride(0), context.window or 0,
        KV=kv_heads, GROUP=group, PAGE=page, D=dim, BLOCK=triton.next_power_of_2(dim),
        ROTATION=rotation if keys.format.quantised else 0, KEYS=form(keys), VALUES=form(values),
        KEY_TYPE=_type(keys), VALUE_TYPE=_type(values), SPLITS=SPLITS, TIER0=TIERS[0][0], SPLITS0=TIERS[0][1],
        TIER1=TIERS[1][0], SPLITS1=TIERS[1][1], WINDOW=context.window is not None, SINKS=context.sinks,
        RAGGED=first is not None,
        PRECISION="ieee",
        # A fused multiply-add rounds once: the two loops must not differ in that.
        enable_fp_fusion=False, **sizes,
    )  # fmt: skip
    end = None if first is None else first[-1:]
    return parts.merge(gate, rotation if values.format.quantised else 0, end).view(shape)


def takes_block_attention(q: Tensor, *rest: object, **options: object) -> bool:
    return q.shape[-1] >= 16  # of a tensor-core mma


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, ring: KVRing, *, window: int | None, causal: bool
) -> Tensor:
    q, k, v = (x.contiguous() for x in (q, k, v))
    rows, heads, dim = q.shape[1:]
    keys, values, kv_heads = ring.keys, ring.values, k.shape[2]
    assert keys.dtype == values.dtype and keys.shape == values.shape, f"{keys.dtype}"
    assert keys.is_contiguous() and values.is_contiguous(), f"{keys.stride()}"
    assert dim >= 16 and heads % kv_heads == 0, f"heads of {dim}, {heads} over {kv_heads}"
    parts = SplitResults(q.flatten(0, 1), kv_heads, 1)
    sizes = tiles(dim, dim * keys.element_size(), capability_of(q.device))
    grid = (triton.cdiv(rows * heads // kv_heads, sizes["BLOCK_M"]), len(q) * kv_heads, SPLITS + 1)
    _ring_kernel[grid](
        q, k, v, positions.contiguous(), keys, values, ring.slots, ring.lengths, ring.starts,
        parts.tops, parts.weights, parts.sums, parts.active, dim**-0.5 * LOG2_E, rows, keys.shape[1],
        window or 0,
        KV=kv_heads, GROUP=heads // kv_heads, D=dim, BLOCK=triton.next_power_of_2(dim), SPLITS=SPLITS,
        CAUSAL=causal, PRECISION="ieee", **sizes,
    )  # fmt: skip
    return parts.merge(None).view(q.shape)
