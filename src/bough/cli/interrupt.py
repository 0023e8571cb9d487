"""Ctrl-C while text is generated or libraries load: first a request to stop, then an exception.

While the program itself starts, Ctrl-C ends it: an exception there would show as a traceback of an import.
"""

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any, Self

INTERRUPTED = 130  # the exit code after Ctrl-C
PATIENCE_S = 1.0  # for the engine to finish its step and its statistics


def leave_at_once(_number: int = signal.SIGINT, _frame: FrameType | None = None) -> None:
    """End the process as Ctrl-C does, without cleaning up: for the time when there is nothing to clean up."""
    os._exit(INTERRUPTED)


def leave_while_starting() -> None:
    """Let Ctrl-C end the process until `raise_from_now_on`; where it is ignored, as by nohup, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)


def raise_from_now_on() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which commands handle."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
