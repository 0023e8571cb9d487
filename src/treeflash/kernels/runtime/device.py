"""The properties of a GPU that decide which kernel variants it runs."""

from dataclasses import dataclass
from functools import cache

import torch

from treeflash.kernels.runtime.nvrtc import nvrtc


@dataclass(frozen=True, slots=True)
class Card:
    """Two GPUs with equal properties run the same variants and compute the same bits."""

    arch: str  # such as sm_90
    processors: int  # SMs
    shared_per_processor: int  # bytes of shared memory of an SM
    shared_per_block: int  # bytes of shared memory that one block may have

    @property
    def bulk_copies(self) -> bool:
        """Whether it has bulk copies and mbarriers: from Hopper on."""
        return int(self.arch.removeprefix("sm_")) >= 90

    @property
    def pdl(self) -> bool:
        """Whether it has programmatic dependent launch: from Hopper on."""
        return int(self.arch.removeprefix("sm_")) >= 90


def usable(device: torch.device) -> bool:
    """Return whether the CUDA C++ kernels run there: an NVIDIA card from Ampere on, with NVRTC installed."""
    if torch.version.cuda is None or nvrtc() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def card_of(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    return Card(
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin,
    )


def kind_of(device: torch.device) -> str:
    """Return a name that GPUs share when they run the same variants at the same speed."""
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {capability}, {properties.multi_processor_count} SMs"


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA card; None for other devices."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else None
