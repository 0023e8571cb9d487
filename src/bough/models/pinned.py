"""Pinned memory of the host, of exactly the size that is asked for."""

import mmap
import sys
from math import prod

import torch
from torch import Tensor

from bough.errors import ResourceError

_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister


class _Mapping(mmap.mmap):
    """Whole pages, which the driver lets go before they are unmapped."""

    address = 0  # of what is registered

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned_memory(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return uninitialised bytes that kernels on `device` can read; for a CPU ordinary memory.

    torch's own pinned memory is rounded up to a power of two: 305 MB of a layer's experts take 512.
    """
    if device.type != "cuda":
        return torch.empty(shape, dtype=torch.uint8)
    memory, size = _Mapping(-1, prod(shape)), prod(shape)
    data = torch.frombuffer(memory, dtype=torch.uint8)  # holds the mapping, as do its views
    error = int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), size, _PORTABLE | _MAPPED))
    if error:
        raise ResourceError(
            f"the driver does not pin {size:,} bytes of host memory for experts: CUDA error {error}",
            "`ulimit -l` or WSL2 may limit it; keep all experts on the card with `experts_host` 0",
        )
    memory.address = data.data_ptr()
    return data.view(shape)
