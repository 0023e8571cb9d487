"""A chat without a terminal, with a scripted backend."""

import io
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bough.cli import view
from bough.cli.chat import slash_commands
from bough.cli.chat.backend import Event, ReplyEnd
from bough.cli.chat.conversation import ChatSettings, Conversation, Message
from bough.cli.chat.loop import Chat, _as_ours
from bough.errors import BoughError, PromptTooLong, UsageError
from bough.images.opening import ImageFile
from bough.session.events import Reasoning, Text
from tests.images.files import encoded, quarters


class Parrot:
    """Replies with the last message and the seed; records the requests."""

    name = "Parrot"
    about = "on a perch"
    breakable = False
    sees = True

    def __init__(self) -> None:
        self.asked: list[tuple[list[Any], ChatSettings, int]] = []
        self.failure: Exception | None = None
        self.sure = False  # of its text, whatever the seed
        self.texts: Iterator[str] = iter(())  # of its next replies

    def defaults(self, settings: ChatSettings) -> Mapping[str, float]:
        return {"temperature": 0.7}

    def check(self, settings: ChatSettings) -> None:
        if settings.draft_budget == 63:
            raise UsageError("63 is too much")

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: ChatSettings,
        *,
        seed: int,
        cancelled: Callable[[], bool],
    ) -> Generator[Event]:
        self.asked.append(([*messages], settings, seed))
        yield Reasoning("hmm")
        if self.failure is not None and "late" not in str(self.failure):
            raise self.failure
        greedy = self.sure or settings.values.get("temperature") == 0
        yield Text(next(self.texts, f"{messages[-1]['content']}{'' if greedy else f' {seed}'}"))
        if self.failure is not None:
            raise self.failure
        yield ReplyEnd(
            f"line of {seed}",
            {"model": "m", "tokens": 3, "speed": 1.25, "counts": [1, 2]},
            10.0 + len(self.asked),
        )


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


@pytest.fixture
def talk(parrot, monkeypatch) -> Callable[..., Chat]:
    def run(*lines: str, settings: ChatSettings | None = None) -> Chat:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat = Chat(parrot, Conversation(), settings or ChatSettings(), screen=view.Screen())
        chat.code = chat.run()
        return chat

    return run


def contents(chat: Chat) -> list[str]:
    return [each.content for each in chat.conversation.messages]


def test_lines_are_messages_and_the_conversation_grows(talk, parrot, capsys):
    chat = talk("hello", "  ", "two\\", "lines", settings=ChatSettings({"seed": 5}))
    assert contents(chat) == ["hello", "hello 5", "two\nlines", "two\nlines 5"]
    assert [len(messages) for messages, _, _ in parrot.asked] == [1, 3]
    assert chat.conversation.messages[1] == Message("assistant", "hello 5", "hmm")
    output, errors = capsys.readouterr()
    assert output == "hello 5\ntwo\nlines 5\n"
    assert errors == "hmm\nline of 5\nhmm\nline of 5\n"
    assert chat.code == 0


def test_undo_clear_and_system(talk, parrot, capsys):
    chat = talk(
        "a",
        "/undo",
        "/undo",
        "/system Be brief.",
        "b",
        "/clear",
        "/system",
        "c",
        "/system none",
        "/exit",
        "d",
    )
    assert contents(chat) == ["c", f"c {parrot.asked[-1][2]}"]
    assert [messages[0]["role"] for messages, _, _ in parrot.asked] == ["user", "system", "system"]
    assert chat.conversation.system is None
    errors = capsys.readouterr().err
    assert "Removed: a" in errors and "error: there is no message to remove" in errors
    assert "A new conversation. The system message stays." in errors and "System message: Be brief." in errors
    assert chat.code == 2


def test_another_answer_has_another_seed(talk, parrot):
    chat = talk("a", "/regen")
    first, second = (seed for _, _, seed in parrot.asked)
    assert first != second and contents(chat) == ["a", f"a {second}"]
    assert parrot.asked[0][0] == parrot.asked[1][0]


def test_another_answer_has_another_seed_than_one_that_was_set(talk, parrot):
    talk("a", "/regen", "/regen", "b", settings=ChatSettings({"seed": 5}))
    assert [seed for _, _, seed in parrot.asked] == [5, 6, 7, 5]


def test_a_greedy_answer_is_the_same_again_and_a_line_says_why(talk, parrot, capsys):
    chat = talk("a", "/regen", settings=ChatSettings({"temperature": 0}))
    assert contents(chat) == ["a", "a"]
    assert "The same text: the temperature is 0." in capsys.readouterr().err


def test_a_text_that_comes_again_is_sampled_with_more_freedom(talk, parrot, capsys):
    parrot.texts = iter(["one", "one", "two", "two", "three", "three", "four", "five"])
    chat = talk("a", "/regen", "/regen", "/draft off", "/regen", "/regen", "b")
    assert contents(chat) == ["a", "four", "b", "five"]
    warmth = [settings.values.get("temperature") for _, settings, _ in parrot.asked]
    assert warmth == [None, None, 1.0, 1.0, 1.3, 1.3, 1.0, None]
    errors = capsys.readouterr().err
    assert "With temperature 1.3, top-p 0.95, as the recommended sampling gave the same text:" in errors
    assert "the same text · 16.0 tok/s now, 15.0 tok/s before" in errors
    assert chat.settings.values == {}


@pytest.mark.parametrize(("values", "tries"), [({}, 5), ({"temperature": 0.5}, 2), ({"top_p": 0.8}, 2)])
def test_the_same_text_again_and_again_says_what_changes_it(talk, parrot, capsys, values, tries):
    parrot.sure = True
    talk("a", "/regen", settings=ChatSettings(values))
    assert len(parrot.asked) == tries
    assert "`/set temperature 1.3` gives others." in capsys.readouterr().err


def test_a_long_text_that_comes_again_is_not_asked_for_once_more(talk, parrot, capsys):
    parrot.texts = iter(["x" * 1001] * 2)
    talk("a", "/regen")
    assert len(parrot.asked) == 2 and "The same text:" in capsys.readouterr().err


def test_without_speculation_the_same_answer_comes_again(talk, parrot, capsys):
    chat = talk(
        "a", "/draft off", "/regen", "/draft 7", "/regen", "/draft", "/draft 64", "/draft 63", "/draft on"
    )
    assert len({seed for _, _, seed in parrot.asked}) == 1
    assert [settings.draft_budget for _, settings, _ in parrot.asked] == [None, 0, 7]
    assert chat.settings.draft_budget is None
    errors = capsys.readouterr().err
    assert "Speculation is off; /regen generates the last reply again, with the same seed." in errors
    assert "the same text · 12.0 tok/s now, 11.0 tok/s before" in errors
    assert "Speculation is on, 7 tokens in a tree at most." in errors
    assert "/draft is '64'; needs on, off, or a number from 1 to 63" in errors and "63 is too much" in errors


def test_settings(talk, parrot, capsys):
    chat = talk(
        "/set",
        "/set top-p 0.5",
        "/set temperature",
        "/set heat 3",
        "/think 50",
        "a",
        "/think off",
        "/think default",
    )
    assert parrot.asked[0][1].values == {"top_p": 0.5}
    assert (parrot.asked[0][1].thinking, parrot.asked[0][1].thinking_budget) == (True, 50)
    assert chat.settings.thinking is None and chat.settings.thinking_budget is None
    output, errors = capsys.readouterr()
    assert (
        "temperature         0.7" in output
        and "repetition_penalty  default" in output
        and "as the model has it" in output
    )
    assert "top-p is 0.5." in errors and "Thinking is on, for 50 tokens at most." in errors
    assert "/set temperature needs a value" in errors and "there is no setting 'heat'" in errors


def test_files_go_with_the_next_message(talk, parrot, tmp_path, capsys):
    (tmp_path / "a b.md").write_text("```\nx\n```\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    chat = talk(
        f'/file "{tmp_path}/a b.md"',
        "what is it?",
        "and now?",
        f"/file {tmp_path}/binary",
        "/file none",
        "/file",
        f"/file {tmp_path}",
    )
    assert contents(chat)[0] == "a b.md:\n````\n```\nx\n```\n````\n\nwhat is it?"
    assert contents(chat)[2] == "and now?"
    errors = capsys.readouterr().err
    assert "a b.md, 10 characters, goes with the next message." in errors
    for wanted in (
        "is not text: byte 0",
        "none cannot be read: No such file",
        "/file needs a path",
        "is a folder",
    ):
        assert wanted in errors


def test_saving_and_loading(talk, parrot, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat = talk(
        "/save",
        "/set top_k 3",
        "/system s",
        "a",
        "/save talk.json",
        "b",
        "/save",
        "/clear",
        "/load talk.json",
        "c",
    )
    saved = json.loads(Path("talk.json").read_text())
    assert [each["content"] for each in saved["messages"]] == contents(chat)[:4]
    assert saved["model"] == "Parrot" and saved["settings"]["top_k"] == 3 and saved["system"] == "s"
    assert len(parrot.asked[-1][0]) == 6
    errors = capsys.readouterr().err
    assert "0 messages saved in chat-" in errors and "2 messages saved in talk.json." in errors
    assert "4 messages from talk.json." in errors


def test_a_broken_file_changes_nothing(talk, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text('{"messages": [{"role"')
    chat = talk("a", "/set top_k 3", "/load broken.json", "/load", "/load none.json")
    assert len(contents(chat)) == 2 and chat.settings.values == {"top_k": 3} and chat.path is None
    assert (
        "error: broken.json is not JSON: Expecting ':' delimiter in line 1, column 22"
        in capsys.readouterr().err
    )


def test_statistics_and_help(talk, capsys):
    talk("/stats", "a", "/stats", "/help")
    output, errors = capsys.readouterr()
    assert "there is no reply yet" in errors
    assert "tokens" in output and "1.25" in output and "1 2" in output
    assert all(f"/{name}" in output for name in slash_commands.COMMANDS)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [BoughError, RuntimeError])
def test_failures_leave_a_sound_conversation(talk, parrot, kind, late, capsys):
    parrot.failure = kind("late: it broke" if late else "it broke")
    chat = talk("a", "b")
    wanted = 4 if late else 0
    assert len(contents(chat)) == wanted
    assert all(each.stopped for each in chat.conversation.messages[1::2])
    errors = capsys.readouterr().err
    assert errors.count("error: ") == 2 and "it broke" in errors
    assert chat.code == 1


def test_a_failed_second_answer_keeps_the_first(talk, parrot, monkeypatch):
    monkeypatch.setattr(parrot, "check", lambda _: setattr(parrot, "failure", BoughError("no")))
    chat = talk("a", "/think on", "/regen")
    assert contents(chat) == ["a", f"a {parrot.asked[0][2]}"]


@pytest.mark.parametrize("line", ["/usr/bin/env is what?", " /help", "a /help", "/", "/1"])
def test_what_is_no_command_is_said(talk, line):
    assert contents(talk(line))[0] == line


def test_commands_that_do_not_exist(talk, parrot, capsys):
    chat = talk("/hlep", "/xyz")
    assert capsys.readouterr().err == (
        "error: there is no command /hlep\nhint: did you mean /help?\n"
        "error: there is no command /xyz\nhint: /help lists them\n"
    )
    assert parrot.asked == [] and chat.code == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/s", ["/system ", "/set ", "/save ", "/stats "]),
        ("/set t", ["temperature ", "top_p ", "top_k "]),
        ("/set top_p 0", []),
        ("/draft o", ["on ", "off "]),
        ("/load ta", None),
        ("/nothing x", []),
        ("hello /s", []),
    ],
)
def test_completion(text, found):
    assert slash_commands.complete(text) == found


@pytest.mark.parametrize(
    ("raisable", "hint"), [(True, "/undo, /clear, or a larger --max-ctx"), (False, "/undo or /clear")]
)
def test_what_helps_against_a_full_context(raisable, hint):
    assert _as_ours(PromptTooLong(9009, 8192, raisable=raisable)).hint == hint


def test_words_of_other_programs(talk, parrot, capsys):
    for word in ("/bye", "/quit", "exit", "QUIT", "/EXIT"):
        talk(word, "not reached")
    assert parrot.asked == []
    talk("/?")
    assert "Commands" in capsys.readouterr().out


def test_copy(talk, monkeypatch, capsys):
    """The terminal is asked to copy: the reply, or the last code in it; elsewhere it is an error."""
    talk("/copy", "hello", "/copy")
    errors = capsys.readouterr().err
    assert "there is no reply yet" in errors and "standard output is no terminal" in errors
    copied: list[str] = []
    monkeypatch.setattr(view, "copy", copied.append)
    code = "Look:\\\n```python\\\nx = 1\\\n```\\\n```\\\ny\\\n```"
    talk("hello", "/copy", "/copy code", code, "/copy code", settings=ChatSettings({"seed": 5}))
    assert copied == ["hello 5", "y\n"]
    assert "there is no code in the last reply" in capsys.readouterr().err


def test_what_a_terminal_is_sent_to_copy(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    view.copy("grün")
    assert capsys.readouterr().out == "\x1b]52;c;Z3LDvG4=\x07"
    with pytest.raises(UsageError, match="terminals copy about 75,000"):
        view.copy("x" * 80_000)


def test_another_model(talk, parrot, capsys):
    """A model that cannot be loaded leaves the present one; one that has no such settings loses them."""

    class Other(Parrot):
        name = "Other"

        def check(self, settings: ChatSettings) -> None:
            if settings.thinking is not None:
                raise UsageError("it does not think")

    def find(name: str | None) -> Callable[[], Parrot]:
        if name == "missing":
            raise UsageError("there is no such model")

        def load() -> Parrot:
            if name == "broken":
                raise BoughError("it is broken")
            return Other()

        return load

    chat = talk("/model missing")
    chat.models, chat.reload = find, lambda: parrot
    with pytest.raises(UsageError, match="no such model"):
        chat.switch("missing")
    with pytest.raises(BoughError, match="broken"):
        chat.switch("broken")
    assert chat.backend is parrot
    chat.settings.thinking = True
    chat.switch("other")
    assert chat.backend.name == "Other" and chat.settings.thinking is None
    assert "it does not think" in capsys.readouterr().err.lower()


def test_a_picture_goes_with_the_next_message(talk, parrot, tmp_path, capsys):
    data = encoded(quarters(), "PNG")
    (tmp_path / "a b.png").write_bytes(data)
    chat = talk(f"/image {tmp_path}/a b.png", "What is it?", "And now?")
    assert "a b.png, 48 x 32 pixels, goes with the next message" in capsys.readouterr().err
    image = {"type": "image", "image": ImageFile(data)}
    first = {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}
    assert parrot.asked[0][0] == [first] and parrot.asked[1][0][0] == first
    assert parrot.asked[1][0][-1]["content"] == "And now?" and not chat.images


def test_pictures_that_are_none(talk, parrot, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"hello")
    chat = talk(f"/image {tmp_path}/a.png", "/image", f"/image {tmp_path}/no.png")
    said = capsys.readouterr().err
    assert "a.png has 5 bytes that are no JPEG, PNG, WebP or GIF" in said
    assert "/image needs a path" in said and "cannot be read: No such file" in said and not chat.images
    (tmp_path / "a.png").write_bytes(encoded(quarters(), "PNG"))
    assert not talk(f"/image {tmp_path}/a.png", "/image none").images
    parrot.sees = False
    talk(f"/image {tmp_path}/a.png")
    assert "Parrot was loaded without its image encoder" in capsys.readouterr().err
