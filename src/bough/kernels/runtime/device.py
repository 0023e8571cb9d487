"""The properties of a GPU that decide which kernel variants it runs.

For tests a card can act as another one (`BOUGH_PRETEND_CARD=sm_86`): it gets that card's variants, tiles
and shared memory, and CUDA C++ kernels as PTX of that architecture, which the driver compiles for the real
one. Triton's kernels are compiled for the real card.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bough.config import pretended_card
from bough.errors import UsageError
from bough.kernels.runtime.nvrtc import architectures, nvrtc

# KiB of shared memory of an SM and of a block, by architecture.
_SHARED = {
    "sm_75": (64, 64),
    "sm_80": (164, 163),
    "sm_86": (100, 99),
    "sm_89": (100, 99),
    "sm_90": (228, 227),
    "sm_120": (100, 99),
    "sm_121": (100, 99),
}
_NOTHING = "nothing"  # an NVRTC older than the card's generation compiles nothing for it

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Card:
    """Two GPUs with equal properties run the same variants and compute the same bits."""

    arch: str  # such as sm_90
    processors: int  # SMs
    shared_per_processor: int  # bytes of shared memory of an SM
    shared_per_block: int  # bytes of shared memory that one block may have
    # What code is compiled for where that is not the architecture: another one's machine code, or PTX.
    virtual: str = ""

    @property
    def target(self) -> str:
        """What CUDA C++ is compiled for."""
        return self.virtual or self.arch

    @property
    def bulk_copies(self) -> bool:
        """Whether it has bulk copies and mbarriers: from Hopper on."""
        return int(self.arch.removeprefix("sm_")) >= 90

    @property
    def pdl(self) -> bool:
        """Whether it has programmatic dependent launch: from Hopper on."""
        return int(self.arch.removeprefix("sm_")) >= 90


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Return integers as a tensor; a GPU's copy does not wait for what is enqueued there."""
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)


def usable(device: torch.device) -> bool:
    """Return whether the CUDA C++ kernels run there: an NVIDIA card from Ampere on, and an NVRTC for it."""
    if torch.version.cuda is None or nvrtc() is None:
        return False
    major, minor = capability_of(device) or (0, 0)
    return (major, minor) >= (8, 0) and compiled_for(f"sm_{major}{minor}", architectures()) != _NOTHING


def pretended(arch: str, real: tuple[int, int], processors: int) -> Card:
    """Return a card of architecture `arch` on a GPU of compute capability `real`, with all of its SMs."""
    if arch not in _SHARED:
        names = ", ".join(_SHARED)
        raise UsageError(f"BOUGH_PRETEND_CARD is {arch!r}, needed: one of {names}")
    # A driver compiles PTX for its own architecture and older ones.
    virtual = min(_capability(arch), real)
    of_processor, of_block = (size << 10 for size in _SHARED[arch])
    return Card(arch, processors, of_processor, of_block, f"compute_{virtual[0]}{virtual[1]}")


def _capability(arch: str) -> tuple[int, int]:
    return divmod(int(arch.removeprefix("sm_")), 10)


@cache
def card_of(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    arch = pretended_card()
    if arch is not None:
        real = (properties.major, properties.minor)
        return pretended(arch, real, properties.multi_processor_count)
    arch = f"sm_{properties.major}{properties.minor}"
    return Card(
        arch,
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin,
        compiled_for(arch, architectures()),
    )


@cache
def compiled_for(arch: str, known: tuple[str, ...]) -> str:
    """Return what an NVRTC that knows some architectures compiles for a card of `arch`; "": for itself.

    A card runs machine code of an older architecture of its generation, and PTX of any older one.
    """
    if arch in known or not known:
        return ""
    capability = _capability(arch)
    older = sorted(_capability(name) for name in known if (8, 0) <= _capability(name) < capability)
    if not older:
        names = ", ".join(sorted(known, key=_capability))
        log.warning("this NVRTC compiles for %s, not for %s: kernels run in Triton", names, arch)
        return _NOTHING
    major, minor = older[-1]
    target = f"sm_{major}{minor}" if major == capability[0] else f"compute_{major}{minor}"
    log.warning(
        "this NVRTC does not know %s: kernels are compiled for %s; a newer PyTorch may know it", arch, target
    )
    return target


def kind_of(device: torch.device) -> str:
    """Return a name that GPUs share when they run the same variants at the same speed."""
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    acting = pretended_card()
    name = properties.name if acting is None else f"{properties.name} as {acting}"
    return f"{name}, {capability}, {properties.multi_processor_count} SMs"


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA card; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    arch = pretended_card()
    return torch.cuda.get_device_capability(device) if arch is None else _capability(arch)
