"""A program on a terminal of its own, with its screen and a count of what was written to each row."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pexpect
import pyte


class Screen(pyte.HistoryScreen):
    """Numbers rows from the start, and counts characters that were written and overwritten."""

    def __init__(self, columns: int, lines: int):
        self.scrolled = 0
        self.written: dict[int, int] = {}  # characters, by row
        self.overwritten: dict[int, int] = {}  # those that replaced another one, or were erased
        self.order: list[int] = []  # rows in the order they were written
        super().__init__(columns, lines, history=10_000, ratio=1)

    def index(self) -> None:
        if self.cursor.y == (self.margins.bottom if self.margins else self.lines - 1):
            self.scrolled += 1
        super().index()

    def draw(self, data: str) -> None:
        for character in data:
            before = self._row()
            # Behind the last column a character goes to the next row.
            row = before + (self.cursor.x >= self.columns and pyte.modes.DECAWM in self.mode)
            column = self.cursor.x if row == before else 0
            taken = row == before and self.buffer[self.cursor.y][min(column, self.columns - 1)].data.strip()
            self.written[row] = self.written.get(row, 0) + 1
            if taken:
                self.overwritten[row] = self.overwritten.get(row, 0) + 1
            if not self.order or self.order[-1] != row:
                self.order.append(row)
            super().draw(character)

    def erase_in_display(self, how: int = 0, *args: Any, **options: Any) -> None:
        for y in range(self.cursor.y if how == 0 else 0, self.lines):
            kept = self.cursor.x if how == 0 and y == self.cursor.y else 0
            erased = sum(bool(self.buffer[y][x].data.strip()) for x in range(kept, self.columns))
            if erased:
                row = self.scrolled + y
                self.overwritten[row] = self.overwritten.get(row, 0) + erased
                self.order.append(row)
        super().erase_in_display(how, *args, **options)

    def _row(self) -> int:
        return self.scrolled + self.cursor.y

    def rows(self) -> list[str]:
        """All that was ever scrolled away, and what is on the screen."""
        above = ["".join(line[x].data for x in range(self.columns)) for line in self.history.top]
        return [row.rstrip() for row in [*above, *self.display]]


class Terminal:
    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        columns: int = 80,
        lines: int = 24,
        cwd: Any = None,
    ):
        self.screen = Screen(columns, lines)
        self.raw = b""
        self._stream = pyte.ByteStream(self.screen)
        self._child = pexpect.spawn(
            command[0],
            list(command[1:]),
            env=dict(environment),
            dimensions=(lines, columns),
            timeout=60,
            cwd=None if cwd is None else str(cwd),
        )
        # A line editor asks where the cursor is.
        self.screen.write_process_input = lambda answer: self._child.send(answer)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close(force=True)

    @property
    def text(self) -> str:
        return "\n".join(self.screen.rows()).rstrip()

    @property
    def last(self) -> str:
        return next((row for row in reversed(self.screen.rows()) if row), "")

    def type(self, keys: str) -> None:
        self._child.send(keys)

    def wait(self, found: Callable[[str], Any], what: str = "", *, timeout: float = 45.0) -> None:
        """Until the text on the terminal is as wanted."""
        end = time.monotonic() + timeout
        while not found(self.text):
            assert time.monotonic() < end, f"{what or 'not seen'}:\n{self.text}"
            self.read()

    def read(self, seconds: float = 0.2) -> None:
        try:
            data = self._child.read_nonblocking(65536, timeout=seconds)
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF as error:
            raise AssertionError(f"the program ended:\n{self.text}") from error
        self.raw += data
        self._stream.feed(data)

    def ended(self, timeout: float = 30.0) -> int | None:
        """The exit code, after everything was read."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                self.read()
            except AssertionError:
                break
        self._child.close()
        return self._child.exitstatus
