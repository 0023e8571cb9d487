"""Arithmetic of the sampling kernels, element by element: sort keys, weights, logarithm, noise."""

import triton
import triton.language as tl


@triton.jit
def ordered_bits(value):
    """32-bit whole numbers in the order of the values."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(value, ids):
    """Whole numbers in the order of (value, lower id first)."""
    return (ordered_bits(value).to(tl.int64) << 20) | (0xFFFFF - ids)


@triton.jit
def value_of(key):
    ordered = (key >> 20).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(score):
    """2^40 e^score and the distance below 0 in 2^-20 octaves, bit for bit as the reference has them."""
    below = tl.minimum(score * -1512775.3951951856, 1073741824.0).to(tl.int32)
    octave = (below + 0xFFFFF) >> 20
    fraction = (((octave << 20) - below) << 12).to(tl.uint32, bitcast=True)
    power = tl.umulhi(fraction, tl.full((), 4035806, tl.uint32)) + 19308016
    power = tl.umulhi(fraction, power) + 119869693
    power = tl.umulhi(fraction, power) + 515738108
    power = tl.umulhi(fraction, power) + 1488532025
    power = tl.umulhi(fraction, power) + tl.full((), 2147483648, tl.uint32)
    return (power.to(tl.int64) << 9) >> tl.minimum(octave, 63).to(tl.int64), below


@triton.jit
def log(x):
    """Of normal positive numbers, to two units in the last place on every machine."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = 2.0 + z * (0.6666666667 + z * (0.4 + z * (0.2857142857 + z * 0.2222222222)))
    return s * series + exponent.to(tl.float32) * 0.6931471805599453


@triton.jit
def random_word(seed, token, position):
    """The first word of Philox4x32-10 as the reference has it."""
    first = tl.full((), 0xD2511F53, tl.uint64)
    second = tl.full((), 0xCD9E8D57, tl.uint64)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0 = token.to(tl.uint32)
    zero = c0 ^ c0
    c1, c2, c3 = zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32), zero
    for _ in tl.static_range(10):
        # One wide product has both words.
        wide0, wide1 = c0.to(tl.uint64) * first, c2.to(tl.uint64) * second
        c0, c1 = (wide1 >> 32).to(tl.uint32) ^ c1 ^ k0, wide1.to(tl.uint32)
        c2, c3 = (wide0 >> 32).to(tl.uint32) ^ c3 ^ k1, wide0.to(tl.uint32)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0


@triton.jit
def gumbel_of(word):
    """Standard Gumbel noise; the two logarithms are within a few units of the reference's."""
    uniform = (word.to(tl.int64) * 2 + 1).to(tl.float32) * 1.1641532182693481e-10
    uniform = tl.minimum(uniform, 0.999999940395355)
    rest = 1.0 - uniform
    # What the subtraction rounded off, so that small numbers keep their digits.
    return -log(-log(rest) - ((1.0 - rest) - uniform) / rest)


@triton.jit
def gumbel(seed, token, position):
    return gumbel_of(random_word(seed, token, position))
