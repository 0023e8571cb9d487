"""Records which kernels a function launches, and what each takes of the card."""

import ctypes
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from bough.kernels.runtime.driver import Kernel

_thread = threading.local()
_patching = threading.Lock()  # one at a time replaces Triton's launch


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
    """Return what records the launches of this thread."""
    return getattr(_thread, "launches", None)


class Launches:
    """The kernels that were launched while this was entered, in order, each once."""

    def __init__(self) -> None:
        self._cuda: dict[Kernel, None] = {}
        self._triton: dict[int, tuple[str, Any]] = {}

    def __enter__(self) -> Self:
        from triton.runtime.jit import JITFunction

        _patching.acquire()
        _thread.launches, self._run = self, JITFunction.run
        original = self._run

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            compiled = original(kernel, *args, **options)
            if (record := current()) is not None and compiled is not None:
                record._triton[id(compiled)] = (kernel.fn.__qualname__, compiled)
            return compiled

        JITFunction.run = run
        return self

    def __exit__(self, *_: object) -> None:
        from triton.runtime.jit import JITFunction

        JITFunction.run, _thread.launches = self._run, None
        _patching.release()

    def add(self, kernel: "Kernel") -> None:
        self._cuda[kernel] = None

    @property
    def kernels(self) -> list[KernelLaunch]:
        """Return what each of them takes; asks the driver."""
        ours = [
            KernelLaunch(
                launch.name,
                "CUDA C++",
                launch.registers,
                launch.spilled,
                launch.shared_bytes,
                launch.threads,
                launch.occupancy,
            )
            for launch in self._cuda
        ]
        return ours + [_of_triton(name, compiled) for name, compiled in self._triton.values()]


def _of_triton(name: str, compiled: Any) -> KernelLaunch:
    from bough.kernels.runtime.driver import attributes_of

    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    facts = attributes_of(ctypes.c_void_p(compiled.function), threads=threads, shared=shared)
    return KernelLaunch(name, "Triton", facts.registers, facts.spilled, shared, threads, facts.blocks)
