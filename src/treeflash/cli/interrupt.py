"""Ctrl-C while text is written or libraries load: first a request to stop, then force. Knows no engine."""

import _thread
import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any, Self

PATIENCE_S = 1.0  # what the engine gets to finish its step and count it


class Interrupt:
    """While entered, Ctrl-C sets `requested`; a second one, or PATIENCE_S later, it raises as usual."""

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
    """While inside, the first Ctrl-C waits for the end.

    An import that it breaks into may swallow it: callbacks of weak references, for one, only print it.
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
