"""Triton kernels of the draw and of the ranking of a draft's rows. Knows no requests, only their numbers.

A row of logits is read by several programs, and by several kernels: adjust (penalties, largest logit),
histogram of weights by score, locate (the bins where top-k and top-p cut), gather (what is in those bins),
solve (the last token kept), then noise and largest. All sums are of whole numbers and every order is total,
so the outcome depends neither on the number of programs nor on who comes first. Filters that are not asked
for make their kernels return at once: one recorded sequence serves every request.
"""

import triton
import triton.language as tl

from treeflash.kernels.sampling import reference, state
from treeflash.kernels.sampling.arithmetic import gumbel, key_of, log, value_of, weigh

BINS = tl.constexpr(2048)  # of 1/32 octave; those beyond 41 octaves stay empty
POOL = tl.constexpr(reference.POOL)
_PENALISED = tl.constexpr(state.PENALISED)
_BIASED = tl.constexpr(state.BIASED)
_REACH = tl.constexpr(reference.REACH)
# Beyond every key, and their difference still fits in 64 bits.
_LOWEST = tl.constexpr(-(1 << 52))
_HIGHEST = tl.constexpr(1 << 60)
_SHARPNESS = tl.constexpr(reference.SHARPNESS)


@triton.jit
def _filters(numbers, integers, COUNT: tl.constexpr):
    """Temperature, top-k, top-p times 2^24, least score; COUNT > 0: for the ranking of so many candidates."""
    temperature = tl.load(numbers)
    top_k = tl.load(integers)
    share = (tl.load(numbers + 1) * 16777216.0).to(tl.int64)
    least = tl.load(numbers + 2)
    if COUNT > 0:
        greedy = temperature == 0
        top_k = tl.where(top_k == 0, POOL, tl.minimum(top_k, POOL))
        top_k = tl.where(greedy, COUNT, top_k)
        share = tl.where(greedy, 1 << 24, share)
        least = tl.where(greedy, float("-inf"), least)
        temperature = tl.where(greedy, 1.0, temperature)
    return temperature, top_k, share, least


@triton.jit
def _cuts(temperature, top_k, share):
    """Whether a threshold has to be found."""
    return (temperature > 0) & ((top_k > 0) | (share < (1 << 24)))


@triton.jit
def _limit(total, share):
    return tl.maximum((total >> 24) * share + (((total & 0xFFFFFF) * share) >> 24), 1)


@triton.jit
def _load(logits, adjusted, integers, row, stride, vocabulary, ids):
    inside = ids < vocabulary
    if tl.load(integers + 2) != 0:
        value = tl.load(adjusted + row * vocabulary + ids, mask=inside, other=float("-inf"))
    else:
        value = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    return value


@triton.jit
def _largest(partial, row, splits, SPLITS: tl.constexpr):
    index = tl.arange(0, SPLITS)
    return tl.max(tl.load(partial + row * SPLITS + index, mask=index < splits, other=_LOWEST), 0)


@triton.jit(do_not_specialize=["tree_rows", "words"])
def adjust_kernel(
    logits,
    adjusted,
    partial,
    mass,
    count,
    filled,
    numbers,
    integers,
    prompt,
    written,
    bias,
    allowed,
    tokens,
    ancestors,
    tree_rows,
    stride,
    vocabulary,
    words,
    MASKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Applies what the request asks of the logits, finds the largest, and empties the histogram.

    MASKS: the flag of a grammar's masks, 0 where these rows have none.
    """
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    bins = tl.arange(0, BINS)
    own = bins % splits == split
    tl.store(mass + row * BINS + bins, tl.zeros([BINS], tl.int64), mask=own)
    tl.store(count + row * BINS + bins, tl.zeros([BINS], tl.int32), mask=own)
    if split == 0:
        tl.store(filled + row * 2, 0)
        tl.store(filled + row * 2 + 1, 0)
    flags = tl.load(integers + 2)
    best = tl.full([BLOCK], _LOWEST, tl.int64)
    for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocabulary
        value = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
        if flags & _PENALISED:
            seen = tl.load(written + ids, mask=inside, other=0.0)
            above = tl.load(ancestors + row)
            for other in range(0, tree_rows):
                token = tl.load(tokens + other).to(tl.int32)
                if (token // BLOCK == block) & (((above >> other) & 1) != 0):
                    seen += (ids == token).to(tl.float32)
            repetition = tl.load(numbers + 3)
            shrunk = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
            met = (seen > 0) | (tl.load(prompt + ids, mask=inside, other=0) != 0)
            value = tl.where(met, shrunk, value)
            value = value - tl.load(numbers + 4) * (seen > 0).to(tl.float32) - tl.load(numbers + 5) * seen
        if flags & _BIASED:
            value = value + tl.load(bias + ids, mask=inside, other=0.0)
        if flags & MASKS:
            word = tl.load(allowed + row * words + ids // 32, mask=inside, other=0)
            value = tl.where(((word >> (ids % 32)) & 1) != 0, value, float("-inf"))
        if flags != 0:
            tl.store(adjusted + row * vocabulary + ids, value, mask=inside)
        best = tl.maximum(best, tl.where(inside, key_of(value, ids), _LOWEST))
    tl.store(partial + row * SPLITS + split, tl.max(best, 0))


@triton.jit
def histogram_kernel(
    logits,
    adjusted,
    partial,
    mass,
    count,
    numbers,
    integers,
    stride,
    vocabulary,
    COUNT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weight and number of the tokens in each bin of scores."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, share, _ = _filters(numbers, integers, COUNT)
    if _cuts(temperature, top_k, share):
        top = value_of(_largest(partial, row, splits, SPLITS))
        for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = _load(logits, adjusted, integers, row, stride, vocabulary, ids)
            weight, below = weigh(tl.div_rn(value - top, temperature))
            near = (below < _REACH) & (ids < vocabulary)
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


@triton.jit
def locate_kernel(mass, count, state, numbers, integers, COUNT: tl.constexpr):
    """The bin where top-k cuts, and those where top-p may: its share depends on what top-k leaves."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, share, _ = _filters(numbers, integers, COUNT)
    if _cuts(temperature, top_k, share):
        bins = tl.arange(0, BINS)
        masses = tl.cumsum(tl.load(mass + row * BINS + bins), 0)
        counts = tl.cumsum(tl.load(count + row * BINS + bins), 0).to(tl.int64)
        total = tl.max(masses, 0)
        short = counts < top_k
        k_bin = tl.sum(short.to(tl.int32), 0)
        reached = (top_k > 0) & (k_bin < BINS)
        k_mass = tl.max(tl.where(short, masses, 0), 0)
        most = tl.min(tl.where(short, _HIGHEST, masses), 0)
        low = _limit(tl.where(reached, k_mass, total), share)
        high = _limit(tl.where(reached, most, total), share)
        cut = share < (1 << 24)
        here = state + row * 8
        tl.store(here, tl.where(reached, k_bin, -1))
        tl.store(here + 1, top_k - tl.max(tl.where(short, counts, 0), 0))
        tl.store(here + 2, k_mass)
        tl.store(here + 3, tl.where(cut, tl.sum((masses < low).to(tl.int32), 0), BINS))
        tl.store(here + 4, tl.where(cut, tl.sum((masses < high).to(tl.int32), 0), -1))
        tl.store(here + 5, tl.max(tl.where(masses < low, masses, 0), 0))
        tl.store(here + 6, total)


@triton.jit(do_not_specialize=["capacity"])
def gather_kernel(
    logits,
    adjusted,
    partial,
    state,
    filled,
    found,
    numbers,
    integers,
    stride,
    vocabulary,
    capacity,
    FINAL: tl.constexpr,
    COUNT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys of the tokens in the bins that are cut or, when FINAL, of those that are kept; in any order."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, share, least = _filters(numbers, integers, COUNT)
    if _cuts(temperature, top_k, share):
        top = value_of(_largest(partial, row, splits, SPLITS))
        here = state + row * 8
        k_bin, first, last = tl.load(here), tl.load(here + 3), tl.load(here + 4)
        threshold = tl.load(here + 7)
        number = filled + row * 2 + FINAL
        for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = _load(logits, adjusted, integers, row, stride, vocabulary, ids)
            score = tl.div_rn(value - top, temperature)
            _, below = weigh(score)
            wanted = (below < _REACH) & (ids < vocabulary)
            key = key_of(value, ids)
            if FINAL:
                wanted = wanted & (key >= threshold) & (score >= least)
            else:
                place = below >> 15
                wanted = wanted & ((place == k_bin) | ((place >= first) & (place <= last)))
            many = tl.sum(wanted.to(tl.int32), 0)
            if many > 0:
                start = tl.atomic_add(number, many, sem="relaxed")
                at = start + tl.cumsum(wanted.to(tl.int32), 0) - 1
                tl.store(found + row * capacity + at, key, mask=wanted & (at < capacity))


@triton.jit
def _search(
    logits,
    adjusted,
    found,
    integers,
    row,
    stride,
    vocabulary,
    capacity,
    number,
    top,
    temperature,
    first,
    last,
    least,
    target,
    BY_COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest key in bins first to last such that the tokens from there up number or weigh `target`.

    And their weight. The tokens are those gathered, or the whole row when there was no room for them. The
    range between two keys is halved until it is one, each time taken in to keys that occur.
    """
    low, high = tl.full((), _LOWEST, tl.int64), tl.full((), _HIGHEST, tl.int64)
    weighed = tl.full((), 0, tl.int64)
    span = tl.where(number > capacity, vocabulary, number)
    while low < high:
        middle = low + (high - low + 1) // 2
        count, weight_sum = tl.zeros([CHUNK], tl.int64), tl.zeros([CHUNK], tl.int64)
        ups, downs = tl.full([CHUNK], _HIGHEST, tl.int64), tl.full([CHUNK], _LOWEST, tl.int64)
        for start in range(0, span, CHUNK):
            index = start + tl.arange(0, CHUNK)
            if number > capacity:
                value = _load(logits, adjusted, integers, row, stride, vocabulary, index)
                key = tl.where(index < vocabulary, key_of(value, index), _LOWEST)
            else:
                key = tl.load(found + row * capacity + index, mask=index < number, other=_LOWEST)
            weight, below = weigh(tl.div_rn(value_of(key) - top, temperature))
            place = below >> 15
            near = (key > _LOWEST) & (place >= first) & (place <= last) & (key >= least)
            above = near & (key >= middle)
            count += above.to(tl.int64)
            weight_sum += tl.where(above, weight, 0)
            ups = tl.minimum(ups, tl.where(above, key, _HIGHEST))
            downs = tl.maximum(downs, tl.where(near & (key < middle), key, _LOWEST))
        heavy = tl.sum(weight_sum, 0)
        reached = (tl.sum(count, 0) if BY_COUNT else heavy) >= target
        if reached:
            low, weighed = tl.min(ups, 0), heavy
        else:
            high = tl.max(downs, 0)
    return low, weighed


@triton.jit(do_not_specialize=["capacity", "splits"])
def solve_kernel(
    logits,
    adjusted,
    partial,
    state,
    filled,
    found,
    numbers,
    integers,
    stride,
    vocabulary,
    capacity,
    splits,
    COUNT: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The key of the last token that top-k and top-p keep."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, share, _ = _filters(numbers, integers, COUNT)
    if _cuts(temperature, top_k, share):
        top = value_of(_largest(partial, row, splits, SPLITS))
        here = state + row * 8
        number = tl.load(filled + row * 2)
        k_bin, rank, k_mass = tl.load(here), tl.load(here + 1), tl.load(here + 2)
        first, last, above = tl.load(here + 3), tl.load(here + 4), tl.load(here + 5)
        total = tl.load(here + 6)
        threshold, weight = tl.full((), _LOWEST, tl.int64), tl.full((), 0, tl.int64)
        if k_bin >= 0:
            threshold, weight = _search(
                logits,
                adjusted,
                found,
                integers,
                row,
                stride,
                vocabulary,
                capacity,
                number,
                top,
                temperature,
                k_bin,
                k_bin,
                threshold,
                rank,
                True,
                CHUNK,
            )
            total = k_mass + weight
        if share < (1 << 24):
            threshold, weight = _search(
                logits,
                adjusted,
                found,
                integers,
                row,
                stride,
                vocabulary,
                capacity,
                number,
                top,
                temperature,
                first,
                last,
                threshold,
                _limit(total, share) - above,
                False,
                CHUNK,
            )
        tl.store(here + 7, threshold)


@triton.jit
def noise_kernel(
    logits,
    adjusted,
    partial,
    perturbed,
    state,
    positions,
    numbers,
    integers,
    stride,
    vocabulary,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest of score and noise among the tokens that are kept."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, share, least = _filters(numbers, integers, 0)
    if temperature > 0:
        top = value_of(_largest(partial, row, splits, SPLITS))
        seed, position = tl.load(integers + 1), tl.load(positions + row)
        threshold = tl.full((), _LOWEST, tl.int64)
        if _cuts(temperature, top_k, share):
            threshold = tl.load(state + row * 8 + 7)
        best = tl.full([BLOCK], _LOWEST, tl.int64)
        for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = _load(logits, adjusted, integers, row, stride, vocabulary, ids)
            score = tl.div_rn(value - top, temperature)
            # 41 octaves: no noise lifts a token from further below.
            kept = (ids < vocabulary) & (score >= least) & (score > -28.42)
            kept = kept & (key_of(value, ids) >= threshold)
            if tl.max(kept.to(tl.int32), 0) > 0:
                noisy = key_of(score + gumbel(seed, ids, position), ids)
                best = tl.maximum(best, tl.where(kept, noisy, _LOWEST))
        tl.store(perturbed + row * SPLITS + split, tl.max(best, 0))


@triton.jit(do_not_specialize=["splits"])
def choose_kernel(partial, perturbed, tokens, numbers, splits, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(numbers) > 0:
        best = _largest(perturbed, row, splits, SPLITS)
    else:
        best = _largest(partial, row, splits, SPLITS)
    tl.store(tokens + row, 0xFFFFF - (best & 0xFFFFF))


@triton.jit(do_not_specialize=["splits"])
def rank_kernel(
    partial,
    state,
    filled,
    kept,
    positions,
    numbers,
    integers,
    ids_out,
    scores_out,
    splits,
    COUNT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The COUNT best of the tokens kept, with the noise at a temperature, and their log probabilities."""
    row = tl.program_id(0).to(tl.int64)
    top = value_of(_largest(partial, row, splits, SPLITS))
    index = tl.arange(0, POOL)
    number = tl.load(filled + row * 2 + 1)
    live = index < number
    key = tl.load(kept + row * POOL + index, mask=live, other=_LOWEST)
    ids = (0xFFFFF - (key & 0xFFFFF)).to(tl.int32)
    temperature = tl.load(numbers)
    score = value_of(key) - top
    total = tl.load(state + row * 8 + 6)
    if temperature > 0:
        noise = gumbel(tl.load(integers + 1), ids, tl.load(positions + row))
        score = _SHARPNESS * (tl.div_rn(score, temperature) + noise)
        score = score - tl.max(tl.where(live, score, float("-inf")), 0)
        weight, _ = weigh(score)
        total = tl.sum(tl.where(live, weight, 0), 0)
    normaliser = log(total.to(tl.float32) * 9.094947017729282e-13)
    order = tl.where(live, key_of(score, ids), _LOWEST)
    for place in range(COUNT):
        best = tl.max(order, 0)
        found = best > _LOWEST
        tl.store(ids_out + row * COUNT + place, tl.where(found, 0xFFFFF - (best & 0xFFFFF), 0))
        log_probability = tl.where(found, tl.minimum(value_of(best) - normaliser, 0.0), float("-inf"))
        tl.store(scores_out + row * COUNT + place, log_probability)
        order = tl.where(order == best, _LOWEST, order)
