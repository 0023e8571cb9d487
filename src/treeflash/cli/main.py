"""Where the `treeflash` program starts and ends."""

import io
import sys

from treeflash.cli import view
from treeflash.cli.command import BROKEN_PIPE, report_error
from treeflash.cli.program import app
from treeflash.cli.streams import OutputFailed, delivered, discard, reopen_closed

__all__ = ["app", "main"]


def main() -> None:
    reopen_closed()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character shows `?` instead of ending the program.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        # Commands report their own errors; what is left is a help text that cannot be written.
        with delivered():
            try:
                app(prog_name="treeflash")
            finally:
                view.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        sys.exit(BROKEN_PIPE)
    except OutputFailed as error:
        sys.exit(report_error(error, as_json=False))


if __name__ == "__main__":
    main()
