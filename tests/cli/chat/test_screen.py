"""Rendering of replies: the right rows, each written once."""

import io
import os
import re
import sys
import time

import pyte
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.text import Text
from wcwidth import wcwidth

from bough.cli import view
from bough.cli.chat.screen import Painter, PlainReply, TerminalReply
from bough.cli.chat.stream import MarkdownStream
from tests.cli.chat.test_markdown import SOURCES
from tests.cli.terminal import Screen


class Glass(io.StringIO):
    """A terminal stream that writes to a screen."""

    def __init__(self, columns: int = 40, lines: int = 12):
        super().__init__()
        self.screen = Screen(columns, lines)
        self._stream = pyte.Stream(self.screen)
        self.sent: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.sent.append(text)
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def painter(self) -> Painter:
        return Painter(self, lambda: (self.screen.columns, self.screen.lines))

    def rows(self) -> list[str]:
        return "\n".join(self.screen.rows()).rstrip("\n").split("\n")


def texts(*rows: str) -> list[Text]:
    return [Text(row) for row in rows]


def test_only_what_differs_is_written():
    glass = Glass()
    painter = glass.painter()
    painter.paint([], texts("Hello wor"))
    painter.paint([], texts("Hello world"))
    assert re.sub(r"\x1b\[\?\d+[hl]", "", glass.sent[-1]) == "ld"
    painter.paint([], texts("Hello world"))
    assert len(glass.sent) == 2
    painter.paint(texts("Hello world"), texts("next"))
    assert re.sub(r"\x1b\[\?\d+[hl]", "", glass.sent[-1]) == "\nnext"
    painter.paint(texts("next one"), [])
    assert glass.rows() == ["Hello world", "next one"]
    assert glass.screen.overwritten == {} and glass.screen.cursor.y == 2


def test_rows_that_change_and_vanish():
    glass = Glass()
    painter = glass.painter()
    painter.paint([], texts("one", "two", "three"))
    painter.paint([], texts("one", "2"))
    assert glass.rows() == ["one", "2"]
    assert 0 not in glass.screen.overwritten
    painter.paint([], [])
    painter.paint(texts("done"), [])
    assert glass.rows() == ["done"]


def test_more_rows_than_the_screen_has():
    glass = Glass(lines=5)
    painter = glass.painter()
    painter.paint(texts("first"), [])
    for count in range(1, 13):
        painter.paint([], texts(*(f"row {number}" for number in range(count))))
        assert glass.rows()[-1] == f"row {count - 1}"
    painter.paint(texts(*(f"row {number}" for number in range(12))), [])
    assert glass.rows() == ["first", *(f"row {number}" for number in range(12))]


def test_a_terminal_that_becomes_narrower():
    glass = Glass(columns=40)
    painter = glass.painter()
    painter.paint(texts("first"), [])
    painter.paint([], texts("a" * 30, "b" * 30))
    glass.screen.resize(columns=20)
    # Terminals wrap the rows again; this one cuts them, so the wrapped rows are written by hand.
    glass.screen.reset()
    glass.write("first\n" + "a" * 20 + "\n" + "a" * 10 + "\n" + "b" * 20 + "\n" + "b" * 10)
    painter.paint([], texts("a" * 19, "a" * 11, "b"))
    assert glass.rows() == ["first", "a" * 19, "a" * 11, "b"]


@settings(max_examples=80, deadline=None)
@given(SOURCES, st.lists(st.integers(0, 300), max_size=25), st.integers(6, 30))
def test_any_text_leaves_its_rows_and_no_final_row_is_drawn_again(source, cuts, lines):
    glass = Glass(lines=lines)
    painter, stream = glass.painter(), MarkdownStream()
    borders = sorted(min(cut, len(source)) for cut in cuts)
    final: list[Text] = []
    for start, end in zip([0, *borders], [*borders, len(source)], strict=True):
        before = dict(glass.screen.overwritten)
        top = _top(final, glass.screen.columns)
        stream.push(source[start:end])
        settled, live = stream.take(painter.width)
        painter.paint(settled, live)
        final += settled
        assert {
            row for row in glass.screen.overwritten if glass.screen.overwritten[row] != before.get(row)
        } <= set(range(top, 10_000))
    settled = stream.take(painter.width, final=True)[0]
    painter.paint(settled, [])
    # pyte gives a skin tone columns of its own: a row that becomes too wide by that is cut.
    assume(all(sum(map(wcwidth, row.plain)) <= glass.screen.columns for row in final + settled))
    assert "".join(glass.rows()).replace(" ", "") == "".join(
        row.plain.replace(" ", "").replace("\t", "") for row in final + settled
    )


def _top(rows: list[Text], columns: int) -> int:
    """The first row below these, where lines of code may take several."""
    probe = Glass(columns, 400)
    probe.write("".join(f"{row.plain}\n" for row in rows))
    return probe.screen.cursor.y


def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for wanted in (True, False):
        if not wanted:
            monkeypatch.setenv("NO_COLOR", "1")
        glass = Glass()
        glass.painter().paint([Text("red", style="red"), Text("bold", style="bold")], [])
        assert ("\x1b[31m" in glass.sent[0]) is wanted
        assert "\x1b[1mbold" in glass.sent[0]


def standing(monkeypatch: pytest.MonkeyPatch) -> Glass:
    """Replaces standard output; patched inside the test, because pytest patches it before."""
    glass = Glass(60, 20)
    monkeypatch.setattr(sys, "stdout", glass)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((60, 20)))
    return glass


def test_a_reply_with_thoughts(monkeypatch):
    glass = standing(monkeypatch)
    with TerminalReply() as reply:
        reply.thought("\nLet me see.\n")
        time.sleep(0.1)
        reply.thought("Yes \x1b[2J.\n\n")
        reply.write("\n\nIt is ")
        time.sleep(0.1)
        reply.write("**so**.\r")
        reply.write("\n\nEnd")
    assert glass.rows() == ["", "Let me see.", "Yes ␛[2J.", "", "It is so.", "", "End"]
    assert glass.screen.buffer[1][0].fg == "brightblack" and glass.screen.buffer[1][0].italics
    assert glass.screen.buffer[4][6].bold
    assert max(glass.screen.overwritten, default=0) == 0


def test_while_nothing_comes(monkeypatch):
    glass = standing(monkeypatch)
    monkeypatch.setattr(view, "PATIENCE_S", 0.05)
    with TerminalReply() as reply:
        reply.reading(512, 4096)
        time.sleep(0.2)
        assert "Reading 512/4,096 tokens" in glass.rows()[1]
        reply.write("Hi")
    assert glass.rows() == ["", "Hi"]


def test_a_terminal_that_goes_away(monkeypatch):
    class Gone(Glass):
        def write(self, text: str) -> int:
            if len(self.sent) > 0:
                raise BrokenPipeError
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError), TerminalReply() as reply:
        for _ in range(100):
            reply.write("x")
            time.sleep(0.01)


def test_without_a_terminal(capsys):
    with PlainReply(quiet=False) as reply:
        reply.thought("hmm")
        reply.write("\n\nIt is **so")
        reply.write("**.")
    assert capsys.readouterr() == ("It is **so**.\n", "hmm\n")
    with PlainReply(quiet=True) as reply:
        reply.thought("hmm")
        reply.write("x\n")
    assert capsys.readouterr() == ("x\n", "")
