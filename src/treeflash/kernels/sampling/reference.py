"""Drawing tokens: filters, and Gumbel noise that depends on (seed, position, token) alone, in plain torch.

The noise is Philox4x32-10 with the seed as key and (token, position, position >> 32, 0) as counter, first
output word. A token is argmax(log p + noise), an exact draw from p, the same however the text was cut into
steps.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


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
    """Standard Gumbel noise, float32."""
    uniform = ((philox(seed, token, position).double() + 0.5) * 2.0**-32).float()
    # The largest draws round to one, whose logarithm would be infinite.
    return -(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24))).log()


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, the largest at 0: a tiny temperature overflows downwards only."""
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def filtered(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """logits [R, V] to scores [R, N] and token ids [R, N], best first; tokens cut by a filter score -inf."""
    vocabulary = logits.shape[-1]
    scores, ids = _cooled(logits, temperature).topk(min(top_k or vocabulary, vocabulary), -1)
    if top_p < 1 or min_p > 0:
        probability = scores.softmax(-1)
        above = probability.cumsum(-1) - probability
        keep = (above < top_p) & (probability >= min_p * probability[:, :1])
        keep[:, 0] = True
        scores = scores.masked_fill(~keep, -torch.inf)
        width = int(keep.sum(-1).max())
        scores, ids = scores[:, :width], ids[:, :width]
    return scores, ids


def draw(
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
    """One token [R] for each row of logits [R, V]; positions [R] are where the tokens will stand.

    `noise` [R, V], where it is at hand, is what `gumbel` gives for these positions and the whole vocabulary.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if top_k == 0 and top_p >= 1 and min_p <= 0:
        if noise is None:
            noise = gumbel(seed, torch.arange(logits.shape[-1], device=logits.device), positions[:, None])
        return (_cooled(logits, temperature) + noise).argmax(-1)
    scores, ids = filtered(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    best = (scores + gumbel(seed, ids, positions[:, None])).argmax(-1, keepdim=True)
    return ids.gather(1, best)[:, 0]
