"""A reply while it is generated: rendered row by row on a terminal, plain text elsewhere.

Final rows are written once. Only rows that may still change are rewritten, and of those only what differs:
in the middle of a sentence that is the new word.
"""

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Self

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from bough.cli import view
from bough.cli.chat.stream import MarkdownStream, PlainStream
from bough.cli.streams import delivered, tolerated
from bough.config import environment

FRAME_S = 0.04  # between two frames, at least
SHARE = 8  # and this many times the last frame's duration: on a CPU the model needs the cores too
THOUGHT = "bright_black italic"
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# Synchronised output: a frame appears at once; terminals without it ignore these.
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"
# A row that is wider than computed is cut instead of becoming two rows.
UNWRAPPED, WRAPPED = "\x1b[?7l", "\x1b[?7h"


class Painter:
    """Rows on a terminal, the last of which can be changed."""

    def __init__(self, stream: IO[str], size: Callable[[], tuple[int, int]]):
        self._stream = stream
        self._size = size
        self._live: list[str] = []  # as they are on the screen, the cursor at the end of the last one
        self._cells: list[int] = []  # how wide they are
        self._columns = 0  # of the terminal when they were written
        self._console = Console(file=stream, force_terminal=True, no_color=environment().no_color or None)

    @property
    def width(self) -> int:
        # The last column stays free: terminals disagree where the cursor is after it.
        return max(10, self._size()[0] - 1)

    def paint(self, settled: Sequence[Text], live: Sequence[Text]) -> None:
        columns, height = self._size()
        # Rows that scrolled away cannot be changed, so no more live rows are shown than fit.
        live = live[-max(1, height - 1) :]
        done, rows = [self._ansi(row) for row in settled], [self._ansi(row) for row in live]
        if not done and rows == self._live:
            return
        new = done + rows
        same, move = self._moved(new, columns)
        begun = max(same, len(done))
        text = "\n".join([*done[same:], *([_unwrapped("\n".join(new[begun:]))] if begun < len(new) else [])])
        self._stream.write(f"{BEGIN}{move}{text}{'' if rows or not done else chr(10)}{END}")
        self._stream.flush()
        self._live, self._cells, self._columns = rows, [cell_len(row.plain) for row in live], columns

    def _moved(self, new: Sequence[str], columns: int) -> tuple[int, str]:
        """Return how many rows need no change, and the text that moves the cursor to the next one."""
        old, same = self._live, 0
        unresized = columns == self._columns
        while unresized and same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        if same == len(old):
            return same, "\n" if old and same < len(new) else ""
        if unresized and same == len(old) - 1 and same < len(new) and new[same].startswith(old[same]):
            added = _unwrapped(new[same][len(old[same]) :])
            return same + 1, added + ("\n" if same + 1 < len(new) else "")
        return same, self._up(same, columns) + "\r\x1b[J"

    def _up(self, row: int, columns: int) -> str:
        """Return the sequence that moves up to a live row; a narrower terminal may have wrapped them."""
        rows = sum(max(1, math.ceil(cells / columns)) for cells in self._cells[row:]) - 1
        return f"\x1b[{rows}A" if rows else ""

    def _ansi(self, row: Text) -> str:
        # render() alone leaves out the style of the whole row.
        segments = list(Text().append_text(row).render(self._console, end=""))
        if self._console.no_color:
            segments = list(Segment.remove_color(segments))
        system = _COLOURS.get(self._console.color_system or "", ColorSystem.STANDARD)
        return "".join(
            style.render(text, color_system=system) if style else text for text, style, _ in segments
        )


_COLOURS = {"256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}


def _size() -> tuple[int, int]:
    """Return columns and rows of the terminal; COLUMNS and LINES may be out of date."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        columns, rows = shutil.get_terminal_size()
    return columns or 80, rows or 24


def _unwrapped(text: str) -> str:
    return f"{UNWRAPPED}{text}{WRAPPED}" if text else ""


class TerminalReply:
    """Renders in a thread of its own: a fast model is not slowed down, a slow one shows a spinner."""

    def __init__(self) -> None:
        self._painter = Painter(sys.stdout, _size)
        self._stream: MarkdownStream | PlainStream | None = None
        self._kind = ""
        self._status = "Waiting"
        self._begun = time.perf_counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._render, daemon=True)
        self._held = ""

    def __enter__(self) -> Self:
        with delivered():
            self._painter.paint([Text()], [])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock, delivered():
            self._paint(final=True)
        self._raise()

    def reading(self, done: int, total: int) -> None:
        with self._lock:
            self._status = f"Reading {done:,}/{total:,} tokens" if done < total else "Waiting"

    def thought(self, text: str) -> None:
        self._push("thought", text)

    def write(self, text: str) -> None:
        self._push("answer", text)

    def _push(self, kind: str, text: str) -> None:
        self._raise()
        # A line end of two characters may arrive in two pieces.
        text = (self._held + text).replace("\r\n", "\n")
        self._held = "\r" if text.endswith("\r") else ""
        text = view.guarded(text.removesuffix(self._held), sys.stdout)
        with self._lock:
            if self._kind != kind:
                if not text.strip("\n"):
                    return
                if self._stream is not None:
                    self._painter.paint([*self._stream.take(self._painter.width, final=True)[0], Text()], [])
                self._kind = kind
                self._stream = MarkdownStream() if kind == "answer" else PlainStream(THOUGHT)
            assert self._stream is not None
            self._stream.push(text)

    def _render(self) -> None:
        pause = FRAME_S
        while not self._ended.wait(pause):
            before = time.perf_counter()
            try:
                with self._lock:
                    self._paint()
            except BaseException as error:  # raised again in the thread that writes
                self._failure = error
                return
            pause = max(FRAME_S, SHARE * (time.perf_counter() - before))

    def _paint(self, *, final: bool = False) -> None:
        if self._stream is not None:
            self._painter.paint(*self._stream.take(self._painter.width, final=final))
            return
        waited = time.perf_counter() - self._begun
        shown = not final and waited > view.PATIENCE_S
        mark = SPINNER[int(waited * 10) % len(SPINNER)]
        self._painter.paint([], [Text(f"{mark} {self._status} · {waited:.0f} s", THOUGHT)] if shown else [])

    def _raise(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            with delivered():
                raise failure


class PlainReply:
    def __init__(self, *, quiet: bool):
        self._answer = view.ShownAnswer(shown=True)
        self._quiet = quiet
        self._thought = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_thought()
        self._answer.end()

    def reading(self, done: int, total: int) -> None:
        pass

    def thought(self, text: str) -> None:
        if not self._quiet:
            self._thought += text
            with tolerated():
                sys.stderr.write(view.guarded(text, sys.stderr))
                sys.stderr.flush()

    def write(self, text: str) -> None:
        self._end_thought()
        self._answer.write(text if self._answer.begun else text.lstrip("\n"))

    def _end_thought(self) -> None:
        if self._thought:
            with tolerated():
                sys.stderr.write("" if self._thought.endswith("\n") else "\n")
                sys.stderr.flush()
            self._thought = ""


def on_terminal() -> bool:
    """Return whether standard input and output are a terminal that moves the cursor."""
    ends = [stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout)]
    return all(ends) and not Console(file=sys.stdout).is_dumb_terminal
