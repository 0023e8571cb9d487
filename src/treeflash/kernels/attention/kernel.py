"""Triton kernels of split attention: parts of the context in parallel, then one merge in a fixed order.

The query heads of a KV head are rows of one product. How a context is cut follows from its length alone, and
a row's sums do not depend on how many rows there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLITS = 32  # of the context; one more holds the step's own rows. 4 KV heads x 33 fill an H200's 132 SMs
LEAST = 64  # keys in a split, or merging costs more than it gains
LOG2_E = 1.4426950408889634


@triton.jit
def _accumulate(queries, keys, values, seen, top, weight, sum_, PRECISION: tl.constexpr):
    """One block of keys [D, N] and values [N, D] into the running maximum, weight and sum of each row."""
    scores = tl.dot(queries, keys, input_precision=PRECISION)
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet: any finite number will do.
    level = tl.where(higher == -float("inf"), 0.0, higher)
    shares = tl.exp2(scores - level[:, None])
    fade = tl.exp2(top - level)
    weight = weight * fade + tl.sum(shares, 1)
    sum_ = sum_ * fade[:, None] + tl.dot(shares.to(values.dtype), values, input_precision=PRECISION)
    return higher, weight, sum_


@triton.jit
def _extent(span, split, SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr):
    """First and last key of a split of `span` keys, and how many splits have any; the last split has none."""
    size = tl.maximum(tl.cdiv(tl.cdiv(span, SPLITS), BLOCK_N) * BLOCK_N, LEAST)
    first = tl.where(split < SPLITS, tl.minimum(split * size, span), span)
    return first, tl.minimum(first + size, span), tl.cdiv(span, size)


@triton.jit
def _keep(
    part_top, part_weight, part_sum, active, used, item, head, split, tile, rows, top, weight, sum_, padded,
    KV: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores a split's result."""
    at = ((item * KV + head) * (SPLITS + 1) + split) * padded + rows
    dims = tl.arange(0, BLOCK)
    tl.store(part_top + at, top)
    tl.store(part_weight + at, weight)
    tl.store(part_sum + at[:, None] * D + dims[None, :], sum_, mask=(dims < D)[None, :])
    if (split == SPLITS) & (head == 0) & (tile == 0):
        tl.store(active + item, used)


@triton.jit(do_not_specialize=["T", "table_stride", "padded"])
def _paged_kernel(
    q, keys, values, table, lengths, ancestors, part_top, part_weight, part_sum, active,
    scale, T, table_stride, padded,
    KV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One KV head, one split, BLOCK_M of its rows (node-major) a program."""
    tile, split, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    item, head = unit // KV, unit % KV
    length = tl.load(lengths + item).to(tl.int32)
    first, last, used = _extent(length, split, SPLITS, LEAST, BLOCK_N)
    own = tl.where(split == SPLITS, T, 0)
    if (first < last) | (own > 0):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        node = rows // GROUP
        live = node < T
        dims = tl.arange(0, BLOCK)
        inside = dims < D
        at = ((item * T + node) * KV * GROUP + head * GROUP + rows % GROUP)[:, None] * D + dims[None, :]
        queries = tl.load(q + at, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32) * scale
        queries = queries.to(keys.dtype.element_ty)
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        sum_ = tl.zeros((BLOCK_M, BLOCK), tl.float32)
        for start in range(first, last, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            present = index < last
            if PAGE % BLOCK_N == 0:
                # A block lies in one page; one number for it lets the copies behind it run ahead.
                page = tl.load(table + item * table_stride + start // PAGE).to(tl.int64)
            else:
                page = tl.load(table + item * table_stride + index // PAGE, mask=present, other=0).to(
                    tl.int64
                )
            place = ((page * PAGE + index % PAGE) * KV + head) * D
            k = tl.load(
                keys + place[None, :] + dims[:, None], mask=present[None, :] & inside[:, None], other=0.0
            )
            v = tl.load(
                values + place[:, None] + dims[None, :], mask=present[:, None] & inside[None, :], other=0.0
            )
            top, weight, sum_ = _accumulate(queries, k, v, present[None, :], top, weight, sum_, PRECISION)
        bits = tl.load(ancestors + item * T + node, mask=live, other=0)
        for start in tl.range(0, own, BLOCK_N, num_stages=1):
            row = start + tl.arange(0, BLOCK_N)
            present = row < T
            index = length + row
            page = tl.load(table + item * table_stride + index // PAGE, mask=present, other=0).to(tl.int64)
            place = ((page * PAGE + index % PAGE) * KV + head) * D
            k = tl.load(
                keys + place[None, :] + dims[:, None], mask=present[None, :] & inside[:, None], other=0.0
            )
            v = tl.load(
                values + place[:, None] + dims[None, :], mask=present[:, None] & inside[None, :], other=0.0
            )
            seen = ((bits[:, None] >> row[None, :].to(tl.int64)) & 1) != 0
            top, weight, sum_ = _accumulate(
                queries, k, v, seen & present[None, :], top, weight, sum_, PRECISION
            )
        _keep(
            part_top, part_weight, part_sum, active, used, item, head, split, tile, rows, top, weight, sum_,
            padded, KV, SPLITS, D, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "ring", "window", "padded"])
def _ring_kernel(
    q, own_keys, own_values, positions, keys, values, slots, lengths, starts,
    part_top, part_weight, part_sum, active, scale, T, ring, window, padded,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same over a ring, in which position p lies at p modulo ring; window 0: none."""
    tile, split, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    item, head = unit // KV, unit % KV
    slot = tl.load(slots + item).to(tl.int64)
    length = tl.load(lengths + slot).to(tl.int32)
    begin = tl.load(starts + slot).to(tl.int32)
    first, last, used = _extent(tl.minimum(length, ring), split, SPLITS, LEAST, BLOCK_N)
    own = tl.where(split == SPLITS, T, 0)
    if (first < last) | (own > 0):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        node = rows // GROUP
        live = node < T
        dims = tl.arange(0, BLOCK)
        inside = dims < D
        at = ((item * T + node) * KV * GROUP + head * GROUP + rows % GROUP)[:, None] * D + dims[None, :]
        queries = tl.load(q + at, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32) * scale
        queries = queries.to(keys.dtype.element_ty)
        query = tl.load(positions + item * T + node, mask=live, other=0).to(tl.int32)
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        sum_ = tl.zeros((BLOCK_M, BLOCK), tl.float32)
        for start in range(first, last, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            present = index < last
            # The newest position below `length` that falls on this place of the ring.
            held = length - 1 - (length - 1 - index) % ring
            place = ((slot * ring + index) * KV + head) * D
            k = tl.load(
                keys + place[None, :] + dims[:, None], mask=present[None, :] & inside[:, None], other=0.0
            )
            v = tl.load(
                values + place[:, None] + dims[None, :], mask=present[:, None] & inside[None, :], other=0.0
            )
            apart = query[:, None] - held[None, :]
            seen = (present & (held >= begin))[None, :] & ((window == 0) | (tl.abs(apart) < window))
            if CAUSAL:
                seen = seen & (apart >= 0)
            top, weight, sum_ = _accumulate(queries, k, v, seen, top, weight, sum_, PRECISION)
        for start in tl.range(0, own, BLOCK_N, num_stages=1):
            row = start + tl.arange(0, BLOCK_N)
            present = row < T
            held = tl.load(positions + item * T + row, mask=present, other=0).to(tl.int32)
            place = ((item * T + row) * KV + head) * D
            k = tl.load(
                own_keys + place[None, :] + dims[:, None], mask=present[None, :] & inside[:, None], other=0.0
            )
            v = tl.load(
                own_values + place[:, None] + dims[None, :],
                mask=present[:, None] & inside[None, :],
                other=0.0,
            )
            apart = query[:, None] - held[None, :]
            seen = (present & (held >= begin))[None, :] & ((window == 0) | (tl.abs(apart) < window))
            if CAUSAL:
                seen = seen & (apart >= 0)
            k, v = k.to(keys.dtype.element_ty), v.to(values.dtype.element_ty)
            top, weight, sum_ = _accumulate(queries, k, v, seen, top, weight, sum_, PRECISION)
        _keep(
            part_top, part_weight, part_sum, active, used, item, head, split, tile, rows, top, weight, sum_,
            padded, KV, SPLITS, D, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "padded"])
def _merge_kernel(
    part_top, part_weight, part_sum, active, gate, out, gate_row, gate_head, T, padded,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """One query head of one row a program: its splits by their log-sum-exp, then the gate."""
    query_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    item, node = row // T, row % T
    head = query_head // GROUP
    used = tl.load(active + item)
    base = (item * KV + head) * (SPLITS + 1) * padded + node * GROUP + query_head % GROUP
    split = tl.arange(0, PARTS)
    filled = (split < used) | (split == SPLITS)
    tops = tl.load(part_top + base + split * padded, mask=filled, other=-float("inf"))
    level = tl.max(tops, 0)
    weights = tl.load(part_weight + base + split * padded, mask=filled, other=0.0)
    weight = tl.sum(weights * tl.exp2(tops - level), 0)
    dims = tl.arange(0, BLOCK)
    sum_ = tl.zeros((BLOCK,), tl.float32)
    # The context's splits in their order, then the step's own rows.
    for start in range(0, used + 1, STEP):
        number = start + tl.arange(0, STEP)
        number = tl.where(number == used, SPLITS, number)
        some = (start + tl.arange(0, STEP)) <= used
        at = base + number * padded
        share = tl.exp2(tl.load(part_top + at, mask=some, other=-float("inf")) - level)
        part = tl.load(
            part_sum + at[:, None] * D + dims[None, :], mask=some[:, None] & (dims < D)[None, :], other=0.0
        )
        sum_ += tl.sum(part * share[:, None], 0)
    result = sum_ / weight
    if GATE:
        place = gate + row * gate_row + query_head * gate_head + dims
        result *= tl.sigmoid(tl.load(place, mask=dims < D, other=0.0).to(tl.float32))
    tl.store(out + (row * KV * GROUP + query_head) * D + dims, result, mask=dims < D)


def tiles(dim: int, capability: tuple[int, int] | None) -> dict[str, int]:
    """Rows (nodes x query heads) and keys at a time, stages, warps; by shared memory.

    sm_75 has 64 KiB a program, sm_86 and sm_89 99 KiB. dim: of a head in 16 bits, twice as many in 32;
    capability: of an NVIDIA card; None for others.
    """
    if capability is None or capability < (8, 0):
        return {"BLOCK_M": 32 if dim > 128 else 64, "BLOCK_N": 16, "num_stages": 1, "num_warps": 4}
    keys = 64 if dim <= 128 else 32 if dim <= 256 else 16
    stages = 3 if capability in ((8, 0), (9, 0), (10, 0)) else 2
    return {"BLOCK_M": 64, "BLOCK_N": keys, "num_stages": stages, "num_warps": 4}


def _capability(device: torch.device) -> tuple[int, int] | None:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else None


class _Parts:
    """Room for the splits' results, and the merge of them."""

    def __init__(self, q: Tensor, kv_heads: int, block: int):
        batch, rows, heads, dim = q.shape
        self._q, self._kv_heads, self._group = q, kv_heads, heads // kv_heads
        self.tiles = triton.cdiv(rows * self._group, block)
        self.padded = self.tiles * block
        splits = (batch, kv_heads, SPLITS + 1, self.padded)
        self.tops, self.weights = (torch.empty(splits, device=q.device) for _ in range(2))
        self.sums = torch.empty(*splits, dim, device=q.device)
        self.active = torch.empty(batch, dtype=torch.int32, device=q.device)

    def merge(self, gate: Tensor | None) -> Tensor:
        batch, rows, heads, dim = self._q.shape
        out = torch.empty(batch, rows, heads, dim, device=self._q.device)
        opened = out if gate is None else gate
        if opened.stride(-1) != 1 or opened.stride(0) != rows * opened.stride(1):
            opened = opened.contiguous()
        _merge_kernel[(heads, batch * rows)](
            self.tops, self.weights, self.sums, self.active, opened, out, opened.stride(1), opened.stride(2),
            rows, self.padded,
            KV=self._kv_heads, GROUP=self._group, D=dim, BLOCK=triton.next_power_of_2(dim), SPLITS=SPLITS,
            PARTS=triton.next_power_of_2(SPLITS + 1), STEP=8, GATE=gate is not None, num_warps=4,
        )  # fmt: skip
        return out


def _checked(q: Tensor, keys: Tensor, values: Tensor) -> None:
    dim = q.shape[-1]
    assert keys.dtype == values.dtype and keys.shape == values.shape, f"{keys.dtype}, {values.dtype}"
    assert q.is_contiguous() and keys.is_contiguous() and values.is_contiguous(), (
        f"{q.stride()}, {keys.stride()}"
    )
    assert dim >= 16 and q.shape[2] % keys.shape[2] == 0, f"heads of {dim}, {q.shape[2]} over {keys.shape[2]}"


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    *,
    gate: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention; for a tree of at most 64 rows."""
    q = q.contiguous()
    _checked(q, keys, values)
    batch, rows, heads, dim = q.shape
    page, kv_heads = keys.shape[1:3]
    assert rows <= 64, f"{rows} rows, at most 64"
    chosen = tiles(dim * keys.element_size() // 2, _capability(q.device))
    parts = _Parts(q, kv_heads, chosen["BLOCK_M"])
    _paged_kernel[(parts.tiles, SPLITS + 1, batch * kv_heads)](
        q, keys, values, page_table, lengths, ancestors.contiguous(),
        parts.tops, parts.weights, parts.sums, parts.active,
        dim**-0.5 * LOG2_E, rows, page_table.stride(0), parts.padded,
        KV=kv_heads, GROUP=heads // kv_heads, PAGE=page, D=dim, BLOCK=triton.next_power_of_2(dim),
        SPLITS=SPLITS, LEAST=LEAST, PRECISION="ieee", **chosen,
    )  # fmt: skip
    return parts.merge(gate)


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
    _checked(q, ring_keys, ring_values)
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    chosen = tiles(dim * ring_keys.element_size() // 2, _capability(q.device))
    parts = _Parts(q, kv_heads, chosen["BLOCK_M"])
    _ring_kernel[(parts.tiles, SPLITS + 1, batch * kv_heads)](
        q, k, v, positions.contiguous(), ring_keys, ring_values, slots, lengths, starts,
        parts.tops, parts.weights, parts.sums, parts.active, dim**-0.5 * LOG2_E, rows, ring_keys.shape[1],
        window or 0, parts.padded,
        KV=kv_heads, GROUP=heads // kv_heads, D=dim, BLOCK=triton.next_power_of_2(dim), SPLITS=SPLITS,
        LEAST=LEAST, CAUSAL=causal, PRECISION="ieee", **chosen,
    )  # fmt: skip
    return parts.merge(None)
