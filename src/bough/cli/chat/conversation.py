"""A conversation, the settings of its replies, and the file that holds both."""

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.cli.values import unescape
from bough.config import EFFORTS
from bough.errors import UsageError
from bough.images.opening import ImageFile, ImageLimits
from bough.images.parts import with_data_urls, with_images

FORMAT = "bough-chat-1"
MAX_FILE = 64 << 20  # bytes; no conversation that fits in a context is longer
ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Option:
    kind: type[int] | type[float]
    low: float
    high: float
    help: str


OPTIONS: Mapping[str, Option] = {
    "temperature": Option(float, 0, 100, "0 takes the likeliest token each time"),
    "top_p": Option(float, 1e-6, 1, "sample from the likeliest tokens that add up to this"),
    "top_k": Option(int, 0, 1 << 20, "sample from this many tokens; 0: all"),
    "min_p": Option(float, 0, 1, "leave out tokens below this share of the likeliest"),
    "repetition_penalty": Option(float, 0.01, 100, "above 1: tokens that occurred become less likely"),
    "presence_penalty": Option(float, -100, 100, "subtracted from the logits of the answer's tokens"),
    "frequency_penalty": Option(float, -100, 100, "the same for each time that they occur in it"),
    "max_tokens": Option(int, 1, 1 << 30, "most tokens of a reply"),
    "seed": Option(int, 0, 2**64 - 1, "same seed, same text"),
}
STOP = "stop"
NAMES = (*OPTIONS, STOP)


@dataclass(slots=True)
class ChatSettings:
    """Settings of replies; those that are None or absent are left to the model or the server."""

    values: dict[str, float | int] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    thinking: bool | None = None
    thinking_budget: int | None = None
    effort: str | None = None  # of reasoning
    draft_budget: int | None = None  # 0: plain decoding

    def set(self, name: str, text: str) -> None:
        """Set one setting from text; `default` unsets it."""
        if name not in NAMES:
            raise UsageError(f"there is no setting {name!r}; there are {', '.join(NAMES)}", "/set")
        if text == "default":
            self.values.pop(name, None)
            self.stop = [] if name == STOP else self.stop
        elif name == STOP:
            self.stop.append(unescape(text))
        else:
            self.values[name] = _number(name, text)

    def shown(self, name: str) -> str:
        if name == STOP:
            return " ".join(map(repr, self.stop)) or "default"
        return f"{self.values[name]:g}" if name in self.values else "default"

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.values,
            "stop": self.stop,
            "thinking": self.thinking,
            "thinking_budget": self.thinking_budget,
            "effort": self.effort,
            "draft_budget": self.draft_budget,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ChatSettings":
        settings = cls()
        for name in OPTIONS:
            if values.get(name) is not None:
                settings.set(name, str(values[name]))
        stop = values.get("stop") or []
        if not isinstance(stop, list) or not all(isinstance(each, str) for each in stop):
            raise UsageError(f"stop is {stop!r}; needs a list of texts")
        settings.stop = list(stop)
        if isinstance(values.get("thinking"), bool):
            settings.thinking = values["thinking"]
        settings.thinking_budget = _whole(values, "thinking_budget", 1, 1 << 30)
        if values.get("effort") in EFFORTS:
            settings.effort = values["effort"]
        settings.draft_budget = _whole(values, "draft_budget", 0, 63)
        return settings


def _number(name: str, text: str) -> float | int:
    option = OPTIONS[name]
    try:
        value = option.kind(text)
    except ValueError:
        value = None
    if value is None or not option.low <= value <= option.high:
        kind = "a whole number" if option.kind is int else "a number"
        raise UsageError(f"{name} is {text!r}; needs {kind} from {option.low:g} to {option.high:g}")
    return value


def _whole(values: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = values.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise UsageError(f"{name} is {value!r}; needs a whole number from {low} to {high}")
    return value


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # user or assistant, which take turns
    content: str
    reasoning: str = ""
    stopped: bool = False  # by the user or an error, before its end
    images: tuple[ImageFile, ...] = ()  # before the text

    def as_dict(self) -> dict[str, Any]:
        extra = {"reasoning_content": self.reasoning, "stopped": self.stopped}
        [message] = with_data_urls([self.request()])
        return {**message} | {k: v for k, v in extra.items() if v}

    def request(self) -> dict[str, Any]:
        images = [{"type": "image", "image": each} for each in self.images]
        parts = [*images, {"type": "text", "text": self.content}]
        return {"role": self.role, "content": parts if images else self.content}


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    model: str = field(default="", compare=False)  # that wrote the replies, where a file says so

    def request(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [each.request() for each in self.messages]

    def undo(self) -> str | None:
        """Remove the last user message and its reply; return the message."""
        while self.messages:
            last = self.messages.pop()
            if last.role == "user":
                return last.content
        return None

    def take_reply(self) -> Message | None:
        if self.messages and self.messages[-1].role == "assistant":
            return self.messages.pop()
        return None


def save(path: Path, conversation: Conversation, settings: ChatSettings, *, model: str) -> None:
    """Write a conversation atomically; refuse to replace a file that is not one."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; needs the name of a file")
    if path.exists() and path.stat().st_size and not _is_ours(path):
        raise UsageError(f"{path} exists and is not a saved conversation", "choose another name")
    content = {
        "format": FORMAT,
        "model": model,
        "system": conversation.system,
        "settings": settings.as_dict(),
        "messages": [each.as_dict() for each in conversation.messages],
    }
    try:
        _replace(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _is_ours(path: Path) -> bool:
    try:
        load(path)
    except UsageError:
        return False
    return True


def load(path: Path) -> tuple[Conversation, ChatSettings]:
    """Read a conversation that `save` wrote, or any JSON with a list of user and assistant messages."""
    content = _read(path)
    if isinstance(content, list):
        content = {"messages": content}
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise UsageError(
            f"{path} is not a saved conversation: it has no list of messages", "/save writes one"
        )
    try:
        system = content.get("system")
        messages = content["messages"]
        if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
            system, messages = messages[0].get("content"), messages[1:]
        if system is not None and not isinstance(system, str):
            raise UsageError(f"system is {system!r}; needs a text")
        turns = [_message(each, index) for index, each in enumerate(messages)]
        settings = content.get("settings", {})
        model = content["model"] if isinstance(content.get("model"), str) else ""
        values = ChatSettings.from_dict(settings if isinstance(settings, dict) else {})
        return Conversation(system, turns, model), values
    except UsageError as error:
        raise UsageError(f"{path} is damaged: {error.message}") from None


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE:
            raise UsageError(
                f"{path} has {path.stat().st_size:,} bytes; no conversation has above {MAX_FILE:,}"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON text") from error


def _message(entry: Any, index: int) -> Message:
    if not isinstance(entry, dict) or entry.get("role") not in ROLES:
        role = entry.get("role") if isinstance(entry, dict) else entry
        raise UsageError(f"messages[{index}].role is {role!r}; needs user or assistant")
    content, images = _content(entry.get("content"), index)
    reasoning = entry.get("reasoning_content") or ""
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise UsageError(f"messages[{index}].content is {content!r}; needs a text")
    return Message(entry["role"], content, reasoning, entry.get("stopped") is True, images)


def _content(content: Any, index: int) -> tuple[Any, tuple[ImageFile, ...]]:
    """Return the text of a message, and its images where it has parts."""
    if not isinstance(content, list):
        return content, ()
    [message] = with_images([{"content": content}], ImageLimits(images=len(content)))
    texts = [part for part in message["content"] if not isinstance(part, dict) or "image" not in part]
    sound = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in texts)
    if not sound or len(texts) > 1:
        raise UsageError(f"messages[{index}].content is {texts!r}; needs a text and images")
    images = [part["image"] for part in message["content"] if isinstance(part, dict) and "image" in part]
    return "".join(part["text"] for part in texts), tuple(images)
