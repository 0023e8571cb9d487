"""Ctrl-C while text is generated or libraries load: first a request to stop, then an exception."""

import _thread
import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any, Self

PATIENCE_S = 1.0  # for the engine to finish its step and its statistics


class Interrupt:
    """While entered, Ctrl-C sets `requested`; PATIENCE_S later, or at the second one, it raises."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None
        self._timer = threading.Timer(PATIENCE_S, _thread.interrupt_main)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        signal.signal(signal.SIGINT, self._before)

    def _caught(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._timer.start()


@contextlib.contextmanager
def held() -> Generator[None]:
    """Delay the first Ctrl-C to the end of the block.

    An import may swallow KeyboardInterrupt: callbacks of weak references, for example, only print it.
    """
    caught: list[int] = []

    def catch(number: int, _frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = signal.signal(signal.SIGINT, catch)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt
