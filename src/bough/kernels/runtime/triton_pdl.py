"""Programmatic dependent launch (PDL) in Triton: a kernel starts before the previous one has ended.

A kernel that overlaps the previous one waits for it before reading its results, and reads them past L1, which
may hold older values.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bough.kernels.runtime.device import capability_of


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait for the previous kernel to end, then allow the next one to start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that calls `wait_for_inputs`: with PDL on Hopper and later."""
    if (capability_of(device) or (0, 0)) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
