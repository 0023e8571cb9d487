"""Output on streams that are terminals."""

import io
import re
import sys
import time

import pyte
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bough.cli import view


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard output and standard error, both on one terminal."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return stream


@given(st.text())
def test_no_text_steers_a_terminal_and_pipes_get_it_unchanged(text):
    shown = view.guarded(text, Terminal())
    assert len(shown) == len(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert view.guarded(text, io.StringIO()) == text


@given(st.text(alphabet="a\r\n\x1b[", max_size=30), st.lists(st.integers(0, 30)))
@example("\r", [])
def test_an_answer_is_shown_the_same_however_it_is_cut(text, cuts):
    with pytest.MonkeyPatch.context() as patch:
        screens = []
        for borders in ([], sorted(min(cut, len(text)) for cut in cuts)):
            stream = Terminal()
            patch.setattr(sys, "stdout", stream)
            answer = view.ShownAnswer(shown=True)
            for start, end in zip([0, *borders], [*borders, len(text)], strict=True):
                answer.write(text[start:end])
            answer.end()
            screens.append(stream.getvalue())
    assert screens[0] == screens[1]
    assert "\x1b" not in screens[0] and "\r" not in screens[0]
    assert screens[0].endswith("\n") or not text


def test_reasoning_is_dimmed_and_kept_out_of_pipes(monkeypatch):
    def shown(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stdout", stream)
        answer = view.ShownAnswer(shown=True)
        for piece in ("\nhmm\n", "well"):
            answer.thought(piece)
        for piece in ("yes", " no"):
            answer.write(piece)
        answer.end()
        return stream.getvalue()

    terminal(monkeypatch)
    dimmed = "\x1b[90mhmm\x1b[0m\n\x1b[90mwell\x1b[0m"
    assert shown(Terminal()) == f"{dimmed}\n\nyes no\n"
    assert shown(io.StringIO()) == "yes no\n"


def test_short_work_shows_nothing(monkeypatch):
    stream = terminal(monkeypatch)
    with view.Screen().loading("Loading x.gguf") as bar:
        bar.update(10, 10)
    assert stream.getvalue() == ""


def test_long_work_shows_a_bar_and_takes_it_away(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setattr(view, "PATIENCE_S", 0.01)
    with view.Screen().loading("Loading [red]x\x1b.gguf") as bar:
        bar.update(5_000_000, 10_000_000)
        time.sleep(0.3)
    shown = stream.getvalue()
    assert "Loading [red]x␛.gguf" in shown and "4.77 of 9.54 MiB" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # the line was erased


@pytest.mark.parametrize(("quiet", "stream"), [(True, Terminal()), (False, io.StringIO())])
def test_no_bar_when_quiet_or_piped(monkeypatch, quiet, stream):
    monkeypatch.setattr(view, "PATIENCE_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stream)
    with view.Screen(quiet=quiet).reading("Reading") as bar:
        bar.update(1, 2)
        time.sleep(0.1)
    assert stream.getvalue() == ""


def test_statistics_are_grey_unless_no_colour_is_wanted(monkeypatch):
    stream = terminal(monkeypatch)
    view.Screen().statistics("1 tok [bold]")
    assert stream.getvalue() == "\x1b[90m1 tok [bold]\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    view.Screen().statistics("2 tok")
    assert stream.getvalue().endswith("\n2 tok\n")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.00 MiB"), (17 << 30, "17.00 GiB")]
)
def test_amounts(size, text):
    assert view.amount(size) == text


def test_counts():
    assert [view.count(n) for n in (7, 448_104, 27_400_000_000)] == ["7", "448.10 K", "27.40 B"]


def test_warnings_are_two_lines_and_notes_can_be_left_out(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    screen = view.Screen(notes=False)
    screen.warning("no draft \x1b here", "bough pull x")
    screen.note("never mind")
    view.Screen(quiet=True).warning("unheard", "")
    view.Screen().note("a remark")
    shown = re.sub(r"\x1b\[\d*m", "", stream.getvalue())
    assert shown == "warning: no draft ␛ here\nhint: bough pull x\na remark\n"


def test_lines_appear_above_a_running_download(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setattr(view, "PATIENCE_S", 0.01)
    with view.Screen().downloading("me/model") as bar:
        time.sleep(0.2)  # it runs
        bar.downloading("model.gguf", 1 << 19, 1 << 20)
        time.sleep(0.2)
        bar.notice("the hub is slow")
        time.sleep(0.2)
        bar.downloading("model.gguf", 1 << 20, 1 << 20)
    screen = pyte.Screen(80, 10)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines == ["Fetching me/model, 1.00 MiB", "the hub is slow"]
    assert "Asking the hub" in stream.getvalue() and "Downloading model.gguf" in stream.getvalue()


def test_tables_of_what_is_not_here_are_dim(monkeypatch):
    stream = terminal(monkeypatch)
    view.table("Here", ["name", "size"], [["a\x1b", "1"]])
    view.table("Not here", ["name", "what"], [["b", "[bold]"]], texts=("what",), dim=True)
    shown = stream.getvalue()
    assert "\x1b[90m  b " in shown and "\x1b[90m[bold]" in shown and "  a␛ " in shown


@pytest.mark.parametrize(("typed", "meant"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_confirm(monkeypatch, typed, meant):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert view.confirm("Remove?") is meant
