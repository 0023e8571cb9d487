"""Reads a file into the system's page cache while the program still loads its libraries."""

import contextlib
import os
import threading
from pathlib import Path

_PIECE = 64 << 20  # bytes asked for at a time


def read_ahead(path: Path) -> threading.Thread | None:
    """Have the system read a file in the background; not one that would fill more than half of the memory.

    Importing torch takes seconds, in which a disk reads gigabytes. Nothing fails here: loading will.
    """
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "sysconf"):
        return None
    thread = threading.Thread(target=_ask, args=(path,), name="read ahead", daemon=True)
    thread.start()
    return thread


def _ask(path: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > memory // 2:
            return
        for start in range(0, size, _PIECE):
            os.posix_fadvise(file.fileno(), start, _PIECE, os.POSIX_FADV_WILLNEED)
