"""A dry run: GPU code over tensors without memory, to find which kernels it will launch.

Inside of it tensors on the GPU are meta tensors that claim to be there, and launches are recorded instead. So
all kernels of a model can be compiled at once, in parallel, before its weights are there.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bough.kernels.runtime.launchers import launching, load_in_turn

if TYPE_CHECKING:
    from bough.kernels.runtime.driver import Module

_META = torch.device("meta")
_DEVICE, _IS_CUDA = (getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda"))
_ALIGNMENT = 16  # bytes that Triton specialises pointers on, and elements that it specialises integers on
_FACTS = {"__bool__": True, "__int__": 0, "__index__": 0, "__float__": 0.0, "item": 0}

_thread = threading.local()


def current() -> "DryRun | None":
    return getattr(_thread, "dry_run", None)


def cache_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache what a function returns, but not in a dry run, where it has no memory."""
    cached = cache(make)

    def call(*args: Hashable) -> Tensor:
        return cached(*args) if current() is None else make(*args)

    return call


@dataclass(frozen=True, slots=True)
class Pointer:
    """All that Triton reads of a tensor when it compiles a launch."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """All that Triton reads of a tensor descriptor."""

    dtype: torch.dtype
    block: tuple[int, ...]

    def descriptor(self) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        strides = [prod(self.block[place + 1 :]) for place in range(len(self.block))]
        return TensorDescriptor(Pointer(self.dtype, 0), list(self.block), strides, list(self.block))


@dataclass(frozen=True, slots=True)
class Launch:
    """A Triton kernel with arguments of the kind that it is compiled for."""

    kernel: Any
    arguments: tuple[Hashable, ...]
    options: tuple[tuple[str, Hashable], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__qualname__

    def load(self, device: torch.device) -> None:
        """Compile the kernel, or find it in Triton's cache, and load it. Thread-safe after `touch`."""
        with torch.cuda.device(device):
            compiled = self.compile()
            loaded = copy(compiled)
            with load_in_turn():
                loaded._init_handles()
        # All handles at once: another thread may be about to launch it, and would find a part of them.
        vars(compiled).update(vars(loaded))
        loaded.module = None  # it has one owner, with which newer versions of Triton unload it

    def compile(self) -> Any:
        """Return the compiled kernel, from Triton's cache if it is there."""
        arguments = [arg.descriptor() if isinstance(arg, Tiles) else arg for arg in self.arguments]
        return self.kernel.warmup(*arguments, grid=(1,), **dict(self.options))

    def touch(self, device: torch.device) -> None:
        """Create Triton's table of the kernel's variants: two threads would create two of them."""
        self.kernel.device_caches[device.index or 0]


class DryRun(TorchFunctionMode):
    """Records the launches of its thread while it is entered."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = torch.device(device.type, device.index or 0)
        self.launches: dict[Launch, None] = {}
        self.modules: dict[Module, None] = {}  # of the CUDA C++ kernels

    def __enter__(self) -> "DryRun":
        self._patched = launching(_recorded)
        self._patched.__enter__()
        _thread.dry_run = self
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        _thread.dry_run = None
        self._patched.__exit__(None, None, None)

    def add(self, kernel: Any, args: Sequence[Any], named: dict[str, Any]) -> None:
        """Record a launch."""
        by_name = {param.name: param for param in kernel.params}
        arguments = tuple(_kind(*pair) for pair in zip(args, kernel.params, strict=False))
        options = tuple(
            (name, _kind(value, by_name.get(name)))
            for name, value in named.items()
            if name not in ("grid", "warmup")
        )
        self.launches[Launch(kernel, arguments, options)] = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        if func == _IS_CUDA:
            return args[0].is_meta
        if func == _DEVICE:
            result = func(*args)
            return self._device if result.type == "meta" else result
        if name == "data_ptr" and args[0].is_meta:
            return args[0].storage_offset() * args[0].element_size()
        if isinstance(out := kwargs.get("out"), Tensor) and out.is_meta:
            return out  # some operations have no form for meta tensors
        if isinstance(first := args[0] if args else None, Tensor):
            if first.is_meta and name in _FACTS:
                return _FACTS[name]
            if first.is_meta and name == "tolist":
                return torch.zeros(first.shape, dtype=first.dtype).tolist()
            if name == "copy_" and first.is_meta != args[1].is_meta:
                return first
        kwargs.pop("pin_memory", None)
        kwargs = {key: self._placed(value) for key, value in kwargs.items()}
        return func(*map(self._placed, args), **kwargs)

    def _placed(self, value: Any) -> Any:
        on_gpu = (isinstance(value, torch.device) and value.type == self._device.type) or (
            isinstance(value, str) and value.startswith(self._device.type)
        )
        return _META if on_gpu else value


def _recorded(launch: Callable[..., Any], kernel: Any, *args: Any, **options: Any) -> Any:
    if (recording := current()) is None:
        return launch(kernel, *args, **options)
    return recording.add(kernel, args, options)


def _kind(value: Any, param: Any = None) -> Hashable:
    """Return an argument that stands for all those for which a kernel is compiled alike."""
    if isinstance(value, Tensor):
        return Pointer(value.dtype, value.data_ptr() % _ALIGNMENT)
    if hasattr(value, "block_shape"):
        return Tiles(value.base.dtype, tuple(value.block_shape))
    constant = param is None or param.is_constexpr or isinstance(value, bool)
    if constant or not isinstance(value, int | float):
        return value
    if isinstance(value, float):
        return 0.5
    beyond = 0 if -(1 << 31) <= value < 1 << 31 else 1 << 40
    if value == 1 and not param.do_not_specialize:
        return 1
    return beyond + _ALIGNMENT + (0 if value % _ALIGNMENT == 0 and not param.do_not_specialize else 1)
