"""Triton kernels that sample tokens and rank a draft's rows.

adjust applies penalties and finds each row's best token; shortlist weighs the row and lists its best tokens,
among which top-k and top-p nearly always cut, and samples or ranks there; with no cut, noise samples.
Rows that the short list does not settle go through histogram and gather in between: a histogram of weights by
score gives the bins where top-k and top-p cut, the tokens in those bins are gathered, and the last token kept
is searched for among them. All sums are of whole numbers and every order is total, so the outcome depends
neither on the number of programs nor on who comes first. What is not asked for returns at once: one recorded
sequence serves every request.
"""

import triton
import triton.language as tl

from bough.kernels.sampling import reference, state, workspace
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

_PENALISED = tl.constexpr(state.PENALISED)
_BIASED = tl.constexpr(state.BIASED)
_SHARPNESS = tl.constexpr(reference.SHARPNESS)
_PART = tl.constexpr(1024)
_TREE = tl.constexpr(64)  # rows of a tree at most
BINS = tl.constexpr(workspace.BINS)
POOL = tl.constexpr(reference.POOL)
REACH = tl.constexpr(reference.REACH)
# Beyond every key, and their difference still fits in 64 bits.
LOWEST = tl.constexpr(-(1 << 52))
HIGHEST = tl.constexpr(1 << 60)

# Words of a row's record.
K_BIN = tl.constexpr(0)  # where top-k cuts, -1: nowhere
K_RANK = tl.constexpr(1)  # how many of that bin it keeps
K_MASS = tl.constexpr(2)  # weight above that bin
P_FIRST = tl.constexpr(3)  # bins in which top-p may cut
P_LAST = tl.constexpr(4)
P_ABOVE = tl.constexpr(5)  # weight above them
TOTAL = tl.constexpr(6)  # weight of the row
THRESHOLD = tl.constexpr(7)  # key of the last token that top-k and top-p keep
TOP = tl.constexpr(8)  # key of the best token
BOUND = tl.constexpr(9)  # what is as large as this is on the short list
OPEN = tl.constexpr(10)  # 1: the short list was not enough
LISTED = tl.constexpr(11)  # tokens on the short list, in the bins that are cut, kept in the end
GATHERED = tl.constexpr(12)
KEPT = tl.constexpr(13)
WORDS = tl.constexpr(workspace.WORDS)


@triton.jit
def of_slot(numbers, integers, slot):
    return numbers + slot * 6, integers + slot * 3


@triton.jit
def load_filters(numbers, integers, COUNT: tl.constexpr):
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
def cuts(temperature, top_k, share):
    """Whether a threshold has to be found."""
    return (temperature > 0) & ((top_k > 0) | (share < (1 << 24)))


@triton.jit
def limit_of(total, share):
    return tl.maximum((total >> 24) * share + (((total & 0xFFFFFF) * share) >> 24), 1)


@triton.jit
def load_values(logits, adjusted, flags, row, stride, vocabulary, ids):
    """Logits as the request wants them; its flags say whether they differ from the model's."""
    inside = ids < vocabulary
    if flags != 0:
        value = tl.load(adjusted + row * vocabulary + ids, mask=inside, other=float("-inf"))
    else:
        value = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    return value


@triton.jit
def finishes(arrived, row, programs):
    """Whether all other programs of the row have been here; what they stored can then be read past L1."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrived + row, 0)
    return last


@triton.jit
def token_of(key, vocabulary):
    """The id in a key; a row without any number has some token too."""
    return tl.minimum(0xFFFFF - (key & 0xFFFFF), vocabulary - 1)


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
