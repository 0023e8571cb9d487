"""The chat as a user sees it: the program on a terminal, keys in, screens out."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.chat_server import ChatServer, echo, thought
from tests.cli.terminal import Terminal

PROGRAM = [sys.executable, "-m", "bough.cli.main", "chat"]
PROMPT = "› a message, or /help"
QUESTION = "Write a python function that adds two numbers"
ARTICLE = """\
# A title

The first paragraph has **bold words**, `code` and enough text to be wrapped at the end of the row, 日本語.

1. the first item is short
2. the second item is so long that it needs more than one row on this terminal, as one can see

```python
def add(a, b):
    return a + b
```

| name | value |
|---|--:|
| one | 1 |
| seventy | 70 |

The end."""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    return inherited | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


@pytest.fixture
def chat(environment, tmp_path) -> Iterator[Callable[..., Terminal]]:
    """Starts the program and waits for its prompt."""
    opened: list[Terminal] = []

    def start(*arguments: str, **size: int) -> Terminal:
        terminal = Terminal([*PROGRAM, *arguments], environment, cwd=tmp_path, **size)
        opened.append(terminal)
        terminal.wait(lambda text: text.endswith(PROMPT), "no prompt")
        return terminal

    yield start
    for terminal in opened:
        terminal.__exit__()


def said(terminal: Terminal, line: str) -> list[str]:
    """Types a line and waits for the next prompt; the rows between the two that are not empty."""
    before = terminal.text.splitlines().count(f"› {line}")
    terminal.type(f"{line}\r")
    terminal.wait(
        lambda text: text.endswith(PROMPT) and text.splitlines().count(f"› {line}") > before,
        f"no answer to {line}",
    )
    rows = terminal.text.splitlines()
    begun = max(index for index, row in enumerate(rows) if row == f"› {line}")
    return [row for row in rows[begun + 1 : -1] if row]


def test_the_model_of_the_package(chat, tmp_path):
    terminal = chat("-t", "0", "-n", "60", columns=100, lines=30)
    rows = said(terminal, QUESTION)
    assert rows[0] == "```python" and rows[-2] == "```" and rows[1].startswith("def ")
    assert re.match(r"\d+ tok · [\d.,]+ tok/s · TTFT [\d.]+ s · prompt \d+ · accept [\d.]+/step", rows[-1])
    code = rows[:-1]

    assert said(terminal, "/draft off")[0].startswith("Speculation is off; /regen generates the last reply")
    again = said(terminal, "/regen")
    assert again[: len(code)] == code and "accept" not in again[len(code)]
    assert again[-1].startswith("the same text · ")

    assert said(terminal, "/save talk.json") == ["2 messages saved in talk.json."]
    assert said(terminal, "/undo") == [f"Removed: {QUESTION}"]
    assert said(terminal, "/undo")[0] == "error: there is no message to remove"
    loaded = said(terminal, "/load talk.json")
    assert loaded == ["2 messages from talk.json.", f"› {QUESTION}", *code]
    assert said(terminal, "/set max_tokens 3") == ["max_tokens is 3."]
    assert "3 tok" in said(terminal, "hello")[-1]

    terminal.type("\x04")
    assert terminal.ended() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][1]["content"].strip() == "\n".join(code)


def test_stopping_the_model(chat):
    # Slow enough to be stopped: native code writes 3000 tokens of a tiny model in a moment.
    # Any of its tokens is about as likely as the end.
    every = ("-t", "2", "--top-p", "1", "--top-k", "0", "--min-p", "0")
    terminal = chat("-n", "3000", "--seed", "1", *every, "--cpu-backend", "torch")
    terminal.type("Tell me a very long story\r")
    terminal.wait(lambda text: re.search(r"long story\n\n.{30}", text, re.S), "no text")
    assert "tok/s" not in terminal.text
    terminal.type("\x03")
    terminal.wait(lambda text: "interrupted" in text and text.endswith(PROMPT), "not stopped")
    # What was written stays in the conversation.
    assert said(terminal, "/save talk.json") == ["2 messages saved in talk.json."]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(echo) as server:
        yield server


def test_what_is_final_is_drawn_once(chat, server):
    server.say = lambda _: re.findall(r".{1,7}", ARTICLE, re.S)
    server.pause_s = 0.02
    terminal = chat("--url", server.url, columns=60, lines=18)
    screen = terminal.screen
    begun = screen.scrolled + screen.cursor.y
    screen.order.clear()
    terminal.type("go\r")
    terminal.wait(lambda text: "tok/s" in text and text.endswith(PROMPT), "no end")
    rows = screen.rows()
    first = next(i for i in range(begun, len(rows)) if rows[i] == "A title")
    last = next(i for i in range(first, len(rows)) if rows[i] == "The end.")
    # Where a new block begins nothing above it may be touched any more.
    starts = [first, *(i + 1 for i in range(first, last) if not rows[i])]
    newest, touched_again = first, []
    for row in screen.order[screen.order.index(first) :]:
        if first <= row <= last:
            newest = max([newest, *(start for start in starts if start <= row)])
            touched_again += [row] if row < newest else []
    assert touched_again == []
    assert len(starts) >= 6 and "\x1b[2J" not in terminal.raw.decode()
    # The longest way back is to the top of the one block that is still written.
    ways = re.findall(r"\x1b\[(\d+)A", terminal.raw.decode().split("A title")[1])
    assert max(map(int, ways), default=0) <= 4
    assert "日本語" in terminal.text.replace(" ", "") and "seventy     70" in terminal.text


def test_thoughts_are_dim(chat, server):
    server.say = lambda _: [thought("I think "), thought("about it."), "It is **so**."]
    terminal = chat("--url", server.url)
    rows = said(terminal, "why")
    assert rows[:2] == ["I think about it.", "It is so."]
    line = terminal.screen.rows().index("I think about it.")
    cell = terminal.screen.buffer[line][0]
    assert cell.fg == "brightblack" and cell.italics
    assert terminal.screen.buffer[line + 2][0].fg == "default" and terminal.screen.buffer[line + 2][6].bold


def test_lines(chat, server, environment):
    terminal = chat("--url", server.url)
    for count, keys in enumerate(("one\\\rtwo\x1b\rthree", "\x1b[200~pasted\n\tlines\x1b[201~"), 1):
        terminal.type(f"{keys}\r")
        terminal.wait(lambda text, count=count: text.count(" tok ·") == count, "no reply")
    typed = [each["messages"][-1]["content"] for each in server.requests]
    assert typed == ["one\ntwo\nthree", "pasted\n\tlines"]
    assert "^I" not in terminal.text
    terminal.type("thrown away\x03")
    terminal.wait(lambda text: text.endswith(PROMPT), "no new prompt")
    terminal.type("/sy\t")
    terminal.wait(lambda text: text.endswith("› /system"), "not completed")
    terminal.type("Be brief.\r")
    terminal.wait(lambda text: "System message set." in text, "not set")
    history = Path(environment["XDG_STATE_HOME"]) / "bough" / "chat-history"
    assert "+pasted" in history.read_text() and history.stat().st_mode & 0o77 == 0
    terminal.type("\x04")
    assert terminal.ended() == 0 and terminal.last == "›"

    again = chat("--url", server.url)
    again.type("\x1b[A\x1b[A")
    again.wait(lambda text: text.endswith("› pasted\n      lines"), "history is gone")


def test_stopping_a_server(chat, server):
    server.pause_s = 0.1
    terminal = chat("--url", server.url)
    terminal.type(" ".join(f"w{number}" for number in range(300)) + "\r")
    terminal.wait(lambda text: "\n\nw0 w1 w2" in text, "no text")
    terminal.type("typed ahead")
    terminal.type("\x03")
    terminal.wait(lambda text: text.endswith("› typed ahead"), "what was typed is lost")
    assert "interrupted" in terminal.text and server.gone.wait(5)
    server.pause_s = 0
    terminal.type("\r")
    terminal.wait(lambda text: text.count("tok/s") == 1, "no second reply")
    roles = [each["role"] for each in server.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_stopping_before_anything_was_written(chat, server):
    server.pause_s = 5
    terminal = chat("--url", server.url)
    terminal.type("hello\r")
    terminal.wait(lambda text: "Waiting · 1 s" in text, "no sign of life")
    terminal.type("\x03")
    terminal.wait(lambda text: "nothing was written, the message is removed" in text, "no note")
    assert said(terminal, "/undo")[0] == "error: there is no message to remove"


def test_errors_leave_the_chat_open(chat, server):
    terminal = chat("--url", server.url)
    server.say = lambda _: [{"error": {"message": "out of memory"}}]
    assert said(terminal, "hi") == ["error: the server broke off: out of memory"]
    server.say = echo
    assert said(terminal, "hi")[0] == "hi"
    assert [len(each["messages"]) for each in server.requests] == [1, 1]


def test_a_narrow_terminal(chat, server):
    server.say = lambda _: [ARTICLE]
    terminal = chat("--url", server.url, columns=24, lines=10)
    terminal.type("go\r")
    terminal.wait(lambda text: text.endswith(PROMPT) and "The end." in text, "no end")
    text = terminal.text.replace("\n", " ")
    assert "2. the second item is" in text and "日本語" in text.replace(" ", "")


def test_stopping_without_a_terminal(environment, server):
    server.pause_s = 0.1
    command = [*PROGRAM, "--url", server.url]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, **pipes) as process:
        process.stdin.write(b"a b c d e f g h i j k l m n o p q r s t u v w x y z\nnever\n")
        process.stdin.flush()
        first = process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
    assert (process.returncode, first) == (130, b"a b ") and rest.endswith(b"\n")
    assert b"interrupted" in errors and b"Traceback" not in errors and len(server.requests) == 1
