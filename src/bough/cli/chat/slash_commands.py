"""The slash commands of a chat."""

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from bough.cli import view
from bough.cli.chat import conversation
from bough.cli.chat.conversation import NAMES, OPTIONS, STOP
from bough.cli.chat.screen import on_terminal
from bough.config import EFFORTS
from bough.errors import UsageError
from bough.images.opening import ImageLimits, image_file, image_size

if TYPE_CHECKING:
    from bough.cli.chat.loop import Chat

LARGEST_FILE = 4 << 20  # bytes; a million tokens
COMMAND = re.compile(r"/([a-zA-Z?]+)(?:\s+(.*))?", re.DOTALL)
FENCED = re.compile(r"^(```+)[^\n`]*\n(.*?)^\1", re.DOTALL | re.MULTILINE)
ALIASES = {"bye": "exit", "quit": "exit", "?": "help"}  # of other programs


@dataclass(frozen=True, slots=True)
class SlashCommand:
    usage: str
    help: str
    run: Callable[["Chat", str], None]
    words: Sequence[str] = ()  # what may follow
    path: bool = False  # a file follows


def run(chat: "Chat", line: str) -> bool:
    """Run a command; return False if the line is a message."""
    match = COMMAND.fullmatch(line.strip())
    if match is None or not line.startswith("/"):
        return False
    name, argument = match[1].lower(), (match[2] or "").strip()
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        near = [f"did you mean /{each}?" for each in difflib.get_close_matches(name, COMMANDS, n=1)]
        raise UsageError(f"there is no command /{name}", near[0] if near else "/help lists them")
    COMMANDS[name].run(chat, argument)
    return True


def complete(text: str) -> Sequence[str] | None:
    """Return completions of the last word; None: a path is expected."""
    if not text.startswith("/"):
        return []
    name, space, rest = text[1:].partition(" ")
    if not space:
        return [f"/{each} " for each in COMMANDS if each.startswith(name)]
    command = COMMANDS.get(name)
    if command is None or " " in rest:
        return []
    return None if command.path else [f"{word} " for word in command.words if word.startswith(rest)]


def _help(chat: "Chat", argument: str) -> None:
    view.sections(
        "bough chat",
        {
            "Commands": [(each.usage, each.help) for each in COMMANDS.values()],
            "Keys": [
                ("Enter", "sends; with a backslash before it, or as Esc Enter, it begins a new line"),
                ("Tab", "completes commands, settings and paths"),
                ("Ctrl-C", "stops the reply and keeps the part that was generated"),
                ("Ctrl-D", "leaves"),
            ],
        },
    )


def _exit(chat: "Chat", argument: str) -> None:
    raise EOFError


def _clear(chat: "Chat", argument: str) -> None:
    chat.conversation.messages.clear()
    chat.attachments.clear()
    chat.images.clear()
    stays = " The system message stays." if chat.conversation.system else ""
    chat.screen.note(f"A new conversation.{stays}")


def _undo(chat: "Chat", argument: str) -> None:
    message = chat.conversation.undo()
    if message is None:
        raise UsageError("there is no message to remove")
    chat.screen.note(f"Removed: {_short(message)}")


def _system(chat: "Chat", argument: str) -> None:
    if not argument:
        system = chat.conversation.system
        chat.screen.note(f"System message: {system}" if system else "There is no system message.")
        return
    chat.conversation.system = None if argument == "none" else argument
    chat.screen.note("There is no system message now." if argument == "none" else "System message set.")


def _set(chat: "Chat", argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        defaults = chat.backend.defaults(chat.settings)
        rows = [(each, f"{_shown(chat, each, defaults):<10} {_about(each)}") for each in NAMES]
        view.sections(
            chat.backend.name,
            {"Settings": [*rows, ("think", _thinking(chat)), *_draft_row(chat)]},
        )
        return
    if not value.strip():
        raise UsageError(f"/set {name} needs a value", f"/set {name} default, or /set alone")
    chat.settings.set(name.replace("-", "_"), value.strip())
    chat.screen.note(f"{name} is {chat.settings.shown(name.replace('-', '_'))}.")


def _shown(chat: "Chat", name: str, defaults: Mapping[str, float]) -> str:
    is_default = name in defaults and name not in chat.settings.values
    return f"{defaults[name]:g}" if is_default else chat.settings.shown(name)


def _draft_row(chat: "Chat") -> list[tuple[str, str]]:
    try:
        chat.backend.check(replace(chat.settings, draft_budget=0))
    except UsageError:
        return []
    return [("draft", _draft_state(chat))]


def _about(name: str) -> str:
    return r"text that ends a reply; \n is a new line" if name == STOP else OPTIONS[name].help


def _think(chat: "Chat", argument: str) -> None:
    settings = chat.settings
    match argument:
        case "":
            chat.screen.note(f"Thinking is {_thinking(chat)}.")
            return
        case "on" | "off" | "default":
            switch = {"on": True, "off": False, "default": None}[argument]
            changed = replace(settings, thinking=switch, thinking_budget=None, effort=None)
        case effort if effort in EFFORTS:
            changed = replace(settings, thinking=True, thinking_budget=None, effort=effort)
        case _:
            budget = _count("/think", argument, 1, 1 << 30)
            changed = replace(settings, thinking=True, thinking_budget=budget, effort=None)
    chat.change(changed)
    chat.screen.note(f"Thinking is {_thinking(chat)}.")


def _thinking(chat: "Chat") -> str:
    switch, budget = chat.settings.thinking, chat.settings.thinking_budget
    if budget is not None:
        return f"on, for {budget:,} tokens at most"
    if chat.settings.effort is not None:
        return f"on, with {chat.settings.effort} effort"
    return "as the model has it" if switch is None else "on" if switch else "off"


def _draft(chat: "Chat", argument: str) -> None:
    settings = chat.settings
    match argument:
        case "":
            chat.screen.note(f"Speculation is {_draft_state(chat)}.")
            return
        case "on":
            changed = replace(settings, draft_budget=None)
        case "off":
            changed = replace(settings, draft_budget=0)
        case _:
            changed = replace(settings, draft_budget=_count("/draft", argument, 1, 63))
    chat.change(changed)
    again = "; /regen generates the last reply again, with the same seed" if chat.answered else ""
    chat.screen.note(f"Speculation is {_draft_state(chat)}{again}.")


def _draft_state(chat: "Chat") -> str:
    budget = chat.settings.draft_budget
    return "on" if budget is None else f"on, {budget} tokens in a tree at most" if budget else "off"


def _file(chat: "Chat", argument: str) -> None:
    if not argument:
        raise UsageError("/file needs a path", "/file notes.txt, then ask about it")
    path = _path(argument)
    text = _text(path)
    chat.attachments.append((path.name, text))
    chat.screen.note(f"{path.name}, {len(text):,} characters, goes with the next message.")


def _image(chat: "Chat", argument: str) -> None:
    if argument == "none":
        chat.images.clear()
        chat.screen.note("No picture goes with the next message.")
        return
    if not argument:
        raise UsageError("/image needs a path", "/image photo.jpg, then ask about it")
    if not chat.backend.sees:
        raise UsageError(
            f"{chat.backend.name} was loaded without its image encoder", "`mmproj` names its file"
        )
    path = _path(argument)
    file = image_file(path, where=path.name)
    width, height = image_size(file.data, ImageLimits(), where=path.name)
    chat.images.append(file)
    chat.screen.note(f"{path.name}, {width} x {height} pixels, goes with the next message.")


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder; needs a file")
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise UsageError(f"{path} has {view.amount(size)}; at most {view.amount(LARGEST_FILE)}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        reason = f"{path} is not text: byte {error.start} is not UTF-8"
        raise UsageError(reason, "/image sends a picture") from error
    return text


def _model(chat: "Chat", argument: str) -> None:
    if argument:
        chat.switch(argument)
    chat.screen.notice(f"{chat.backend.name} · {chat.backend.about}")


def _save(chat: "Chat", argument: str) -> None:
    path = _path(argument) if argument else chat.path or _unused_path()
    if path != chat.path and path.exists() and on_terminal() and not view.confirm(f"Replace {path}?"):
        raise UsageError(f"{path} was not replaced", "/save with another name")
    conversation.save(path, chat.conversation, chat.settings, model=chat.backend.name)
    chat.path = path
    chat.screen.note(f"{_messages(len(chat.conversation.messages))} saved in {path}.")


def _load(chat: "Chat", argument: str) -> None:
    if not argument:
        raise UsageError("/load needs a file name", "/load talk.json")
    chat.load(_path(argument))


def _stats(chat: "Chat", argument: str) -> None:
    if chat.ended is None:
        raise UsageError("there is no reply yet")
    rows = [
        (name.replace("_", " "), _value(value))
        for name, value in chat.ended.details.items()
        if name != "model" and value not in (None, [], {}) and not isinstance(value, Mapping)
    ]
    view.sections(chat.backend.name, {"Last reply": rows})


def _copy(chat: "Chat", argument: str) -> None:
    if not chat.answered:
        raise UsageError("there is no reply yet")
    if argument not in ("", "code"):
        raise UsageError(f"/copy is {argument!r}; needs nothing, or code")
    text = chat.conversation.messages[-1].content
    if argument == "code":
        blocks = FENCED.findall(text)
        if not blocks:
            raise UsageError("there is no code in the last reply", "/copy alone copies all of it")
        text = blocks[-1][1]
    view.copy(text)
    chat.screen.note(f"{len(text):,} characters copied, if the terminal lets programs copy.")


def _value(value: object) -> str:
    if isinstance(value, list):
        return (", " if isinstance(value[0], str) else " ").join(map(str, value))
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _count(name: str, text: str, low: int, high: int) -> int:
    if not re.fullmatch("[0-9]{1,10}", text) or not low <= int(text) <= high:
        raise UsageError(f"{name} is {text!r}; needs on, off, or a number from {low} to {high:,}")
    return int(text)


def _path(text: str) -> Path:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return Path(os.path.expanduser(text[1:-1] if quoted else text))


def _unused_path() -> Path:
    names = (f"chat-{date.today()}{f'-{number}' if number else ''}.json" for number in count())
    return next(path for path in map(Path, names) if not path.exists())


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


def _messages(count: int) -> str:
    return f"{count} message{'s' * (count != 1)}"


COMMANDS: Mapping[str, SlashCommand] = {
    "help": SlashCommand("/help", "this page", _help),
    "clear": SlashCommand("/clear", "begin a new conversation", _clear),
    "regen": SlashCommand("/regen", "answer the last message again", lambda chat, _: chat.regenerate()),
    "undo": SlashCommand("/undo", "remove the last message and its answer", _undo),
    "system": SlashCommand(
        "/system [TEXT|none]", "show or set the instructions before all messages", _system, ("none",)
    ),
    "set": SlashCommand("/set [NAME VALUE|default]", "show or change settings", _set, NAMES),
    "think": SlashCommand(
        "/think [on|off|EFFORT|N]",
        "reason before answering; with low, medium or high effort; for at most N tokens",
        _think,
        ("on", "off", "default", *EFFORTS),
    ),
    "draft": SlashCommand(
        "/draft [on|off|N]",
        "propose tokens, at most N in a tree; the text stays the same",
        _draft,
        ("on", "off"),
    ),
    "model": SlashCommand("/model [NAME]", "show the model, or go on with another one", _model),
    "file": SlashCommand("/file PATH", "send a text file with the next message", _file, path=True),
    "image": SlashCommand("/image PATH|none", "send a picture with the next message", _image, path=True),
    "save": SlashCommand("/save [PATH]", "write the conversation to a file", _save, path=True),
    "load": SlashCommand("/load PATH", "go on with a saved conversation", _load, path=True),
    "copy": SlashCommand(
        "/copy [code]", "copy the last reply, or the last code in it, to the clipboard", _copy, ("code",)
    ),
    "stats": SlashCommand("/stats", "statistics of the last reply", _stats),
    "exit": SlashCommand("/exit", "leave, like Ctrl-D and /bye", _exit),
}
