"""The smallest Triton kernel: if it compiles and runs, so does the tool chain behind the real ones."""

import torch
import triton
import triton.language as tl


@triton.jit
def _double(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(target + index, 2 * tl.load(source + index, mask=inside), mask=inside)


def double(x: torch.Tensor) -> torch.Tensor:
    """x [N] on a GPU to 2 x."""
    out = torch.full_like(x, torch.nan)
    _double[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
    return out
