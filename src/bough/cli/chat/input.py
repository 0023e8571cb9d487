"""User input: a prompt with history, completion and editing on a terminal, plain lines elsewhere."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from bough.config import environment
from bough.session.folders import state_folder

PROMPT = "› "


class Lines:
    """Lines of standard input; a backslash at the end of a line joins the next one to it.

    At their end EOFError is raised.
    """

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    def ask(self) -> str:
        lines = []
        while line := sys.stdin.readline() if sys.stdin is not None else "":
            text = line.removesuffix("\n")
            if not text.endswith("\\"):
                return "\n".join([*lines, text])
            lines.append(text.removesuffix("\\"))
        if lines:
            return "\n".join(lines)
        raise EOFError


class Keyboard:
    """A prompt on the terminal; `complete` returns completions, or None where a path is expected."""

    def __init__(self, history: Path | None, complete: Callable[[str], Sequence[str] | None]):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.layout.processors import TabsProcessor
        from prompt_toolkit.output.color_depth import ColorDepth
        from prompt_toolkit.shortcuts import CompleteStyle
        from prompt_toolkit.styles import Style

        self._session: Any = PromptSession(
            message=[("class:mark", PROMPT)],
            multiline=True,
            key_bindings=_keys(),
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=_completer(complete),
            complete_while_typing=False,
            # Any other style keeps rows free below the prompt, which then jumps up.
            complete_style=CompleteStyle.READLINE_LIKE,
            prompt_continuation="  ",
            # Pasted tabs, shown as ^I otherwise.
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
            placeholder=lambda: [] if get_app().is_done else [("class:placeholder", "a message, or /help")],
            style=Style.from_dict({"mark": "bold ansicyan", "placeholder": "ansibrightblack"}),
            color_depth=ColorDepth.DEPTH_1_BIT if environment().no_color else None,
        )

    def ask(self) -> str:
        return self._session.prompt()


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer(complete: Callable[[str], Sequence[str] | None]) -> Any:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class WordCompleter(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            text = document.text_before_cursor
            words = complete(text)
            word = text.rpartition(" ")[2]
            if words is not None:
                yield from (Completion(each, start_position=-len(word)) for each in words)
            else:
                path = text.partition(" ")[2]
                yield from paths.get_completions(Document(path, len(path)), complete_event)

    return WordCompleter()


def history_file() -> Path | None:
    """Return the file of the input history; None where it cannot be written."""
    path = state_folder() / "chat-history"
    try:
        # Other users of the machine must not read it.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return None
    return path


@contextlib.contextmanager
def unechoed() -> Generator[None]:
    """Turn off echo while a reply is shown; what is typed goes to the next prompt."""
    try:
        import termios
    except ImportError:  # not on Windows
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    quiet[3] |= termios.NOFLSH  # else Ctrl-C would discard pending input
    termios.tcsetattr(number, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)
