"""Where the `bough` program starts and ends. Importing this imports hardly anything."""

from bough.cli.interrupt import leave_while_starting

__all__ = ["main"]


def main() -> None:
    leave_while_starting()
    # Imports the commands, which takes a good part of a second: only from here on is Ctrl-C handled.
    from bough.cli.program import start

    start()


if __name__ == "__main__":
    main()
