"""Atomic file writes: a full disk leaves the previous file intact."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from bough.errors import BoughError, ModelFileError, ResourceError, UsageError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, write: Callable[[BinaryIO], Any], *, needed: int = 0) -> None:
    """Write a temporary file and rename it to `path`; `needed` is its approximate size in bytes."""
    # Several processes of one run may write the same file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _explained(path, error, needed) from error
    except RuntimeError as error:
        # torch's writer wraps the OSError in a RuntimeError of its own.
        cause = error.__context__
        if isinstance(cause, OSError):
            raise _explained(path, cause, needed) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds {type(value).__name__}, needed an object")
    return value


def _explained(path: Path, error: OSError, needed: int) -> BoughError:
    problem = f"{path} cannot be written: {error.strerror or error}"
    if error.errno in _NO_ROOM:
        with contextlib.suppress(OSError):
            problem += f", {shutil.disk_usage(path.parent).free} bytes are free"
        if needed:
            problem += f", about {needed} are needed"
        return ResourceError(
            problem, "free some space and continue with `resume`, or choose another `output`"
        )
    if isinstance(error, PermissionError | FileExistsError | NotADirectoryError | IsADirectoryError):
        return UsageError(problem, "set `output` to a folder that you may write to")
    return BoughError(problem)
