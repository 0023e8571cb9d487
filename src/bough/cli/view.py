"""Everything that is printed or shown on a terminal.

Answers, tables and JSON go to standard output, the rest to standard error. Progress is shown only on a
terminal, only for work that takes a while, and leaves no trace. Settings in messages become flags here.
"""

import base64
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from traceback import format_exc
from typing import IO, Any, ClassVar, Protocol, Self

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from bough.cli.flags import with_flags
from bough.cli.streams import delivered, tolerated
from bough.config import environment
from bough.errors import BoughError, UsageError
from bough.session import events

PATIENCE_S = 0.5  # work that is done sooner shows no progress
PIPE_WIDTH = 120
NARROW = 100  # columns, below which a bar takes what its words leave
CLIPBOARD = 100_000  # characters of base64 that common terminals take
FOLDED = 20  # columns of text in a table become no narrower than this
GREY = "bright_black"
MARKS = {"ok": ("✓", "green"), "note": ("·", GREY), "warn": ("!", "yellow"), "fail": ("✗", "red")}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error again, which is being handled; rich would end the program itself."""
        raise


def _console(stream: IO[str]) -> Console:
    # Made on each call: streams are replaced in tests, and terminals change their width.
    return _Console(
        file=stream,
        highlight=False,
        markup=False,
        emoji=False,
        no_color=environment().no_color or None,
        width=None if stream.isatty() else PIPE_WIDTH,
    )


def plain(text: str) -> None:
    with delivered():
        sys.stdout.write(guarded(text, sys.stdout) + "\n")


def copy(text: str) -> None:
    """Ask the terminal to put a text on the clipboard (OSC 52), which also works over ssh."""
    if not sys.stdout.isatty():
        raise UsageError("standard output is no terminal, and only a terminal has a clipboard")
    code = base64.b64encode(text.encode(errors="replace")).decode()
    if len(code) > CLIPBOARD:
        raise UsageError(
            f"the text has {len(text):,} characters; terminals copy about {3 * CLIPBOARD // 4:,}"
        )
    with delivered():
        sys.stdout.write(f"\x1b]52;c;{code}\x07")
        sys.stdout.flush()


def width() -> int:
    return _console(sys.stdout).width


def help_page(lines: Iterable[tuple[str, bool]]) -> None:
    """Print lines on standard output; those that are headings stand out on a terminal."""
    console = _console(sys.stdout)
    with delivered():
        for line, heading in lines:
            console.print(Text(line, style="bold" if heading else ""), soft_wrap=True)


def kept(runs: Iterable[tuple[bool, str]]) -> None:
    """Print a text on standard error, with the runs that are not kept in grey, or marked without colours."""
    console = _console(sys.stderr)
    with tolerated():
        for keep, text in runs:
            shown = guarded(text, sys.stderr)
            if not keep and not console.is_terminal:
                shown = f"[-{shown}-]"
            console.print(Text(shown, style="" if keep else GREY), end="", soft_wrap=True)
        console.print()


def paragraphs(*texts: str) -> None:
    """Print texts on standard output, below an empty line; on a terminal broken between words."""
    with delivered():
        for text in ("", *texts):
            _console(sys.stdout).print(guarded(text, sys.stdout), soft_wrap=not sys.stdout.isatty())


def print_json(value: Mapping[str, Any]) -> None:
    plain(json.dumps(value, ensure_ascii=False))


def flush() -> None:
    """Flush standard output, so that a closed pipe raises while it can still be handled."""
    with delivered():
        sys.stdout.flush()


def failure(error: BoughError, *, as_json: bool) -> None:
    """Print an error and its hint on standard error, or one JSON object on standard output."""
    if as_json:
        name = type(error).__name__.lstrip("_")
        texts = {"message": with_flags(error.message), "hint": with_flags(error.hint)}
        print_json({"error": {"type": name} | texts})
        flush()
        return
    _labelled(("error", error.message, "bold red"), ("hint", error.hint, "bold cyan"))


def traceback() -> None:
    """Print Python's traceback of the error that is being handled, on standard error."""
    with tolerated():
        sys.stderr.write(format_exc())


def _labelled(*rows: tuple[str, str, str]) -> None:
    """Print a line on standard error for each (label, text, style of the label) that has a text."""
    console = _console(sys.stderr)
    for label, text, style in rows:
        if text:
            line = Text.assemble((f"{label}:", style), " ", guarded(with_flags(text), sys.stderr))
            with tolerated(), _above_the_bar():
                # Hints hold commands, which are copied: only the terminal itself may break them.
                console.print(line, soft_wrap=label == "hint" or not sys.stderr.isatty())


@contextlib.contextmanager
def _above_the_bar() -> Generator[None]:
    bar = Bar.on_screen
    with contextlib.nullcontext() if bar is None else bar.paused():
        yield


def confirm(text: str) -> bool:
    try:
        return typer.confirm(text, default=False, err=True)
    except typer.Abort:
        sys.stderr.write("\n")
        return False


def _say(text: str, style: str, *, whole: bool = False) -> None:
    """Print a line on standard error; on a terminal it is broken between words unless `whole`."""
    line = Text(guarded(with_flags(text), sys.stderr), style=style)
    with tolerated(), _above_the_bar():
        _console(sys.stderr).print(line, soft_wrap=whole or not sys.stderr.isatty())


def guarded(text: str, stream: IO[str]) -> str:
    """Return the text, for a terminal without control characters."""
    return text.translate(_CONTROL) if stream.isatty() else text


# ESC becomes the symbol ␛ and so on; the second block of control characters has no symbols.
_CONTROL = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROL |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Reply(Protocol):
    """Shows one answer while it is generated."""

    def reading(self, done: int, total: int) -> None: ...

    def thought(self, text: str) -> None: ...

    def write(self, text: str) -> None: ...


def show(event: object, reply: Reply) -> None:
    """Show a session's event, of this process or a server."""
    match event:
        case events.Progress(done, total):
            reply.reading(done, total)
        case events.Reasoning(text):
            reply.thought(text)
        case events.Text(text):
            reply.write(text)


class ShownAnswer:
    """Text that is streamed to standard output.

    Reasoning is shown, dimmed, on a terminal only: what is piped is the answer alone.
    """

    def __init__(self, *, shown: bool, bar: "Bar | None" = None):
        """bar: counts the prompt's tokens until the answer begins."""
        self.begun = False  # there is text
        self._shown, self._bar = shown, bar
        self._held = ""
        self._written = ""  # the last piece that was shown

    def reading(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(done, total)

    def thought(self, text: str) -> None:
        self._end_bar()
        if self._shown and sys.stdout.isatty():
            self._show(text if self._written else text.lstrip("\n"), style=GREY)

    def write(self, text: str) -> None:
        self._end_bar()
        if self._shown:
            if not self.begun and self._written:
                self._show("\n" if self._written.endswith("\n") else "\n\n")
            self._show(text)
        self.begun = self.begun or bool(text)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, piece: str, style: str = "") -> None:
        # Lines of Windows files end in two characters, which may arrive in two pieces.
        piece = (self._held + piece).replace("\r\n", "\n") if sys.stdout.isatty() else piece
        self._held = "\r" if piece.endswith("\r") and sys.stdout.isatty() else ""
        piece = guarded(piece.removesuffix(self._held), sys.stdout)
        with delivered():
            if style:
                _console(sys.stdout).print(Text(piece, style=style), end="", soft_wrap=True)
            else:
                sys.stdout.write(piece)
            sys.stdout.flush()
        self._written = piece or self._written

    def end(self) -> None:
        shown = self._written or self._held
        if shown and not self._written.endswith("\n"):
            with delivered():
                sys.stdout.write("\n")
                sys.stdout.flush()


class Bar:
    """A line of progress on standard error that appears after PATIENCE_S and vanishes at the end."""

    on_screen: ClassVar["Bar | None"] = None

    def __init__(self, label: str, columns: Sequence[ProgressColumn], *, shown: bool):
        console = _console(sys.stderr)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            *columns,
            console=console,
            transient=True,
            expand=console.width < NARROW,
        )
        self._task = self._progress.add_task(_label(label), total=None)
        self._shown = shown
        self._lock = threading.RLock()
        self._timer = threading.Timer(PATIENCE_S, self._start)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self._shown:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def update(self, done: int, total: int, *, label: str | None = None) -> None:
        description = None if label is None else _label(label)
        self._progress.update(self._task, completed=done, total=total, description=description)

    def stop(self) -> None:
        with self._lock:
            self._timer.cancel()
            self._shown = False
            if self._progress.live.is_started:
                self._progress.stop()
                Bar.on_screen = None

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Remove the bar while a line is printed above it."""
        with self._lock:
            running = self._progress.live.is_started
            if running:
                self._progress.stop()
            yield
            if running:
                self._progress.start()

    def _start(self) -> None:
        with self._lock:
            if self._shown:
                self._progress.start()
                Bar.on_screen = self


class DownloadBar(Bar):
    def __init__(self, what: str, columns: Sequence[ProgressColumn], *, shown: bool, screen: "Screen"):
        super().__init__("Asking the hub", columns, shown=shown)
        self._what, self._screen = what, screen
        self.began = False  # bytes have arrived

    def downloading(self, name: str, done: int, total: int) -> None:
        if not self.began:
            self.began = True
            self._screen.note(f"Fetching {self._what}, {amount(total)}")
        self.update(done, total, label=f"Downloading {name}")

    def checking(self, name: str, done: int, total: int) -> None:
        self.update(done, total, label=f"Checking {name}")

    def notice(self, text: str) -> None:
        self._screen.notice(text)


class _Amount(ProgressColumn):
    """How much of a task is done, in words; nothing before its total is known."""

    def __init__(self, said: Callable[[Task, float], str]):
        super().__init__(table_column=Column(no_wrap=True))
        self._said = said

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else self._said(task, task.total), style="progress.download")


def _tokens(task: Task, total: float) -> str:
    return f"{task.completed:,.0f}/{total:,.0f} tokens" + (f"  {task.speed:,.0f} tok/s" if task.speed else "")


def _bytes(task: Task, total: float) -> str:
    whole = amount(total)
    done = task.completed / total * float(whole.split()[0]) if total else 0.0
    rate = f"  {amount(task.speed)}/s" if task.speed and _console(sys.stderr).width >= NARROW else ""
    return f"{done:.2f} of {whole}{rate}"


def _tensors(task: Task, total: float) -> str:
    return f"{task.completed:.0f}/{total:.0f} tensors"


class Screen:
    """Progress, notices and statistics on standard error; none of them when `quiet`."""

    def __init__(self, *, quiet: bool = False, notes: bool = True):
        self.quiet, self.takes_notes = quiet, notes and not quiet
        self.draws = not quiet and sys.stderr.isatty()  # progress

    def note(self, text: str) -> None:
        if self.takes_notes:
            _say(text, GREY)

    def warning(self, text: str, command: str) -> None:
        if not self.quiet:
            _labelled(("warning", text, "bold yellow"), ("hint", command, "bold cyan"))

    def notice(self, text: str) -> None:
        if not self.quiet:
            _say(text, "yellow")

    def statistics(self, line: str) -> None:
        if not self.quiet:
            _say(line, GREY, whole=True)

    def waiting(self, label: str) -> Bar:
        return Bar(label, [SpinnerColumn()], shown=self.draws)

    def loading(self, label: str) -> Bar:
        return Bar(label, [_bar(), _Amount(_bytes)], shown=self.draws)

    def reading(self, label: str) -> Bar:
        return Bar(label, [_bar(), _Amount(_tokens)], shown=self.draws)

    def converting(self, label: str) -> Bar:
        return Bar(label, [_bar(), _Amount(_tensors)], shown=self.draws)

    def counting(self, label: str) -> Bar:
        return Bar(label, [_bar(), MofNCompleteColumn()], shown=self.draws)

    def downloading(self, what: str) -> DownloadBar:
        size = _Amount(_bytes)
        columns = [_bar(), size, TimeRemainingColumn(compact=True)]
        return DownloadBar(what, columns, shown=self.draws, screen=self)


def _bar() -> BarColumn:
    return BarColumn(None if _console(sys.stderr).width < NARROW else 40)


def _label(text: str) -> str:
    text, width = guarded(text, sys.stderr), _console(sys.stderr).width
    half = 22 if width >= NARROW else max(8, width // 2 - 16)
    return text if len(text) <= 2 * half else f"{text[: half - 1]}…{text[-half:]}"


def amount(size: float) -> str:
    """Return a number of bytes in a unit that suits it."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size:.0f} B"


def count(number: float) -> str:
    """Return a number of parameters in a unit that suits it."""
    for unit, power in (("B", 9), ("M", 6), ("K", 3)):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {unit}"
    return f"{number:.0f}"


def sections(title: str, parts: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    _show(Text(guarded(title, sys.stdout), style="bold"))
    for heading, rows in parts.items():
        if rows:
            labelled = _pairs([(f"  {label}", guarded(value, sys.stdout)) for label, value in rows])
            _show(Text(f"\n{heading}", style="cyan"), labelled)


def _show(*parts: RenderableType) -> None:
    console = _console(sys.stdout)
    with delivered():
        for part in parts:
            console.print(part)


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=GREY, no_wrap=True, min_width=14)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(Text(label), Text(value))
    return grid


def table(
    heading: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: Sequence[str] = (),
    dim: bool = False,
) -> None:
    """Print columns under a heading: names first, then numbers; columns in `texts` hold text.

    Where the columns do not fit side by side, each row becomes a list.
    """
    style = GREY if dim else ""
    cells = [[guarded(cell, sys.stdout) for cell in (f"  {row[0]}", *row[1:])] for row in rows]
    words = [not index or column in texts for index, column in enumerate(columns)]
    headings = [f"  {columns[0]}", *columns[1:]]
    _show(Text(f"\n{heading}", style="cyan"))
    # Numbers need all of their width, text can be folded.
    widest = [max(map(cell_len, column)) for column in zip(headings, *cells, strict=True)]
    least = [min(width, FOLDED) if text else width for width, text in zip(widest, words, strict=True)]
    room = _console(sys.stdout).width - sum(least)
    padding = min(2, room // (2 * len(columns) - 2)) if len(columns) > 1 else 2
    if padding < 1:
        for first, *rest in cells:
            _show(
                Text(first, style=style),
                _pairs(list(zip([f"    {c}" for c in columns[1:]], rest, strict=True))),
            )
        return
    grid = Table(box=None, pad_edge=False, padding=(0, padding), header_style=GREY)
    for title, text, width in zip(headings, words, least, strict=True):
        grid.add_column(
            title,
            justify="left" if text else "right",
            no_wrap=not text,
            overflow="fold",
            min_width=width,
        )
    for row in cells:
        grid.add_row(*(Text(cell, style=style) for cell in row))
    _show(grid)


def checks(rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Print a line for each (status, name, detail, hint), with the hint below it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=1)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for status, name, detail, hint in rows:
        mark, style = MARKS[status]
        grid.add_row(
            Text(mark, style=style), Text(name), Text(detail, style=style if status == "fail" else "")
        )
        if hint:
            grid.add_row("", "", Text(f"hint: {hint}", style="cyan"))
    _show(grid)
