"""An operation: its reference, and the implementations that a GPU has of it."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

import torch

from bough.kernels.runtime.backends import Backend, runs

P = ParamSpec("P")
R = TypeVar("R")


def op(reference: Callable[P, R], operation: str, **modules: str) -> Callable[P, R]:
    """Return a function that calls the first implementation that runs `operation` and takes the arguments.

    modules: by backend, in the order in which they are asked, the module beside the reference that has a
    function of its name, which the reference's docstring describes. The module's `takes_` and that name, if
    there is one, decides by the same arguments: by device, types and sizes of heads, never by the number of
    rows. Else the reference computes.
    """
    name, package = getattr(reference, "__name__", ""), reference.__module__.rpartition(".")[0]

    @wraps(reference)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        device: torch.device = next(device for arg in args if (device := getattr(arg, "device", None)))
        if device.type == "cuda":
            for backend, module in modules.items():
                if runs(operation, _backend(backend), device):
                    kernels = _imported(f".{module}", package)
                    takes = getattr(kernels, f"takes_{name}", None)
                    if takes is None or takes(*args, **kwargs):
                        return getattr(kernels, name)(*args, **kwargs)
        return reference(*args, **kwargs)

    return dispatch


_imported = cache(import_module)  # which takes microseconds where the module is there


def _backend(name: str) -> Backend:
    assert name in ("cuda", "triton"), name
    return name
