"""Triton kernels of the delta rule over a prompt chunk (WY form): a parallel part, then a scan.

For each run of 64 tokens the first kernel computes what does not depend on the state: T = (I + A)^-1 and with
it the writes into an empty state, what each token erases, and the attention between tokens. The second
carries a band of a head's state in registers from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.causal_conv.records import DeltaHeads
from bough.kernels.delta_rule.cpu import CHUNK
from bough.kernels.runtime.device import capability_of


@triton.jit
def _factor(peak):
    """The power of two that scales a magnitude into [2^4, 2^5), and its inverse.

    A state may then grow to 2000 times its first value and its inputs, and 2^-18 of it is still normal.
    """
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 16), 254)
    times = ((258 - exponent) << 23).to(tl.float32, bitcast=True)
    return times, ((exponent - 4) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T", "runs"])
def _prepare_kernel(
    q, k, values, g, beta, total, erase, attention, peaks, T, runs,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One value head of one run a program; its writes replace its values."""
    head, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    item, run = unit // runs, unit % runs
    i, dims = tl.arange(0, C), tl.arange(0, D)
    live = run * C + i < T
    # One 64-bit offset a pointer, and small offsets: 64-bit ones would take too many registers.
    row = item * T + run * C
    by_head = row * VALUE_HEADS + head
    g, beta, total = g + by_head, beta + by_head, total + by_head
    values, erase, attention = values + by_head * D, erase + by_head * D, attention + by_head * C
    by_key = (row * KEY_HEADS + head % KEY_HEADS) * D
    q, k = q + by_key, k + by_key
    gate = tl.load(g + i * VALUE_HEADS, mask=live, other=0.0)
    strength = tl.load(beta + i * VALUE_HEADS, mask=live, other=0.0)
    sums = tl.cumsum(gate, 0)
    tl.store(total + i * VALUE_HEADS, sums, mask=live)
    key_at = i[:, None] * (KEY_HEADS * D) + dims[None, :]
    keys = tl.load(k + key_at, mask=live[:, None], other=0.0)
    queries = tl.load(q + key_at, mask=live[:, None], other=0.0)

    # Always as a difference: its terms alone would overflow.
    decay = tl.exp(tl.where(i[:, None] >= i[None, :], sums[:, None] - sums[None, :], -float("inf")))
    seen = tl.dot(queries, tl.trans(keys)) * decay
    tl.store(attention + i[:, None] * (VALUE_HEADS * C) + i[None, :], seen.to(tl.float16), mask=live[:, None])
    overlap = tl.dot(keys, tl.trans(keys))
    solve = tl.where(i[:, None] > i[None, :], strength[:, None] * overlap * decay, 0.0)
    # Inverses of diagonal blocks: of size 2 at first, then doubled from pairs of them.
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse -= tl.where(i[:, None] // 2 == i[None, :] // 2, solve, 0.0)
    for level in tl.static_range(1, LEVELS):
        group = i >> level
        joined = (group[:, None] != group[None, :]) & (group[:, None] >> 1 == group[None, :] >> 1)
        between = tl.dot(inverse, tl.where(joined, solve, 0.0), input_precision=EXACT)
        inverse -= tl.dot(between, inverse, input_precision=EXACT)

    # Its elements and those of `erased` are at most 1: each step of the rule is a contraction.
    inverse = inverse.to(tl.float16)
    # Keys are read again: holding them would take registers that the inverse needs.
    keys = tl.load(k + key_at, mask=live[:, None], other=0.0)
    erased = ((strength * tl.exp(sums))[:, None] * keys.to(tl.float32)).to(tl.float16)
    at = i[:, None] * (VALUE_HEADS * D) + dims[None, :]
    tl.store(erase + at, tl.dot(inverse, erased).to(tl.float16), mask=live[:, None])
    value = tl.load(values + at, mask=live[:, None], other=0.0) * strength[:, None]
    times, back = _factor(tl.max(tl.max(tl.abs(value), 1), 0))
    fresh = tl.dot(inverse, (value * times).to(tl.float16)) * back
    tl.store(values + at, fresh, mask=live[:, None])
    # Magnitudes are ordered like their bits.
    peak = tl.max(tl.max(tl.abs(fresh), 1), 0).to(tl.int32, bitcast=True)
    tl.atomic_max(peaks + item * VALUE_HEADS + head, peak, sem="relaxed")


@triton.jit(do_not_specialize=["T", "runs"])
def _scan_kernel(
    q, k, values, total, erase, attention, peaks, state, slots, T, runs,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One value head and one band of its state's columns a program; the outputs replace the values."""
    unit = tl.program_id(0).to(tl.int64)
    item, head = unit // VALUE_HEADS, unit % VALUE_HEADS
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i, dims = tl.arange(0, C), tl.arange(0, D)
    slot = tl.load(slots + item).to(tl.int64)
    band = state + (slot * VALUE_HEADS + head) * D * D + dims[:, None] * D + columns[None, :]
    carried = tl.load(band)
    peak = tl.load(peaks + item * VALUE_HEADS + head).to(tl.float32, bitcast=True)
    # The rule is linear in the state and the writes: both are scaled to suit float16.
    times, back = _factor(tl.maximum(peak, tl.max(tl.max(tl.abs(carried), 1), 0)))
    carried *= times
    wide = i[:, None] * (VALUE_HEADS * D) + dims[None, :]
    offsets = i[:, None] * (VALUE_HEADS * D) + columns[None, :]
    narrow = i[:, None] * (KEY_HEADS * D) + dims[None, :]
    square = i[:, None] * (VALUE_HEADS * C) + i[None, :]
    for run in range(0, runs):
        live = run * C + i < T
        row = item * T + run * C
        by_head = row * VALUE_HEADS + head
        by_key = (row * KEY_HEADS + head % KEY_HEADS) * D
        erased = tl.load(erase + by_head * D + wide, mask=live[:, None], other=0.0)
        queries = tl.load(q + by_key + narrow, mask=live[:, None], other=0.0)
        seen = tl.load(attention + by_head * C + square, mask=live[:, None], other=0.0)
        keys = tl.load(k + by_key + narrow, mask=live[:, None], other=0.0)
        target = values + by_head * D + offsets
        fresh = tl.load(target, mask=live[:, None], other=0.0)
        sums = tl.load(total + by_head + i * VALUE_HEADS, mask=live, other=0.0)
        last = tl.minimum((run + 1) * C, T) - 1
        whole = tl.load(total + (item * T + last) * VALUE_HEADS + head)

        before = carried.to(tl.float16)
        writes = fresh * times - tl.dot(erased, before)
        result = tl.dot(queries, before) * tl.exp(sums)[:, None]
        result = tl.dot(seen, writes.to(tl.float16), result)
        tl.store(target, result * back, mask=live[:, None])
        # Rows after the last token write nothing, but the difference may be anything.
        fade = tl.where(live, tl.exp(whole - sums), 0.0)
        writes = (writes * fade[:, None]).to(tl.float16)
        carried = tl.dot(tl.trans(keys), writes, carried * tl.exp(whole))
    tl.store(band, carried * back)


def takes_slot_delta(heads: DeltaHeads, state: Tensor, slots: Tensor) -> bool:
    """Return whether the kernels take such heads (a power of two of dims, 16 to 128) on this card.

    Without TF32 tensor cores the program of the inverse is too long to compile.
    """
    dim = state.shape[-1]
    if state.is_cuda and (capability_of(state.device) or (0, 0)) < (8, 0):
        return False
    return 16 <= dim <= 128 and dim & (dim - 1) == 0


def prepare_tiles(dim: int, capability: tuple[int, int] | None) -> dict:
    """Return the precision of the inverse and the warps; capability: of an NVIDIA card, None for others.

    Three TF32 matmuls give float32's accuracy on tensor cores. Heads of 16 dims get eight warps everywhere:
    with four, Triton 3.6's ptxas (12.8) reads the address of an mma operand from an uninitialised register,
    an illegal address on Hopper.
    """
    ampere = capability is not None and capability >= (8, 0)
    return {
        "LEVELS": CHUNK.bit_length() - 1,
        "EXACT": "tf32x3" if ampere else "ieee",
        "num_warps": 4 if capability == (9, 0) and dim > 16 else 8,
        "num_stages": 1,
    }


def scan_tiles(dim: int, capability: tuple[int, int] | None) -> dict:
    """Return the tiles by shared memory: with 64 columns the 27B's 48 heads are 96 programs, one an SM."""
    large = capability in ((8, 0), (9, 0), (10, 0))
    ampere = capability is not None and capability >= (8, 0)
    return {
        "COLUMNS": min(64 if large else 32, dim),
        "num_warps": 4 if capability == (9, 0) else 8,
        # On Hopper the third stage saves a tenth of the rule's time, half as many warps a twentieth.
        "num_stages": 3 if capability == (9, 0) else 2 if ampere else 1,
    }


def slot_delta(heads: DeltaHeads, state: Tensor, slots: Tensor) -> Tensor:
    """See cpu.slot_delta; q and k are float16, and the outputs overwrite v."""
    q, k, v, g, beta = heads
    batch, tokens, key_heads, dim = q.shape
    value_heads = v.shape[2]
    assert takes_slot_delta(heads, state, slots) and state.shape[1:] == (value_heads, dim, dim), (
        f"{state.shape}, heads of {dim}"
    )
    for part in (q, k, v, g, beta, state, slots):
        assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
    for part in (q, k):
        assert part.dtype == torch.float16, f"{part.dtype}, needed float16"
    for part in (v, g, beta, state):
        assert part.dtype == torch.float32, f"{part.dtype}, needed float32"
    runs = triton.cdiv(tokens, CHUNK)
    total = torch.empty_like(g)
    erase = torch.empty(v.shape, dtype=torch.float16, device=v.device)
    attention = torch.empty(*v.shape[:3], CHUNK, dtype=torch.float16, device=v.device)
    peaks = torch.zeros(batch, value_heads, dtype=torch.int32, device=v.device)
    sizes = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "D": dim, "C": CHUNK}
    capability = capability_of(q.device)
    _prepare_kernel[(value_heads, batch * runs)](
        q, k, v, g, beta, total, erase, attention, peaks, tokens, runs,
        **sizes, **prepare_tiles(dim, capability),
    )  # fmt: skip
    bands = scan_tiles(dim, capability)
    _scan_kernel[(batch * value_heads, dim // bands["COLUMNS"])](
        q, k, v, total, erase, attention, peaks, state, slots, tokens, runs, **sizes, **bands
    )
    return v
