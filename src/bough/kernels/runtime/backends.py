"""Which implementation computes each operation on a GPU: decided before a model runs there, and kept.

CUDA C++ comes first, then Triton, then plain PyTorch. A first start on a card runs all kernels of the model
against their references (`bough.kernels.check`) and replaces what fails by the next implementation. Nothing
changes after that in a process: other kernels may have other bits.
"""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Literal

import torch

from bough.config import kernel_choice
from bough.errors import ResourceError, UsageError
from bough.kernels.runtime import device as cards

log = logging.getLogger(__name__)

Backend = Literal["cuda", "triton", "torch"]
NAMES: dict[Backend, str] = {"cuda": "CUDA C++", "triton": "Triton", "torch": "PyTorch"}
_ALL: tuple[Backend, ...] = ("cuda", "triton", "torch")

# What can compute each operation on a GPU, the fastest first.
OPERATIONS: Mapping[str, tuple[Backend, ...]] = {
    "matmul": ("cuda", "triton"),
    "int8 matmul": ("triton",),
    "norms": ("cuda", "triton"),
    "experts": ("cuda", "triton"),
    "expert routing": ("triton",),
    "tree attention": _ALL,
    "prompt attention": ("triton", "torch"),
    "draft attention": ("triton", "torch"),
    "KV cache": ("triton", "torch"),
    "draft ring": ("triton", "torch"),
    "tree delta rule": _ALL,
    "prompt delta rule": ("triton", "torch"),
    "tree convolution": _ALL,
    "prompt convolution": ("triton", "torch"),
    "slot mapping": ("triton", "torch"),
    "commit": ("triton", "torch"),
    "tree building": ("triton",),
    "sampling": ("triton",),
    "embedding": ("triton", "torch"),
    "rotation": ("triton", "torch"),
    "row gathering": ("triton",),
}

_replaced: dict[str, Backend] = {}  # operations that a self-check moved from their first implementation
_settled = False  # a model runs


@cache
def _usual(operation: str) -> tuple[Backend, ...]:
    """Return the implementations that BOUGH_KERNELS allows, at least the last."""
    choice, offered = kernel_choice(), OPERATIONS[operation]
    if choice not in _ALL:
        raise UsageError(f"BOUGH_KERNELS is {choice!r}, needed one of {', '.join(_ALL)}")
    allowed = tuple(backend for backend in offered if _ALL.index(backend) >= _ALL.index(choice))
    return allowed or offered[-1:]


def choices(operation: str) -> tuple[Backend, ...]:
    """Return the implementations that may compute the operation, the first of which does."""
    usual = _usual(operation)
    first = _replaced.get(operation, usual[0])
    return usual[usual.index(first) :] if first in usual else usual


def runs(operation: str, backend: Backend, device: torch.device) -> bool:
    """Return whether this implementation is to compute the operation, where it takes the arguments."""
    if device.type != "cuda" or backend not in choices(operation):
        return False
    return backend != "cuda" or cards.usable(device)


def replace(operation: str, backend: Backend) -> None:
    """Have another implementation compute an operation, before any model uses it."""
    assert backend in OPERATIONS[operation], (operation, backend)
    if _settled:
        raise ResourceError(
            f"this model needs {operation} in {NAMES[backend]}, another model of this process does not",
            "load it in a process of its own",
        )
    _replaced[operation] = backend


def leave_out_cuda() -> None:
    """Have no operation in CUDA C++, where it cannot be compiled: its bits are not those of Triton."""
    ours = [operation for operation in OPERATIONS if choices(operation)[0] == "cuda"]
    for operation in ours:
        replace(operation, choices(operation)[1])
    if ours:
        log.warning(
            "%s run in Triton, slower: CUDA C++ needs NVRTC, which comes with PyTorch, and a card from "
            "Ampere on",
            ", ".join(ours),
        )


def replaced() -> dict[str, Backend]:
    """Return the operations that do not run in their first implementation."""
    firsts = {name: choices(name)[0] for name in OPERATIONS}
    return {name: first for name, first in firsts.items() if first != OPERATIONS[name][0]}


def settle() -> None:
    """Note that a model runs: from now on nothing is replaced."""
    global _settled
    _settled = True


def reset() -> None:
    """Forget all replacements, between tests."""
    global _settled
    _settled = False
    _replaced.clear()
    _usual.cache_clear()


def reason_of(problem: BaseException) -> str:
    """Return the line that says why an implementation failed."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    # A compiler's message begins with its options.
    telling = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")[:200]
    kind = type(problem).__name__
    return telling if telling and kind in ("RuntimeError", "AcceleratorError") else f"{kind}: {telling}"


def identity() -> str:
    """Return what the bits of a saved state depend on, in words; empty where nothing is replaced."""
    return "".join(f", {name} in {NAMES[backend]}" for name, backend in sorted(replaced().items()))
