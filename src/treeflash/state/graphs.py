"""Work over tensors that stay where they are, run as it is or as a CUDA graph; knows not what it is."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class Part(Generic[Result]):
    """What `work` computes. Captured, its result is always the same tensors, with new contents."""

    def __init__(self, work: Callable[[], Result]):
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> Result:
        if self._graph is None:
            return self._work()
        self._graph.replay()
        assert self._result is not None
        return self._result

    def capture(self, pool: Any) -> None:
        """Graphs of one pool share their scratch memory, so they must follow one another.

        The work is done once before: a captured launch must find its kernels loaded.
        """
        self._work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = self._work()
        self._graph, self._result = graph, result

    def release(self) -> None:
        """Runs as it is from now on."""
        self._graph = self._result = None
