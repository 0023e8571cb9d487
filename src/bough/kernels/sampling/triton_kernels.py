"""Triton kernels that sample tokens and rank a draft's rows.

adjust applies penalties and finds each row's best token; shortlist weighs the row and lists its best tokens,
among which top-k and top-p nearly always cut, and samples or ranks there; with no cut, noise samples.
Rows that the short list does not settle go through the kernels of `search` in between. All sums are of whole
numbers and every order is total, so the outcome depends neither on the number of programs nor on who comes
first. What is not asked for returns at once: one recorded sequence serves every request.
"""

import triton
import triton.language as tl

from bough.kernels.sampling import reference, state
from bough.kernels.sampling.arithmetic import (
    gumbel,
    gumbel_of,
    key_of,
    log,
    ordered_bits,
    random_word,
    value_of,
    weigh,
)
from bough.kernels.sampling.filters import (
    BINS,
    BOUND,
    GATHERED,
    HIGHEST,
    KEPT,
    LISTED,
    LOWEST,
    OPEN,
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
    token_of,
)

_PENALISED = tl.constexpr(state.PENALISED)
_BIASED = tl.constexpr(state.BIASED)
_SHARPNESS = tl.constexpr(reference.SHARPNESS)
_PART = tl.constexpr(1024)
_TREE = tl.constexpr(64)  # rows of a tree at most


@triton.jit(do_not_specialize=["tree_rows", "words"])
def adjust_kernel(
    logits, adjusted, partial, maxima, record, arrived, out, numbers, integers, prompt, counts, bias,
    allowed, tokens, ancestors, slots, starts, tree_rows, stride, vocabulary, words, MASKS: tl.constexpr,
    COUNT: tl.constexpr, CLASSES: tl.constexpr, MAXIMA: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Applies what the request asks of the logits; finds the best token and the short list's bound.

    MASKS: the flag of a grammar's masks, 0 where these rows have none. The vocabulary is dealt out to CLASSES
    classes of each program, neighbours to different ones: at least RANK tokens are as large as the class
    maximum of that rank, and hardly more.
    """
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    numbers, integers = of_slot(numbers, integers, slot)
    prompt, counts, bias = prompt + slot * vocabulary, counts + slot * vocabulary, bias + slot * vocabulary
    begin = tl.load(starts + row).to(tl.int32)
    tokens, tree_rows = tokens + begin, tree_rows - begin
    PART: tl.constexpr = min(_PART, BLOCK)
    deal = tl.arange(0, BLOCK // CLASSES)[:, None] * splits + split
    ids = deal * CLASSES + tl.arange(0, CLASSES)[None, :]
    inside = ids < vocabulary
    value = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    flags = tl.load(integers + 2)
    if flags != 0:
        # In small parts: many registers here would leave room for few programs everywhere.
        for part in range(0, BLOCK, PART):
            place = part + tl.arange(0, PART)
            _adjust(
                logits, adjusted, numbers, prompt, counts, bias, allowed, tokens, ancestors, row, tree_rows,
                stride, vocabulary, words, flags,
                (place // CLASSES * splits + split) * CLASSES + place % CLASSES, split, MASKS, CLASSES,
            )  # fmt: skip
        tl.debug_barrier()
        value = tl.load(adjusted + row * vocabulary + ids, mask=inside, other=float("-inf"))
    largest = tl.max(value, 0)
    index = split * CLASSES + tl.arange(0, CLASSES)
    tl.store(maxima + row * MAXIMA + index, largest)
    top = tl.max(largest, 0)
    first = tl.min(tl.min(tl.where(inside & (value == top), ids, 0xFFFFF), 1), 0)
    tl.store(partial + row * SPLITS + split, key_of(top, first))
    if finishes(arrived, row, splits):
        here = record + row * WORDS
        part = tl.arange(0, SPLITS)
        best = tl.load(partial + row * SPLITS + part, mask=part < splits, other=LOWEST, cache_modifier=".cg")
        best = tl.max(best, 0)
        tl.store(here + TOP, best)
        tl.store(here + LISTED, 0)
        temperature, top_k, share, _ = load_filters(numbers, integers, COUNT)
        if cuts(temperature, top_k, share):
            tl.store(here + BOUND, _bound(maxima, row, splits * CLASSES, MAXIMA, RANK))
        if temperature == 0:
            tl.store(out + row, token_of(best, vocabulary))


@triton.jit
def _adjust(
    logits, adjusted, numbers, prompt, counts, bias, allowed, tokens, ancestors, row, tree_rows, stride,
    vocabulary, words, flags, ids, split, MASKS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    inside = ids < vocabulary
    value = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    if flags & _PENALISED:
        seen = tl.load(counts + ids, mask=inside, other=0.0)
        other = tl.arange(0, _TREE)
        token = tl.load(tokens + other, mask=other < tree_rows, other=-1).to(tl.int32)
        above = tl.load(ancestors + row)
        mine = (((above >> other) & 1) != 0) & (token >= 0) & (token // CLASSES % tl.num_programs(1) == split)
        if tl.max(mine.to(tl.int32), 0) > 0:
            for index in range(0, tree_rows):
                on_path = ((above >> index) & 1) != 0
                seen += ((ids == tl.load(tokens + index).to(tl.int32)) & on_path).to(tl.float32)
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
    tl.store(adjusted + row * vocabulary + ids, value, mask=inside)


@triton.jit
def _bound(maxima, row, number, MAXIMA: tl.constexpr, RANK: tl.constexpr):
    """The leading bits that RANK of the maxima reach."""
    index = tl.arange(0, MAXIMA)
    live = index < number
    value = tl.load(maxima + row * MAXIMA + index, mask=live, other=float("-inf"), cache_modifier=".cg")
    leading = _leading(value)
    bound, step = tl.full((), -524288, tl.int32), tl.full((), 524288, tl.int32)
    for _ in tl.static_range(20):
        higher = bound + step
        step = step >> 1
        enough = tl.sum((live & (leading >= higher)).to(tl.int32), 0) >= RANK
        bound = tl.where(enough, higher, bound)
    return bound


@triton.jit
def _leading(value):
    """The upper 20 bits: as fine as the short list's bound has to be."""
    return ordered_bits(value) >> 12


@triton.jit
def shortlist_kernel(
    logits, adjusted, masses, listed, mass, count, record, arrived, positions, slots, numbers, integers,
    out, scores, stride, vocabulary, LIST: tl.constexpr, COUNT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Weighs the row and lists its best tokens; the last program of the row samples or ranks among them.

    Where top-k or top-p may cut beyond the list, the row stays open and its histogram is emptied.
    """
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    numbers, integers = of_slot(numbers, integers, slot)
    temperature, top_k, share, _ = load_filters(numbers, integers, COUNT)
    # Loaded together with the filters: one wait instead of two.
    here = record + row * WORDS
    top, bound, flags = value_of(tl.load(here + TOP)), tl.load(here + BOUND), tl.load(integers + 2)
    if cuts(temperature, top_k, share):
        heavy = tl.full((), 0, tl.int64)
        for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = load_values(logits, adjusted, flags, row, stride, vocabulary, ids)
            weight, below = weigh(tl.div_rn(value - top, temperature))
            inside = ids < vocabulary
            heavy += tl.sum(tl.where(inside, weight, 0), 0)
            in_list = inside & (below < REACH) & (_leading(value) >= bound.to(tl.int32))
            many = tl.sum(in_list.to(tl.int32), 0)
            if many > 0:
                start = tl.atomic_add(here + LISTED, many, sem="relaxed")
                at = start + tl.cumsum(in_list.to(tl.int32), 0) - 1
                tl.store(listed + row * LIST + at, key_of(value, ids), mask=in_list & (at < LIST))
        tl.store(masses + row * SPLITS + split, heavy)
        if finishes(arrived, row, splits):
            part = tl.arange(0, SPLITS)
            total = tl.load(masses + row * SPLITS + part, mask=part < splits, other=0, cache_modifier=".cg")
            number = tl.load(here + LISTED, cache_modifier=".cg")
            index = tl.arange(0, LIST)
            live = index < number
            key = tl.load(listed + row * LIST + index, mask=live, other=LOWEST, cache_modifier=".cg")
            _settle(
                row, key, number, tl.sum(total, 0), top, here, mass, count, positions, numbers, integers,
                out, scores, vocabulary, LIST, COUNT,
            )  # fmt: skip


@triton.jit
def _settle(
    row, key, number, total, top, here, mass, count, positions, numbers, integers, out, scores, vocabulary,
    LIST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    temperature, top_k, share, least = load_filters(numbers, integers, COUNT)
    index = tl.arange(0, LIST)
    live = index < number
    key = tl.sort(key, descending=True)
    score = tl.where(live, tl.div_rn(value_of(key) - top, temperature), -1000.0)
    weight, _ = weigh(score)
    weights = tl.cumsum(weight, 0)
    listed_weight = tl.max(weights, 0)
    left = tl.where(top_k > 0, tl.sum(tl.where(index < top_k, weight, 0), 0), total)
    limit = limit_of(left, share)
    # What is not listed weighs nothing, or is cut.
    settled = (listed_weight == total) | tl.where(top_k > 0, top_k <= number, listed_weight >= limit)
    settled = settled & (number <= LIST)
    allowed = live & ((top_k == 0) | (index < top_k))
    allowed = allowed & ((share == 1 << 24) | (weights - weight < limit))
    tl.store(here + TOTAL, total)
    tl.store(here + OPEN, tl.where(settled, 0, 1))
    if settled:
        tl.store(here + THRESHOLD, tl.min(tl.where(allowed, key, HIGHEST), 0))
        allowed = allowed & (score >= least)
        if COUNT > 0:
            store_ranking(row, key, allowed, score, total, positions, numbers, integers, out, scores, COUNT)
        else:
            token = (0xFFFFF - (key & 0xFFFFF)).to(tl.int32)
            noise = gumbel(tl.load(integers + 1), token, tl.load(positions + row))
            best = tl.max(tl.where(allowed, key_of(score + noise, token), LOWEST), 0)
            tl.store(out + row, token_of(best, vocabulary))
    else:
        bins = tl.arange(0, BINS)
        tl.store(mass + row * BINS + bins, tl.zeros([BINS], tl.int64))
        tl.store(count + row * BINS + bins, tl.zeros([BINS], tl.int32))
        tl.store(here + GATHERED, 0)
        tl.store(here + KEPT, 0)


@triton.jit
def store_ranking(
    row, key, allowed, score, total, positions, numbers, integers, ids_out, scores_out, COUNT: tl.constexpr,
):  # fmt: skip
    """The COUNT best of the tokens kept, with the noise at a temperature, and their log probabilities."""
    token = (0xFFFFF - (key & 0xFFFFF)).to(tl.int32)
    if tl.load(numbers) > 0:
        noise = gumbel(tl.load(integers + 1), token, tl.load(positions + row))
        score = _SHARPNESS * (score + noise)
        score = score - tl.max(tl.where(allowed, score, float("-inf")), 0)
        weight, _ = weigh(score)
        total = tl.sum(tl.where(allowed, weight, 0), 0)
    normaliser = log(total.to(tl.float32) * 9.094947017729282e-13)
    order = tl.where(allowed, key_of(score, token), LOWEST)
    for place in range(COUNT):
        best = tl.max(order, 0)
        present = best > LOWEST
        tl.store(ids_out + row * COUNT + place, tl.where(present, 0xFFFFF - (best & 0xFFFFF), 0))
        log_probability = tl.where(present, tl.minimum(value_of(best) - normaliser, 0.0), float("-inf"))
        tl.store(scores_out + row * COUNT + place, log_probability)
        order = tl.where(order == best, LOWEST, order)


@triton.jit
def noise_kernel(
    logits, adjusted, perturbed, record, arrived, positions, slots, numbers, integers, out, stride,
    vocabulary, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of score and noise among the tokens that are kept, where that is not settled yet."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    numbers, integers = of_slot(numbers, integers, slot)
    temperature, top_k, share, least = load_filters(numbers, integers, 0)
    here = record + row * WORDS
    needed = temperature > 0
    threshold = tl.full((), LOWEST, tl.int64)
    if cuts(temperature, top_k, share):
        needed = tl.load(here + OPEN) != 0
        threshold = tl.load(here + THRESHOLD)
    flags = tl.load(integers + 2)
    if needed:
        top_key = tl.load(here + TOP)
        top = value_of(top_key)
        seed, position = tl.load(integers + 1), tl.load(positions + row)
        best = tl.full((), LOWEST, tl.int64)
        # The best token is always kept, and its score is 0: tokens below its noise need not be considered.
        floor = gumbel(seed, (0xFFFFF - (top_key & 0xFFFFF)).to(tl.int32), position)
        for block in range(split, tl.cdiv(vocabulary, BLOCK), splits):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            value = load_values(logits, adjusted, flags, row, stride, vocabulary, ids)
            score = tl.div_rn(value - top, temperature)
            # 41 octaves: no noise lifts a token from further below.
            allowed = (ids < vocabulary) & (score >= least) & (score > -28.42)
            allowed = allowed & (key_of(value, ids) >= threshold)
            word = random_word(seed, ids, position)
            # Noise is at most -log u, and an approximate logarithm is good enough to say who may win.
            octaves = tl.log2(word.to(tl.float32) + 0.5) - 32.0
            allowed = allowed & (octaves <= (score - floor) * 1.4426950408889634 + 0.02)
            if tl.max(allowed.to(tl.int32), 0) > 0:
                noisy = key_of(score + gumbel_of(word), ids)
                best = tl.maximum(best, tl.max(tl.where(allowed, noisy, LOWEST), 0))
                floor = tl.maximum(floor, tl.where(best > LOWEST, value_of(best), floor))
        tl.store(perturbed + row * SPLITS + split, best)
        if finishes(arrived, row, splits):
            part = tl.arange(0, SPLITS)
            best_parts = tl.load(
                perturbed + row * SPLITS + part, mask=part < splits, other=LOWEST, cache_modifier=".cg"
            )
            tl.store(out + row, token_of(tl.max(best_parts, 0), vocabulary))
