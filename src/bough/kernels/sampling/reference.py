"""Sampling tokens: filters, and Gumbel noise that depends on (seed, position, token) alone, in plain torch.

The noise is Philox4x32-10 with the seed as key and (token, position, position >> 32, 0) as counter, first
output word. A token is argmax(log p + noise), an exact sample from p, the same however the text is divided
into steps.
"""

import math

import numpy
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_OCTAVES = 1.4426950408889634 * 2**20  # of 2^-20 in one e
# 2^x - 1 over [0, 1] by Horner's rule and 1 itself, times 2^31; off by at most 1e-7 of 2^x.
_EXP2 = (4035806, 19308016, 119869693, 515738108, 1488532025, 2**31)
# The noise of two tokens differs by less than 26, which is 37 octaves.
REACH = 41 << 20
# Of a draft's row only so many tokens get noise: fewer would miss some that it lifts.
POOL = 256
# A candidate that the noise has lifted promises more than it keeps. Tokens a step of the embedded pair on 24
# functions at T 0.8, by factor: 2: 3.03, 1: 3.22, 0.7: 3.25, 0.5: 3.28, 0.3: 3.16.
SHARPNESS = 0.5


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b for unsigned 32-bit values held in int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high << 16) | (low & 0xFFFF)) & _MASK


def philox(seed: int, token: Tensor, position: Tensor) -> Tensor:
    """The first of the four 32-bit words, as int64; token and position (up to 64 bits) are broadcast."""
    c0, c1, c2 = torch.broadcast_tensors(token & _MASK, position & _MASK, (position >> 32) & _MASK)
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0


def gumbel(seed: int, token: Tensor, position: Tensor) -> Tensor:
    uniform = ((philox(seed, token, position).double() + 0.5) * 2.0**-32).float()
    # The largest uniforms round to one, whose logarithm would be infinite.
    return -(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24))).log()


def fixed_exp(scores: Tensor) -> Tensor:
    """2^40 e^score of scores <= 0 as whole numbers, int64; 0 below 2^-41.

    Sums of whole numbers do not depend on their order, so that every machine cuts at the same token.
    """
    # The only rounding: one float32 multiplication.
    below = (scores * -_OCTAVES).clamp(max=2.0**30).long()
    octave = (below + 0xFFFFF) >> 20
    fraction = ((octave << 20) - below) << 12
    power = torch.zeros_like(fraction)
    for coefficient in _EXP2:
        power = coefficient + (power * fraction >> 32)
    return (power << 9) >> octave.clamp(max=63)


def best(logits: Tensor, count: int) -> Tensor:
    """Ids [R, count] of the largest logits [R, V], best first; of equal ones the lower id comes first."""
    if count < logits.shape[-1]:
        values, ids = logits.topk(count, -1)
        if bool(((logits >= values[:, -1:]).sum(-1) == count).all()):
            ids = ids.sort(-1).values
            order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
            return ids.gather(-1, order)
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def cooled(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, the largest at 0: a tiny temperature overflows downwards only."""
    logits = logits.float()
    # A tensor on the device: divided by a number, some devices multiply by its reciprocal.
    divisor = torch.full((), temperature, device=logits.device)
    return (logits - logits.amax(-1, keepdim=True)) / divisor


def filtered(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """logits [R, V] to scores [R, N] and token ids [R, N], best first; tokens cut by a filter score -inf.

    Of equal logits the lower id comes first. top-p keeps a token while those before it hold less than that
    share of what top-k left; min-p while it has that share of the best one's probability. Tokens below 2^-41
    of the best are cut as well: no noise is large enough to lift them above it.
    """
    vocabulary = logits.shape[-1]
    ids = best(logits, min(top_k or vocabulary, vocabulary))
    scores = cooled(logits, temperature).gather(-1, ids)
    keep = scores * -_OCTAVES < REACH
    share = int(float32(top_p) * 2**24)
    if share < 2**24:
        weights = fixed_exp(scores)
        above = weights.cumsum(-1) - weights
        total = above[:, -1:] + weights[:, -1:]
        # floor(share * total / 2^24) without leaving 64 bits.
        limit = (total >> 24) * share + ((total & 0xFFFFFF) * share >> 24)
        keep &= above < limit.clamp(min=1)
    if min_p > 0:
        keep &= scores >= float32(math.log(min_p))
    width = int(keep.sum(-1).max())
    return scores.masked_fill(~keep, -torch.inf)[:, :width], ids[:, :width]


def float32(number: float) -> float:
    """The nearest float32, as a device holds the number."""
    return float(numpy.float32(number))


def sample(
    logits: Tensor,
    positions: Tensor,
    *,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    noise: Tensor | None = None,
) -> Tensor:
    """One token [R] for each row of logits [R, V]; positions [R] of the tokens.

    `noise` [R, V], if computed before, is `gumbel` of these positions over the whole vocabulary.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if top_k == 0 and top_p >= 1 and min_p <= 0:
        if noise is None:
            noise = gumbel(seed, torch.arange(logits.shape[-1], device=logits.device), positions[:, None])
        return (cooled(logits, temperature) + noise).argmax(-1)
    scores, ids = filtered(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    winner = (scores + gumbel(seed, ids, positions[:, None])).argmax(-1, keepdim=True)
    return ids.gather(1, winner)[:, 0]


def rank(
    logits: Tensor,
    positions: Tensor,
    *,
    count: int,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[Tensor, Tensor]:
    """Rank a draft's rows [K, V]: at most `count` best ids, best first, with log probabilities.

    Adds the noise that verification will add: what it lifts is what will be sampled.
    """
    if temperature == 0:
        ids = best(logits, min(count, logits.shape[1]))
        return ids, logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
    pool = min(top_k or POOL, POOL)
    scores, ids = filtered(logits, temperature=temperature, top_k=pool, top_p=top_p, min_p=min_p)
    scores = SHARPNESS * (scores + gumbel(seed, ids, positions[:, None]))
    top = scores.log_softmax(-1).topk(min(count, scores.shape[1]), -1)
    return ids.gather(1, top.indices), top.values


def penalised(
    logits: Tensor,
    prompt: Tensor,
    counts: Tensor,
    tokens: Tensor,
    visible: Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """Return logits [R, V] with the penalties of each row's own path.

    prompt [V] bool: tokens of the prompt; counts [V]: occurrences before the tree's root; tokens [T] and
    visible [R, T]: the row itself and its ancestors. The repetition penalty counts prompt and output,
    presence and frequency the output alone.
    """
    counts = counts.expand_as(logits).clone()
    counts.scatter_add_(1, tokens.expand(len(logits), -1), visible.to(counts.dtype))
    if repetition != 1.0:
        seen = (counts > 0) | prompt
        # A tensor on the device: divided by a number, some devices multiply by its reciprocal.
        divisor = torch.full((), repetition, device=logits.device)
        shrunk = torch.where(logits > 0, logits / divisor, logits * repetition)
        logits = torch.where(seen, shrunk, logits)
    if presence or frequency:
        logits = logits - presence * (counts > 0) - frequency * counts
    return logits
