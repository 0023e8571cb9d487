"""Pinned memory of the host, of exactly the size that is asked for."""

import mmap
import weakref
from math import prod

import torch
from torch import Tensor

from bough.errors import ResourceError

_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister


def pinned_memory(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return uninitialised bytes that kernels on `device` can read; for a CPU ordinary memory.

    torch's own pinned memory is rounded up to a power of two: 305 MB of a layer's experts take 512.
    """
    if device.type != "cuda":
        return torch.empty(shape, dtype=torch.uint8)
    memory = mmap.mmap(-1, prod(shape))
    data = torch.frombuffer(memory, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), data.data_ptr()
    if (error := int(runtime.cudaHostRegister(address, prod(shape), _PORTABLE | _MAPPED))) != 0:
        raise ResourceError(
            f"the driver does not pin {prod(shape):,} bytes of host memory for experts: CUDA error {error}",
            "`ulimit -l` or WSL2 may limit it; keep all experts on the card with `experts_host` 0",
        )
    # The tensor holds the mapping: whichever of its views is used last.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return data.view(shape)
