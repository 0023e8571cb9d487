"""A function over static buffers, run eagerly or replayed as a CUDA graph."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class CapturedFunction(Generic[Result]):
    """Runs `function` eagerly until it is captured; then its result is always the same tensors."""

    def __init__(self, function: Callable[[], Result]):
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> Result:
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
        with torch.cuda.graph(graph, pool=pool):
            result = self._function()
        self._graph, self._result = graph, result

    def release(self) -> None:
        """Drop the graph and run eagerly again."""
        self._graph = self._result = None
