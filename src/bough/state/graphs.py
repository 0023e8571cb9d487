"""A function over static buffers, run eagerly or replayed as a CUDA graph."""

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class StagedNumbers:
    """Integers that the host writes, and the static buffer into which they are copied."""

    def __init__(self, *shape: int, device: torch.device):
        on_gpu = device.type == "cuda"
        self._staged = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        self.numbers = self._staged.numpy()  # to be written after `wait`
        self.buffer = self._staged.to(device)
        self._one = self.buffer is self._staged  # on a CPU
        self._copied = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Wait until what was staged before has been copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, rows: slice = slice(None), *, into: Tensor | None = None) -> None:
        """Begin to copy staged rows to the same rows of the buffer, or of another."""
        if into is not None or not self._one:
            (self.buffer[rows] if into is None else into).copy_(self._staged[rows], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class CapturedFunction(Generic[Result]):
    """Runs `function` eagerly until it is captured; then its result is always the same tensors."""

    def __init__(self, function: Callable[[], Result], *, sequences: int = 1):
        """`sequences`: how many the function is for."""
        self.sequences = sequences
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None
        # Of a function that is captured when it is first called: the pool, and what is called then.
        self._on_call: tuple[Any, Callable[[], None]] | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> Result:
        if self._graph is None and self._on_call is not None:
            pool, captured = self._on_call
            self.try_capture(pool)
            captured()
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return cast(Result, self._result)  # None where the function returns none

    def capture(self, pool: Any) -> None:
        """Capture the function as a CUDA graph.

        Graphs of one pool share scratch memory, so they must run one after the other. The function runs once
        before: a captured launch must find its kernels loaded.
        """
        self._function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = self._function()
        self._graph, self._result = graph, result

    def capture_on_call(self, pool: Any, captured: Callable[[], None]) -> None:
        """Have the function captured when it is first called; `captured` is called before it runs then."""
        self._on_call = pool, captured

    def try_capture(self, pool: Any) -> bool:
        """Capture the function; if that fails, warn and run it eagerly from now on."""
        self._on_call = None
        try:
            self.capture(pool)
        except (RuntimeError, AssertionError) as error:
            self.release()
            warn_eager(error)
        return self.captured

    def release(self) -> None:
        """Drop the graph and run eagerly again."""
        self._graph = self._result = self._on_call = None


def warn_eager(error: BaseException) -> None:
    """Log that steps run without CUDA graphs, and why."""
    details = error if log.isEnabledFor(logging.DEBUG) else None
    while error.__context__ is not None:  # what failed first; ending the capture then failed, too
        error = error.__context__
    reason = str(error).partition("\n")[0]
    log.warning("steps run without CUDA graphs, more slowly: %s", reason, exc_info=details)
