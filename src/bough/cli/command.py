"""The classes of commands: errors become two lines, or one JSON object, and an exit code."""

import contextlib
import errno
import sys
from collections.abc import Generator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from bough.cli import help, view
from bough.cli.interrupt import INTERRUPTED, raise_from_now_on
from bough.cli.streams import OutputFailed, discard
from bough.config import environment
from bough.errors import BoughError, ResourceError, UsageError

BROKEN_PIPE = 141  # as a program that SIGPIPE ends
UNEXPECTED = 70
# The class of every mistake on the command line; its name and module depend on typer's version.
_ParserError: Any = typer.BadParameter.mro()[1]
# Words of the library that some versions of typer check values with.
_WORDS = {
    "Input should be greater than or equal to": "needed at least",
    "Input should be less than or equal to": "needed at most",
    "Input should be a valid integer, unable to parse string as an integer": "needed a whole number",
    "Input should be a valid number, unable to parse string as a number": "needed a number",
}


class Program(TyperGroup):
    """All commands; mistakes in the arguments become two lines, with --json among them a JSON object."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[__name__] = "--json" in args
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[:end]:  # goes before the command, and is wanted after it
            args = ["--debug", *(each for each in args[:end] if each != "--debug"), *args[end:]]
        with _usage_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _usage_errors(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def _usage_errors(ctx: Any) -> Generator[None]:
    try:
        yield
    except _ParserError as error:
        error.message = error.message.removeprefix("Value error, ")  # which some versions of typer add
        text = error.format_message()
        for theirs, ours in _WORDS.items():
            text = text.replace(theirs, ours)
        within = error.ctx or ctx
        path = [within.command_path, *([ctx.invoked_subcommand] if error.ctx is None else [])]
        usage = UsageError(f"{text[:1].lower()}{text[1:]}", f"{' '.join(filter(None, path))} --help")
        raise typer.Exit(report_error(usage, as_json=ctx.meta[__name__])) from None


class Command(TyperCommand):
    """A command that never shows a traceback unless asked to."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        view.help_page(help.page(self, ctx, width=view.width()))

    def invoke(self, ctx: Any) -> Any:
        try:
            raise_from_now_on()
            result = super().invoke(ctx)
            view.flush()
            return result
        except (typer.Exit, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            if ctx.params.get("as_json"):
                report_error(_Interrupted("interrupted before there was a result"), as_json=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            discard(sys.stdout)
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            if ctx.find_root().params.get("debug") or environment().debug:
                view.traceback()
            as_json = bool(ctx.params.get("as_json"))
            raise typer.Exit(report_error(_as_ours(error), as_json=as_json)) from None


def report_error(error: BoughError, *, as_json: bool) -> int:
    """Show the error on a stream that can still be written; return the exit code."""
    if isinstance(error, OutputFailed):
        discard(sys.stdout)
        as_json = False
    try:
        view.failure(error, as_json=as_json)
    except OutputFailed as failed:
        return report_error(failed, as_json=False)
    except BrokenPipeError:
        discard(sys.stdout)
        return BROKEN_PIPE
    return error.exit_code


class _Interrupted(BoughError):
    exit_code = INTERRUPTED


class _Unexpected(BoughError):
    exit_code = UNEXPECTED


def _room(error: OSError) -> str:
    """Return what helps where a disk is full or may not be written; nothing for other errors."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space; bough doctor shows how much there is"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "name a folder that may be written: --output and XDG_CACHE_HOME say where files go"
    return ""


def _as_ours(error: Exception) -> BoughError:
    """Return any error as one of ours, with a message for users."""
    if isinstance(error, BoughError):
        return error
    message = str(error).strip()
    # Torch's own class, recognised by name so that no command has to import torch; on a CPU a RuntimeError.
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate" in message
        or "failed to map segment" in message  # of a library, under a limit of the address space
    ):
        first = message.splitlines()[0] if message else "an allocation failed"
        return ResourceError(
            f"memory ran out: {first}",
            "lower --max-ctx, close other programs, or take a smaller model or quantisation",
        )
    if isinstance(error, OSError) and error.filename is not None:
        return BoughError(f"{error.filename}: {error.strerror}", _room(error))
    if isinstance(error, OSError) and _room(error):
        return ResourceError(f"{error.strerror} for a file that was being written", _room(error))
    where = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return _Unexpected(
        f"this should not have happened: {where}",
        "please report it with what `bough doctor` says and what `bough --debug ...` adds to this",
    )
