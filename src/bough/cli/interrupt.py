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
    """While entered, Ctrl-C sets `requested`; `patience_s` later, or at the second one, it raises."""

    def __init__(self, *signals: int, patience_s: float | None = PATIENCE_S):
        """signals: others that mean the same. patience_s: None: only the second one raises."""
        self.requested = False
        self._before: dict[int, Any] = dict.fromkeys([signal.SIGINT, *signals])
        self._patience_s = patience_s
        self._timer = threading.Timer(patience_s or 0.0, _thread.interrupt_main)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._caught) for number in self._before}
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, _number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if again or self._patience_s == 0:
            raise KeyboardInterrupt
        if self._patience_s is not None:
            self._timer.start()


@contextlib.contextmanager
def held() -> Generator[None]:
    """Delay the first Ctrl-C to the end of the block.

    An import may swallow KeyboardInterrupt: callbacks of weak references, for example, only print it.
    """
    with Interrupt(patience_s=None) as interrupt:
        yield
    if interrupt.requested:
        raise KeyboardInterrupt
