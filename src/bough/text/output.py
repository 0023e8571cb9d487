"""OutputParser: splits streamed output text into reasoning, content and tool calls.

Any split of the text gives the same deltas, joined. Text that turns out not to be a call is content.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bough.text import tools as tags
from bough.text.tools import Tool, is_string, json_text, parsed, typed

THINK, END_THINK = "<think>", "</think>"
_MAX_NAME = 256
_WHOLE_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)  # of JSON
_BEGINNINGS = (tags.OPEN, tags.FUNCTION)
_CERTAIN = len("<tool")  # of the opening tag; less may be other text


@dataclass(frozen=True, slots=True)
class Delta:
    """`index` counts calls from 0; `text` of a call is its name, of arguments a piece of their JSON."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    index: int = 0


class OutputParser:
    def __init__(
        self,
        *,
        reasoning: Literal["open", "possible", "none"] = "none",
        tools: Sequence[Tool] = (),
        either: bool = False,
    ):
        """`reasoning`: open where the prompt begins it, possible where the answer may begin with it.

        `either`: an answer that begins with text has no calls.
        """
        self._tools = {tool.name: tool for tool in tools}
        self._either = either
        self._state: Callable[[bool], bool] = {
            "open": self._reasoning,
            "possible": self._beginning,
            "none": self._content,
        }[reasoning]
        self._held = ""
        self._bare = reasoning == "open"  # drop the whitespace that follows
        self._out: list[Delta] = []
        self._tool = Tool("")
        self._key = ""
        self._keys: set[str] = set()  # of the current call's arguments so far
        self._repeated = False  # the current argument, which is dropped: its key has a value
        self.calls_begun = 0
        self.calls_done = 0

    @property
    def in_reasoning(self) -> bool:
        return self._state == self._reasoning

    def push(self, text: str) -> list[Delta]:
        self._held += text
        return self._take(final=False)

    def flush(self, *, whole: bool = True) -> list[Delta]:
        """Return what was held back at the end; not `whole`: the text was cut off, maybe within a call."""
        if not whole and self._state in (self._call, self._parameters, self._value, self._closing):
            return []  # a call that was cut off is no text
        if not whole and self._state == self._content and self._tools:
            self._drop_opening()
        if not whole and self._state == self._string:
            self._emit_value(json_text(self._held)[1:-1])
            self._held = ""
            return self._drain()
        return self._take(final=True)

    def _drop_opening(self) -> None:
        """Drop the beginning of an opening tag at the end of the held text."""
        start = _before(self._held, *_BEGINNINGS)
        if len(self._held) - start >= _CERTAIN:
            self._held = self._held[:start].rstrip()

    def _take(self, *, final: bool) -> list[Delta]:
        # A state returns whether the next state should process the rest.
        while self._state(final):
            pass
        return self._drain()

    def _drain(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _emit(self, kind: Literal["reasoning", "content", "call", "arguments"], text: str) -> None:
        if text:
            index = max(0, self.calls_begun - 1) if kind in ("call", "arguments") else 0
            self._out.append(Delta(kind, text, index))

    def _emit_value(self, text: str) -> None:
        if not self._repeated:
            self._emit("arguments", text)

    def _beginning(self, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._bare = text.removeprefix(THINK), True
            self._state = self._reasoning
        elif not final and THINK.startswith(text):
            return False
        else:
            self._state = self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        if not self._past_whitespace():
            return False
        before, tag, after = self._held.partition(END_THINK)
        if tag:
            self._emit("reasoning", before.rstrip())
            self._held, self._bare = after, True
            self._state = self._content
            return True
        self._emit("reasoning", self._ready(final, END_THINK))
        return False

    def _content(self, final: bool) -> bool:
        if not self._past_whitespace():
            return False
        if self._either and self._is_text(self._held.lstrip()):
            self._tools = {}
        if not self._tools:
            self._emit("content", self._held)
            self._held = ""
            return False
        start = min((at for tag in _BEGINNINGS if (at := self._held.find(tag)) >= 0), default=-1)
        if start < 0:
            self._emit("content", self._ready(final, *_BEGINNINGS))
            return False
        before = self._held[:start]
        self._emit("content", before.rstrip())
        # Whitespace before a call belongs to it, or to the content if it turns out not to be a call.
        self._held = self._held[len(before.rstrip()) :]
        self._state = self._call
        return True

    def _is_text(self, text: str) -> bool:
        """Return whether the answer is certainly text rather than calls."""
        begins = any(text.startswith(tag[: len(text)]) for tag in _BEGINNINGS)
        return bool(text) and not self.calls_begun and not begins

    def _call(self, final: bool) -> bool:
        held = self._held.lstrip()
        text = held.removeprefix(tags.OPEN).lstrip()
        if text.startswith("{"):
            return self._json_call(final)
        name, mark, rest = text.removeprefix(tags.FUNCTION).partition(">")
        if not text.startswith(tags.FUNCTION):
            valid = tags.FUNCTION.startswith(text)
        else:
            valid = len(name) <= _MAX_NAME and not set(name) & set("\n<") and bool(name or not mark)
            # Without the tag around it, which models forget, it is a call of a tool that there is, or text.
            valid &= held.startswith(tags.OPEN) or not mark or name.strip() in self._tools
        if not valid or (final and not mark):
            return self._no_call()
        if not mark:
            return False
        self._begin(name.strip())
        self._held = rest
        self._state = self._parameters
        return True

    def _parameters(self, final: bool) -> bool:
        text = self._held.lstrip()
        key, mark, rest = text.removeprefix(tags.PARAMETER).partition(">")
        if text.startswith(tags.PARAMETER) and "\n" not in key and len(key) <= _MAX_NAME:
            if not mark:
                return self._broken() if final else False
            self._key, self._held = key.strip(), rest
            self._repeated = self._key in self._keys
            self._emit_value(("{" if not self._keys else ", ") + json_text(self._key) + ": ")
            self._keys.add(self._key)
            self._state = self._value
            return True
        if text.startswith(tags.END_FUNCTION):
            self._held = text.removeprefix(tags.END_FUNCTION)
            self._end_arguments()
            self._state = self._closing
            return True
        if text.startswith(tags.CLOSE):
            self._end_arguments()
            self._held = text
            self._state = self._closing
            return True
        waiting = any(tag.startswith(text) for tag in (tags.PARAMETER, tags.END_FUNCTION, tags.CLOSE))
        return False if waiting and not final else self._broken()

    def _value(self, final: bool) -> bool:
        """Parse a complete argument that is not a string; strings are streamed."""
        schema = self._tool.schema(self._key)
        if is_string(schema):
            self._emit_value('"')
            self._state, self._bare = self._string, True
            return True
        end, after = _value_end(self._held, final)
        if after is None:
            return False
        text = self._held[:end].removeprefix("\n").removesuffix("\n")
        self._emit_value(json_text(typed(text, schema)))
        self._held = self._held[after:]
        self._state = self._parameters
        return True

    def _string(self, final: bool) -> bool:
        if self._bare and self._held:  # one line break belongs to the tag
            self._held, self._bare = self._held.removeprefix("\n"), False
        end, after = _value_end(self._held, final)
        text = self._held[:end]
        if after is not None:
            text = text.removesuffix("\n")
        self._emit_value(json_text(text)[1:-1])
        self._held = self._held[end if after is None else after :]
        if after is None:
            return False
        self._emit_value('"')
        self._bare = False
        self._state = self._parameters
        return True

    def _closing(self, final: bool) -> bool:
        """Parse the closing tag of a call, which may be missing."""
        text = self._held.lstrip()
        if not final and tags.CLOSE.startswith(text) and text != tags.CLOSE:
            return False
        self._held, self._bare = text.removeprefix(tags.CLOSE), True
        self.calls_done += 1
        self._state = self._content
        return True

    def _json_call(self, final: bool) -> bool:
        start = self._held.index(tags.OPEN) + len(tags.OPEN)
        end = self._held.find(tags.CLOSE, start)
        while end >= 0 or final:
            block = self._held[start : end if end >= 0 else len(self._held)]
            try:
                call = _json_object(parsed(block))
            except (ValueError, RecursionError):
                # A tag inside a string is text.
                if end >= 0 and '"' in _WHOLE_STRING.sub("", block):
                    end = self._held.find(tags.CLOSE, end + 1)
                    if end >= 0 or final:
                        continue
                    return False
                return self._no_call()
            if call is None:
                return self._no_call()
            self._begin(call[0])
            self._emit("arguments", call[1])
            self._held = self._held[end:] if end >= 0 else ""
            self._state = self._closing
            return True
        return False

    def _begin(self, name: str) -> None:
        self._tool = self._tools.get(name, Tool(name))
        self._keys = set()
        self.calls_begun += 1
        self._emit("call", name)

    def _end_arguments(self) -> None:
        self._emit("arguments", "}" if self._keys else "{}")

    def _no_call(self) -> bool:
        """Emit the tag and the whitespace before it as content."""
        text = self._held.lstrip()
        rest = text.removeprefix(tags.OPEN if text.startswith(tags.OPEN) else tags.FUNCTION)
        self._emit("content", self._held.removesuffix(rest))
        self._held = rest
        self._state = self._content
        return True

    def _broken(self) -> bool:
        """End the arguments of a malformed call here; the rest is content."""
        self._end_arguments()
        self.calls_done += 1
        self._bare = True
        self._state = self._content
        return True

    def _past_whitespace(self) -> bool:
        """Drop leading whitespace where required; return whether the text after it has begun."""
        if self._bare:
            self._held = self._held.lstrip()
            self._bare = not self._held
        return not self._bare

    def _ready(self, final: bool, *tags: str) -> str:
        """Return the text that certainly precedes the tags and whitespace before them; hold the rest."""
        count = len(self._held)
        if not final:
            count = _before(self._held, *tags)
            count = len(self._held[:count].rstrip())
        text, self._held = self._held[:count], self._held[count:]
        return text


def _before(text: str, *tags: str) -> int:
    """Return the index from which the end of `text` may begin any of `tags`."""
    for start in range(max(0, len(text) - max(map(len, tags)) + 1), len(text)):
        if any(tag.startswith(text[start:]) for tag in tags):
            return start
    return len(text)


def _value_end(text: str, final: bool) -> tuple[int, int | None]:
    """Return where an argument's text ends and the index after its tag, None if the tag is not complete yet.

    A closing tag counts only where the call can continue after it: the text itself may contain one.
    """
    followers = (tags.PARAMETER, tags.END_FUNCTION, tags.CLOSE)
    start = text.find(tags.END_PARAMETER)
    while start >= 0:
        after = start + len(tags.END_PARAMETER)
        rest = text[after:].lstrip()
        if rest.startswith(followers) or (final and not rest):
            return start, after
        if not final and any(follower.startswith(rest) for follower in followers):
            return _unbroken(text, start), None
        start = text.find(tags.END_PARAMETER, after)
    if final:
        return len(text), len(text)
    return _unbroken(text, _before(text, tags.END_PARAMETER)), None


def _unbroken(text: str, end: int) -> int:
    """Return `end`, or the index before the preceding line break, which would belong to the tag."""
    return end - 1 if text[:end].endswith("\n") else end


def _json_object(call: Any) -> tuple[str, str] | None:
    """Return name and arguments of a call in JSON, None where the value is not a call."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parsed(arguments or "{}")
    return (call["name"], json_text(arguments)) if isinstance(arguments, dict) else None
