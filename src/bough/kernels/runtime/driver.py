"""Loads machine code and launches it on torch's current stream through the CUDA driver."""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.runtime import dry_run, launches
from bough.kernels.runtime.device import card_of
from bough.kernels.runtime.nvrtc import compile_cubin

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_LOCAL_BYTES = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_byte * 64)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ctypes.CDLL("nvcuda.dll")


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


class Module:
    """Machine code on one device until the process ends; built and loaded when it is first needed.

    PTX is compiled by the driver.
    """

    def __init__(self, build: Callable[[], bytes], device: torch.device):
        self.device = device
        self._build = build
        self._handle: ctypes.c_void_p | None = None
        self._most_shared: dict[str, int] = {}
        self._lock = threading.Lock()

    def kernel(self, name: str, *, threads: int, shared: int = 0, overlap: bool = False) -> "Kernel":
        # The limit is one of the function, which several launch shapes may share.
        self._most_shared[name] = max(shared, self._most_shared.get(name, 0))
        return Kernel(self, name, threads, shared, overlap)

    @property
    def names(self) -> str:
        """The functions that have been asked for."""
        return ", ".join(self._most_shared)

    def load(self) -> ctypes.c_void_p:
        """Build and load the code, unless that is done, and return its handle. Thread-safe."""
        with self._lock:
            if self._handle is None:
                cubin, handle = self._build(), ctypes.c_void_p()
                with torch.cuda.device(self.device):
                    torch.cuda.current_stream().synchronize()  # makes torch's context the current one
                    _check(_driver().cuModuleLoadData(ctypes.byref(handle), cubin))
                self._handle = handle
            return self._handle

    def function(self, name: str) -> ctypes.c_void_p:
        """Return a function with the shared memory that its launch shapes so far need."""
        handle, function = self.load(), ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), handle, name.encode()))
        # Without it the limit is 48 KiB, static memory included.
        if most := self._most_shared[name]:
            _check(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, ctypes.c_int(most)))
        return function


def cuda_module(source: str, defines: Mapping[str, int], device: torch.device, *, arch: str = "") -> Module:
    """Return CUDA C++ as a module, compiled for the device's card, or for another architecture."""
    return Module(
        partial(compile_cubin, source, defines=defines, arch=arch or card_of(device).target), device
    )


class Kernel:
    """One function of a module with its launch shape; loaded when it is first launched.

    With `overlap` it uses programmatic dependent launch (PDL): it may start before the previous kernel has
    ended, and must wait for it.
    """

    def __init__(self, module: Module, name: str, threads: int, shared: int, overlap: bool):
        self.module = module
        self._device = module.device
        self.name = name
        self.threads = threads
        self.shared = shared
        self._attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION)
        self._attribute.value[0] = 1
        self._overlap = overlap
        self._loaded: ctypes.c_void_p | None = None

    @property
    def _function(self) -> ctypes.c_void_p:
        if self._loaded is None:
            self._loaded = self.module.function(self.name)
            limit = card_of(self._device).shared_per_block
            # A card that acts as a smaller one would launch it.
            if (needed := self.shared + self.attributes.static) > limit:
                self._loaded = None  # the next launch is refused, too
                raise RuntimeError(f"{self.name} needs {needed} bytes of shared memory, limit {limit}")
        return self._loaded

    def __call__(
        self, grid: tuple[int, int], arguments: Sequence[Tensor | ctypes._SimpleCData | ctypes.Structure]
    ) -> None:
        if (recording := dry_run.current()) is not None:
            recording.modules[self.module] = None
            return
        if (record := launches.current()) is not None:
            record.add(self)
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        config = _Config(
            grid=(*grid, 1),
            block=(self.threads, 1, 1),
            shared=self.shared,
            stream=torch.cuda.current_stream(self._device).cuda_stream,
            attributes=ctypes.pointer(self._attribute),
            attribute_count=int(self._overlap),
        )
        with torch.cuda.device(self._device):
            _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))

    @property
    def attributes(self) -> "Attributes":
        return attributes_of(self._function, threads=self.threads, shared=self.shared)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the driver says of a function and its launch shape."""

    registers: int  # of a thread
    spilled: int  # bytes of local memory of a thread
    static: int  # bytes of shared memory of a block that the code declares
    blocks: int  # that an SM holds at a time


def attributes_of(function: ctypes.c_void_p, *, threads: int, shared: int) -> Attributes:
    """Return the attributes of a loaded function; `shared`: dynamic bytes of a block."""
    numbers = []
    for attribute in (_REGISTERS, _LOCAL_BYTES, _STATIC_SHARED):
        value = ctypes.c_int()
        _check(_driver().cuFuncGetAttribute(ctypes.byref(value), attribute, function))
        numbers.append(value.value)
    count, size = ctypes.c_int(), ctypes.c_size_t(shared)
    occupancy = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
    _check(occupancy(ctypes.byref(count), function, threads, size))
    return Attributes(*numbers, count.value)


def driver_version() -> str:
    """Return the version of the loaded driver, and of the CUDA that it supports; empty without one."""
    number = ctypes.c_int()
    try:
        _check(_driver().cuDriverGetVersion(ctypes.byref(number)))
        loaded = Path("/proc/driver/nvidia/version").read_text(errors="replace").split("\n")[0]
    except (OSError, RuntimeError):
        loaded = ""
    return f"{loaded} CUDA {number.value // 1000}.{number.value % 1000 // 10}" if number.value else ""
