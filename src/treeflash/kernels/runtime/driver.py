"""Loads machine code and launches it on torch's current stream through the CUDA driver."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
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
    """Machine code loaded on one device until the process ends."""

    def __init__(self, cubin: bytes, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one
            self._handle = ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), cubin))
        self._most_shared: dict[str, int] = {}

    def kernel(self, name: str, *, threads: int, shared: int = 0, overlap: bool = False) -> "Kernel":
        function = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()))
        # The limit is one of the function, which several launch shapes may share.
        most = self._most_shared[name] = max(shared, self._most_shared.get(name, 0))
        if most > 48 * 1024:
            _check(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, ctypes.c_int(most)))
        return Kernel(self, function, threads, shared, overlap)


class Kernel:
    """One function of a module with its launch shape.

    With `overlap` it uses programmatic dependent launch (PDL): it may start before the previous kernel has
    ended, and must wait for it.
    """

    def __init__(self, module: Module, function: ctypes.c_void_p, threads: int, shared: int, overlap: bool):
        self._device = module.device
        self._function = function
        self._threads = threads
        self._shared = shared
        self._attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION)
        self._attribute.value[0] = 1
        self._overlap = overlap

    def __call__(
        self,
        grid: tuple[int, int],
        arguments: Sequence[Tensor | ctypes._SimpleCData | ctypes.Structure],
    ) -> None:
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        config = _Config(
            grid=(*grid, 1),
            block=(self._threads, 1, 1),
            shared=self._shared,
            stream=torch.cuda.current_stream(self._device).cuda_stream,
            attributes=ctypes.pointer(self._attribute),
            attribute_count=int(self._overlap),
        )
        with torch.cuda.device(self._device):
            _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))

    @property
    def occupancy(self) -> int:
        """The blocks an SM holds at a time."""
        count = ctypes.c_int()
        _check(
            _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), self._function, self._threads, ctypes.c_size_t(self._shared)
            )
        )
        return count.value

    @property
    def registers(self) -> int:
        return self._attribute_of(_REGISTERS)

    @property
    def spilled(self) -> int:
        """Bytes of local memory of a thread."""
        return self._attribute_of(_LOCAL_BYTES)

    def _attribute_of(self, number: int) -> int:
        value = ctypes.c_int()
        _check(_driver().cuFuncGetAttribute(ctypes.byref(value), number, self._function))
        return value.value
