"""Triton kernels that find where top-k and top-p cut a row whose short list was not enough.

A histogram of weights by score gives the bins, the tokens in those bins are gathered, and the last token
kept is searched for among them. Rows use the record that filters.py describes.
"""

import triton
import triton.language as tl

from bough.kernels.sampling.arithmetic import key_of, value_of, weigh
from bough.kernels.sampling.filters import (
    BINS,
    GATHERED,
    HIGHEST,
    K_BIN,
    K_MASS,
    K_RANK,
    KEPT,
    LOWEST,
    OPEN,
    P_ABOVE,
    P_FIRST,
    P_LAST,
    POOL,
    REACH,
    THRESHOLD,
    TOP,
    TOTAL,
    WORDS,
    cuts,
    finishes,
    limit_of,
    load_filters,
    load_values,
    of_slot,
)
from bough.kernels.sampling.triton_kernels import store_ranking


@triton.jit
def _open(here, temperature, top_k, share):
    is_open = cuts(temperature, top_k, share)
    if is_open:
        is_open = tl.load(here + OPEN) != 0
    return is_open


@triton.jit
def histogram_kernel(
    logits, adjusted, mass, count, record, arrived, slots, numbers, integers, stride, vocabulary,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weight and number of the tokens in each bin of scores; then the bins where the filters cut."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    numbers, integers = of_slot(numbers, integers, slot)
    temperature, top_k, share, _ = load_filters(numbers, integers, COUNT)
    here = record + row * WORDS
    if _open(here, temperature, top_k, share):
        top, flags = value_of(tl.load(here + TOP)), tl.load(integers + 2)
        total = tl.load(here + TOTAL)
        # All tokens as light as this together are what top-p leaves out: it cuts above them.
        light = tl.where(top_k > 0, -1, (total - limit_of(total, share)) // vocabulary)
        for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = load_values(logits, adjusted, flags, row, stride, vocabulary, ids)
            weight, below = weigh(tl.div_rn(value - top, temperature))
            near = (below < REACH) & (ids < vocabulary) & (weight > light)
            place = below >> 15
            lowest = tl.min(tl.where(near, place, BINS), 0)
            if lowest == tl.max(tl.where(near, place, -1), 0):
                # Thousands of equal logits would all wait for one address.
                tl.atomic_add(mass + row * BINS + lowest, tl.sum(tl.where(near, weight, 0), 0), sem="relaxed")
                tl.atomic_add(count + row * BINS + lowest, tl.sum(near.to(tl.int32), 0), sem="relaxed")
            else:
                tl.atomic_add(mass + row * BINS + place, weight, mask=near, sem="relaxed")
                if top_k > 0:
                    tl.atomic_add(count + row * BINS + place, 1, mask=near, sem="relaxed")
        if finishes(arrived, row, splits):
            _locate(mass, count, here, row, total, top_k, share)


@triton.jit
def _locate(mass, count, here, row, total, top_k, share):
    """The bin where top-k cuts, and those where top-p may: its share depends on what top-k leaves."""
    bins = tl.arange(0, BINS)
    masses = tl.cumsum(tl.load(mass + row * BINS + bins, cache_modifier=".cg"), 0)
    counts = tl.cumsum(tl.load(count + row * BINS + bins, cache_modifier=".cg"), 0).to(tl.int64)
    short = counts < top_k
    k_bin = tl.sum(short.to(tl.int32), 0)
    reached = (top_k > 0) & (k_bin < BINS)
    k_mass = tl.max(tl.where(short, masses, 0), 0)
    most = tl.min(tl.where(short, HIGHEST, masses), 0)
    low = limit_of(tl.where(reached, k_mass, total), share)
    high = limit_of(tl.where(reached, most, total), share)
    cut = share < (1 << 24)
    tl.store(here + K_BIN, tl.where(reached, k_bin, -1))
    tl.store(here + K_RANK, top_k - tl.max(tl.where(short, counts, 0), 0))
    tl.store(here + K_MASS, k_mass)
    tl.store(here + P_FIRST, tl.where(cut, tl.sum((masses < low).to(tl.int32), 0), BINS))
    tl.store(here + P_LAST, tl.where(cut, tl.sum((masses < high).to(tl.int32), 0), -1))
    tl.store(here + P_ABOVE, tl.max(tl.where(masses < low, masses, 0), 0))


@triton.jit(do_not_specialize=["capacity"])
def gather_kernel(
    logits, adjusted, record, arrived, gathered, slots, numbers, integers, stride, vocabulary, capacity,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys of the tokens in the bins that are cut, in any order; then that of the last token kept."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    numbers, integers = of_slot(numbers, integers, slot)
    temperature, top_k, share, _ = load_filters(numbers, integers, COUNT)
    here = record + row * WORDS
    if _open(here, temperature, top_k, share):
        top, flags = value_of(tl.load(here + TOP)), tl.load(integers + 2)
        k_bin, first, last = tl.load(here + K_BIN), tl.load(here + P_FIRST), tl.load(here + P_LAST)
        for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = load_values(logits, adjusted, flags, row, stride, vocabulary, ids)
            below = weigh(tl.div_rn(value - top, temperature))[1]
            place = below >> 15
            in_bins = (below < REACH) & (ids < vocabulary)
            in_bins = in_bins & ((place == k_bin) | ((place >= first) & (place <= last)))
            _append(gathered + row * capacity, here + GATHERED, key_of(value, ids), in_bins, capacity)
        if finishes(arrived, row, splits):
            number = tl.load(here + GATHERED, cache_modifier=".cg")
            rank, k_mass = tl.load(here + K_RANK), tl.load(here + K_MASS)
            above, total = tl.load(here + P_ABOVE), tl.load(here + TOTAL)
            threshold, weight = tl.full((), LOWEST, tl.int64), tl.full((), 0, tl.int64)
            if k_bin >= 0:
                threshold, weight = _search(
                    logits, adjusted, gathered, flags, row, stride, vocabulary, capacity, number, top,
                    temperature, k_bin, k_bin, threshold, rank, True, CHUNK,
                )  # fmt: skip
                total = k_mass + weight
            if share < (1 << 24):
                threshold, weight = _search(
                    logits, adjusted, gathered, flags, row, stride, vocabulary, capacity, number, top,
                    temperature, first, last, threshold, limit_of(total, share) - above, False, CHUNK,
                )  # fmt: skip
            tl.store(here + THRESHOLD, threshold)


@triton.jit
def _append(target, number, key, listed, capacity):
    many = tl.sum(listed.to(tl.int32), 0)
    if many > 0:
        start = tl.atomic_add(number, many, sem="relaxed")
        at = start + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(target + at, key, mask=listed & (at < capacity))


@triton.jit
def _search(
    logits, adjusted, gathered, flags, row, stride, vocabulary, capacity, number, top, temperature, first,
    last, least, target, BY_COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key in bins first to last such that the tokens from there up number or weigh `target`.

    And their weight. The tokens are those gathered, or the whole row when there was no room for them. The
    range between two keys is halved until it is one, each time taken in to keys that occur.
    """
    low, high = tl.full((), LOWEST, tl.int64), tl.full((), HIGHEST, tl.int64)
    weighed = tl.full((), 0, tl.int64)
    span = tl.where(number > capacity, vocabulary, number)
    while low < high:
        middle = low + (high - low + 1) // 2
        count, weight_sum = tl.zeros([CHUNK], tl.int64), tl.zeros([CHUNK], tl.int64)
        ups, downs = tl.full([CHUNK], HIGHEST, tl.int64), tl.full([CHUNK], LOWEST, tl.int64)
        for start in range(0, span, CHUNK):
            index = start + tl.arange(0, CHUNK)
            if number > capacity:
                value = load_values(logits, adjusted, flags, row, stride, vocabulary, index)
                key = tl.where(index < vocabulary, key_of(value, index), LOWEST)
            else:
                key = tl.load(
                    gathered + row * capacity + index, mask=index < number, other=LOWEST, cache_modifier=".cg"
                )
            weight, below = weigh(tl.div_rn(value_of(key) - top, temperature))
            place = below >> 15
            near = (key > LOWEST) & (place >= first) & (place <= last) & (key >= least)
            above = near & (key >= middle)
            count += above.to(tl.int64)
            weight_sum += tl.where(above, weight, 0)
            ups = tl.minimum(ups, tl.where(above, key, HIGHEST))
            downs = tl.maximum(downs, tl.where(near & (key < middle), key, LOWEST))
        heavy = tl.sum(weight_sum, 0)
        reached = (tl.sum(count, 0) if BY_COUNT else heavy) >= target
        if reached:
            low, weighed = tl.min(ups, 0), heavy
        else:
            high = tl.max(downs, 0)
    return low, weighed


@triton.jit
def rank_kernel(
    logits, adjusted, record, arrived, pool, positions, slots, numbers, integers, ids_out, scores_out, stride,
    vocabulary, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gathers what the filters keep of a draft's row, at most POOL tokens, and ranks it."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    numbers, integers = of_slot(numbers, integers, slot)
    temperature, top_k, share, least = load_filters(numbers, integers, COUNT)
    here = record + row * WORDS
    if _open(here, temperature, top_k, share):
        top, flags = value_of(tl.load(here + TOP)), tl.load(integers + 2)
        threshold = tl.load(here + THRESHOLD)
        for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = load_values(logits, adjusted, flags, row, stride, vocabulary, ids)
            score = tl.div_rn(value - top, temperature)
            below = weigh(score)[1]
            key = key_of(value, ids)
            allowed = (below < REACH) & (ids < vocabulary) & (key >= threshold) & (score >= least)
            _append(pool + row * POOL, here + KEPT, key, allowed, POOL)
        if finishes(arrived, row, splits):
            index = tl.arange(0, POOL)
            live = index < tl.load(here + KEPT, cache_modifier=".cg")
            key = tl.load(pool + row * POOL + index, mask=live, other=LOWEST, cache_modifier=".cg")
            score = tl.where(live, tl.div_rn(value_of(key) - top, temperature), -1000.0)
            total = tl.load(here + TOTAL)
            store_ranking(
                row, key, live, score, total, positions, numbers, integers, ids_out, scores_out, COUNT
            )
