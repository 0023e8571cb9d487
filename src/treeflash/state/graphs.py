"""A function over static buffers, run eagerly or replayed as a CUDA graph."""

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class CapturedFunction(Generic[Result]):
    """Runs `function` eagerly until it is captured; then its result is always the same tensors."""

    def __init__(self, function: Callable[[], Result]):
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None
        self._pool: Any = None  # of a function that is captured when it is first called

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> Result:
        if self._graph is None and self._pool is not None:
            self.try_capture(self._pool)
        if self._graph is None:
            return self._function()
        self._graph.replay()
        assert self._result is not None
        return self._result

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

    def capture_on_call(self, pool: Any) -> None:
        """Have the function captured when it is first called."""
        self._pool = pool

    def try_capture(self, pool: Any) -> bool:
        """Capture the function; if that fails, warn and run it eagerly from now on."""
        self._pool = None
        try:
            self.capture(pool)
        except (RuntimeError, AssertionError) as error:
            self.release()
            warn_eager(error)
        return self.captured

    def release(self) -> None:
        """Drop the graph and run eagerly again."""
        self._graph = self._result = self._pool = None


def warn_eager(error: Exception) -> None:
    """Log that steps run without CUDA graphs, and why."""
    reason = str(error).partition("\n")[0]
    details = log.isEnabledFor(logging.DEBUG)
    log.warning("steps run without CUDA graphs, more slowly: %s", reason, exc_info=details)
