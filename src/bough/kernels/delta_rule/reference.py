"""The gated delta rule, token by token: the specification.

q, k [Hk, D] of a token are of unit length, q scaled; v [Hv, D]; g (log decay, <= 0) and beta [Hv];
state [Hv, D, D], row = key index. Value head h uses q and k of head h % Hk.
"""

import torch
from torch import Tensor

from bough.kernels.causal_conv.records import DeltaHeads


def recurrence(heads: DeltaHeads, state: Tensor, item: int, path: list[int]) -> tuple[Tensor, Tensor]:
    """Return the output [Hv, D] of the path's last row in a batch item, and the state after it."""
    out, of_value = state[:, 0], torch.arange(heads.v.shape[2]) % heads.k.shape[2]
    for row in path:
        q, k, v, g, beta = (part[item, row] for part in heads)
        q, k = q[of_value], k[of_value]
        state = state * g.exp()[:, None, None]
        write = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * write[:, None]
        out = torch.einsum("hk,hkv->hv", q, state)
    return out, state
