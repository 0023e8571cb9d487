"""Standard streams that are closed, full or gone, and what writing to them comes to. Knows no text."""

import contextlib
import errno
import os
import sys
from collections.abc import Generator
from typing import IO

from treeflash.errors import TreeFlashError

OUTPUT_FAILED = 74  # EX_IOERR of sysexits.h


class OutputFailed(TreeFlashError):
    """Standard output does not take what is written."""

    exit_code = OUTPUT_FAILED


def mend() -> None:
    """Fills the places of streams that were closed before the program started.

    Else the next file that is opened gets their number, and what is printed goes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Open for reading alone, standard output fails when it is used; messages are lost in silence.
            nothing = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def abandon(stream: IO[str]) -> None:
    """What is still buffered goes nowhere, so that leaving the program does not fail over it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def delivered() -> Generator[None]:
    """Around writing to standard output: says why it failed, but for a reader that went away."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        closed = error.errno == errno.EBADF
        reason = "standard output is closed" if closed else error.strerror or str(error)
        raise OutputFailed(f"cannot write the answer: {reason}") from error


@contextlib.contextmanager
def tolerated() -> Generator[None]:
    """Around writing to standard error: what cannot be said there is left out."""
    try:
        yield
    except OSError:
        abandon(sys.stderr)
