"""The threads that check requests before they queue: templates, tokens, grammars."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, ParamSpec, TypeVar

from bough.errors import QueueFull

MAX_CHECKED = 512  # at the same time, waiting ones included
# Those of grammars wait for another process; what a model scores is scored one after the other.
# An image may take 0.4 GB while it is decoded.
_THREADS = {"plain": 4, "constrained": 16, "scored": 1, "images": 2}

P = ParamSpec("P")
T = TypeVar("T")


class Checks:
    """Threads of their own for each kind of check, so that a slow one keeps none of another kind waiting."""

    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(count, kind) for kind, count in _THREADS.items()}
        self._lock = threading.Lock()
        self.count = 0  # being checked, or waiting for it; those whose client has left as long as they run

    async def run(
        self,
        kind: Literal["plain", "constrained", "scored", "images"],
        check: Callable[P, T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        if self.count >= MAX_CHECKED:
            raise QueueFull(
                f"{self.count} requests are being checked, at most {MAX_CHECKED} can", "try again later"
            )
        with self._lock:
            self.count += 1
        future = self._pools[kind].submit(check, *args, **options)
        future.add_done_callback(self._end)
        return await asyncio.wrap_future(future)

    def _end(self, _: Future[Any]) -> None:
        with self._lock:
            self.count -= 1
