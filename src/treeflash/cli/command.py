"""Where a command's errors become two lines, or one JSON object, and an exit code. Knows no command."""

from typing import Any

import typer
from typer.core import TyperCommand

from treeflash.cli import view
from treeflash.config import environment
from treeflash.errors import ResourceError, TreeFlashError

INTERRUPTED = 130
BROKEN_PIPE = 141  # as a program that SIGPIPE ends
UNEXPECTED = 70


class Command(TyperCommand):
    """A command that never shows a traceback unless asked to."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            view.flush()
            return result
        except (typer.Exit, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            view.abandon_output()
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            if ctx.find_root().params.get("debug") or environment().debug:
                raise
            known = _in_our_words(error)
            view.failure(known, as_json=bool(ctx.params.get("as_json")))
            raise typer.Exit(known.exit_code) from None


class _Unexpected(TreeFlashError):
    exit_code = UNEXPECTED


def _in_our_words(error: Exception) -> TreeFlashError:
    if isinstance(error, TreeFlashError):
        return error
    message = str(error).strip()
    # Torch's own class, known by name so that no command has to import torch for it; on a CPU a RuntimeError.
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate" in message
    ):
        first = message.splitlines()[0] if message else "an allocation failed"
        return ResourceError(
            f"memory ran out: {first}",
            "lower --max-ctx, close other programs, or take a smaller model or quantisation",
        )
    if isinstance(error, OSError) and error.filename is not None:
        return TreeFlashError(f"{error.filename}: {error.strerror}")
    where = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return _Unexpected(
        f"this should not have happened: {where}",
        "please report it with what `treeflash doctor` says and what `treeflash --debug ...` adds to this",
    )
