"""Standard streams that are closed, full or gone, and how writing to them fails."""

import contextlib
import errno
import os
import sys
from collections.abc import Generator
from typing import IO

from bough.errors import BoughError

OUTPUT_FAILED = 74  # EX_IOERR of sysexits.h


class OutputFailed(BoughError):
    """Standard output does not take what is written."""

    exit_code = OUTPUT_FAILED


def reopen_closed() -> None:
    """Open the null device for standard streams that were closed before the program started.

    Otherwise the next file that is opened gets their number, and what is printed goes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Opened for reading only, standard output fails when it is used; messages are lost silently.
            nothing = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def discard(stream: IO[str]) -> None:
    """Send what is still buffered to the null device, so that the program's exit does not fail over it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def delivered() -> Generator[None]:
    """Raise OutputFailed where writing to standard output fails; a broken pipe stays BrokenPipeError."""
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
    """Drop what cannot be written to standard error."""
    try:
        yield
    except OSError:
        discard(sys.stderr)
