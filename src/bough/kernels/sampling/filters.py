"""What the sampling kernels have in common: a request's filters, a row's record, who finishes a row."""

import triton
import triton.language as tl

from bough.kernels.sampling import reference, workspace

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
