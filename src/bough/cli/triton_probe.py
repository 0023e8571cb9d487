"""A minimal Triton kernel, which checks that the tool chain compiles and runs."""

import torch
import triton
import triton.language as tl


@triton.jit
def _double(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(target + index, 2 * tl.load(source + index, mask=inside), mask=inside)


def double(x: torch.Tensor) -> torch.Tensor:
    """Return 2 x. x: [N], on a GPU."""
    out = torch.full_like(x, torch.nan)
    _double[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
    return out
