"""Records which kernels a function launches, and what each takes of the card."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from bough.kernels.runtime.launchers import launching

if TYPE_CHECKING:
    from bough.kernels.runtime.driver import Attributes, Kernel

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel that was launched."""

    name: str
    language: str  # CUDA C++ or Triton
    registers: int  # of a thread
    spilled: int  # bytes of local memory of a thread
    shared: int  # bytes of shared memory of a block
    threads: int  # of a block
    blocks: int  # that an SM holds


def current() -> "Launches | None":
    return getattr(_thread, "launches", None)


class Launches:
    """The kernels that were launched while this was entered, in order, each once."""

    def __init__(self) -> None:
        self._cuda: dict[Kernel, None] = {}
        self._triton: dict[int, tuple[str, Any]] = {}

    def __enter__(self) -> Self:
        self._patched = launching(_noted)
        self._patched.__enter__()
        _thread.launches = self
        return self

    def __exit__(self, *error: Any) -> None:
        _thread.launches = None
        self._patched.__exit__(*error)

    def add(self, kernel: "Kernel") -> None:
        self._cuda[kernel] = None

    @property
    def kernels(self) -> list[KernelLaunch]:
        """Return what each of them takes; asks the driver."""
        ours = [
            _taken(kernel.name, "CUDA C++", kernel.attributes, kernel.shared, kernel.threads)
            for kernel in self._cuda
        ]
        return ours + [_of_triton(name, compiled) for name, compiled in self._triton.values()]


def _noted(launch: Callable[..., Any], kernel: Any, *args: Any, **options: Any) -> Any:
    compiled = launch(kernel, *args, **options)
    if (record := current()) is not None and compiled is not None:
        record._triton[id(compiled)] = (kernel.fn.__qualname__, compiled)
    return compiled


def _of_triton(name: str, compiled: Any) -> KernelLaunch:
    from bough.kernels.runtime.driver import attributes_of

    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    facts = attributes_of(ctypes.c_void_p(compiled.function), threads=threads, shared=shared)
    return _taken(name, "Triton", replace(facts, static=0), shared, threads)


def _taken(name: str, language: str, facts: "Attributes", dynamic: int, threads: int) -> KernelLaunch:
    shared = dynamic + facts.static
    return KernelLaunch(name, language, facts.registers, facts.spilled, shared, threads, facts.blocks)
