"""Two faults of Triton that show when kernels are compiled ahead: mixed up launchers, keys by order of use.

Triton 3.6 builds a C extension for every kind of launch, all of them under one name. When Python loads one of
them a second time, it writes its functions into the module of that name that was loaded last. So of two
threads that load at a time one may take the other's launcher, which then finds too many arguments, or worse.

The key of a kernel in Triton's cache on disk includes the global constants of the functions that it calls,
but only of those whose own key was asked for before. So a run that launches its kernels in another order
than the run before compiles some of them again.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from functools import cache
from types import SimpleNamespace
from typing import Any

_lock, _patching = threading.RLock(), threading.Lock()


def load_in_turn() -> contextlib.AbstractContextManager[object]:
    """Have Triton load one launcher at a time, and keep each apart from the next.

    Return what to hold while handles are made: a lock, if this version of Triton loads in another way.
    """
    with _lock:
        return _replaced()


def settle_keys() -> None:
    """Have Triton find the keys of the functions that a kernel calls before its own."""
    with _lock:
        _settle()


@cache
def _settle() -> None:
    from triton.runtime import jit

    finder: Any = getattr(jit, "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if update is None:
        return

    def update_settled(self: Any, function: Any) -> None:
        _ = function.cache_key
        update(self, function)

    finder._update_hash = update_settled


@cache
def _replaced() -> contextlib.AbstractContextManager[object]:
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None:
        return _lock

    def load_apart(name: str, path: str) -> Any:
        with _lock:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_apart
    return contextlib.nullcontext()


@contextlib.contextmanager
def launching(run: Callable[..., Any]) -> Generator[None]:
    """Have Triton's launches go through run(launch, kernel, ...), of one caller at a time."""
    from triton.runtime.jit import JITFunction

    with _patching:
        launch = JITFunction.run
        JITFunction.run = lambda kernel, *args, **options: run(launch, kernel, *args, **options)
        try:
            yield
        finally:
            JITFunction.run = launch
