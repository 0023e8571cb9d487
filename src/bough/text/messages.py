"""Normalises conversations as real clients send them to what chat templates accept."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from bough.errors import UsageError
from bough.images.opening import ImageFile
from bough.images.parts import KINDS

Message = dict[str, Any]

# Names of roles in other APIs map to ours.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_PARTS = ("reasoning", "thinking", "redacted_thinking")
REASONING_FIELDS = ("reasoning_content", "reasoning")
REASONING_TEXTS = ("thinking", "reasoning", "text")  # of the parts
# One client begins its system prompt with a line that differs in every request: no two would share a prefix.
BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
THOUGHTS = re.compile(r"(?:\s*<think>.*?(?:</think>\n*|\Z))+", re.DOTALL)


def normalise(messages: Sequence[Mapping[str, Any]], *, opens_reasoning: bool = False) -> list[Message]:
    """Return at most one system message, at the start, and others with text contents, or parts with images.

    Tool arguments become objects, and reasoning is in one field. The template decides which reasoning to
    render again: within a round of tool calls, not of older turns. `opens_reasoning`: the template's prompt
    ends with <think>, so that an answer may hold only the second tag.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise UsageError(
            f"messages is of type {type(messages).__name__}; needs a list of messages", param="messages"
        )
    if not messages:
        raise UsageError("messages is empty; needs at least one message", param="messages")
    cleaned = [_clean(message, f"messages[{i}]", opens_reasoning) for i, message in enumerate(messages)]
    leading = next((i for i, message in enumerate(cleaned) if message["role"] != "system"), len(cleaned))
    head = [message["content"] for message in cleaned[:leading]]
    system = [{"role": "system", "content": "\n\n".join(filter(None, head))}] if head else []
    return system + [_system_as_user(message) for message in cleaned[leading:]]


def merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Merge neighbouring text messages of one role, for templates that require alternating roles."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        plain = message["role"] in ("user", "assistant") and "tool_calls" not in message
        if plain and last is not None and last["role"] == message["role"] and "tool_calls" not in last:
            merged[-1] = last | {"content": _joined(last["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _joined(first: str | list[Message], second: str | list[Message]) -> str | list[Message]:
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    return [*_parts(first), {"type": "text", "text": "\n\n"}, *_parts(second)]


def _parts(content: str | list[Message]) -> list[Message]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _clean(message: Any, where: str, opens_reasoning: bool) -> Message:
    if not isinstance(message, Mapping):
        raise UsageError(
            f"{where} is of type {type(message).__name__}; needs an object with role and content", param=where
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{where}.role is {role!r}; needs one of {', '.join(ROLES)}", param=f"{where}.role")
    role = ROLES[role]
    fields = {name: value for name, value in message.items() if value is not None}
    content = _content(message.get("content"), f"{where}.content", role)
    cleaned: Message = fields | {"role": role, "content": content}
    if role == "system":
        cleaned["content"] = BILLING_LINE.sub("", cleaned["content"])
    if role == "assistant":
        named = [cleaned.pop(name) for name in REASONING_FIELDS if name in cleaned]
        parts = [*named, _thinking_parts(message.get("content"))]
        rest = opens_reasoning and not any(parts)
        thought, cleaned["content"] = _split_reasoning(cleaned["content"], rest=rest)
        if reasoning := next((text for text in (*parts, thought) if isinstance(text, str) and text), None):
            cleaned["reasoning_content"] = reasoning
        calls = _tool_calls(fields, where)
        cleaned.pop("function_call", None)
        cleaned.pop("tool_calls", None)
        if calls:
            cleaned["tool_calls"] = calls
    return cleaned


def _content(content: Any, where: str, role: str) -> str | list[Message]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    is_list = isinstance(content, list | tuple)
    if role == "tool" and not (is_list and all(_has_type(part) for part in content)):
        return json.dumps(content, ensure_ascii=False, default=str)
    if not is_list:
        raise UsageError(
            f"{where} is of type {type(content).__name__}; needs a string or a list of parts", param=where
        )
    parts = [_part(part, f"{where}[{i}]", role) for i, part in enumerate(content)]
    if any(isinstance(part, ImageFile) for part in parts):
        # Neighbouring texts are one: together they may spell a control token.
        merged: list[Message] = []
        for is_text, run in groupby(parts, lambda part: isinstance(part, str)):
            if is_text:
                merged.append({"type": "text", "text": "".join(map(str, run))})
            else:
                merged += [{"type": "image", "image": part} for part in run]
        return merged
    texts = [part for part in parts if isinstance(part, str)]
    if role == "system":
        texts = [BILLING_LINE.sub("", text) for text in texts]
    # As Qwen3.5's own template joins them.
    return "".join(texts)


def _has_type(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("type"), str))


def _part(part: Any, where: str, role: str) -> str | ImageFile:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UsageError(
            f"{where} is of type {type(part).__name__}; needs an object with type and text", param=where
        )
    kind = part.get("type")
    if kind in REASONING_PARTS:
        return ""
    if isinstance(file := part.get("image"), ImageFile):
        if role not in ("user", "tool"):
            raise UsageError(
                f"{where} is an image in a message of the role {role}; needs one of user or tool", param=where
            )
        return file
    if kind in KINDS:
        raise UsageError(f"{where} is an image, and only text is rendered here", param=where)
    field = "refusal" if kind == "refusal" else "text"
    if field == "text" and kind not in TEXT_PARTS:
        raise UsageError(
            f"{where}.type is {kind!r}; needs one of {', '.join((*TEXT_PARTS, *KINDS))}",
            param=f"{where}.type",
        )
    if not isinstance(part.get(field), str):
        raise UsageError(f"{where}.{field} is {part.get(field)!r}; needs a string", param=f"{where}.{field}")
    return part[field]


def _thinking_parts(content: Any) -> str:
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    texts = [
        part.get(name) for part in parts if part.get("type") in REASONING_PARTS for name in REASONING_TEXTS
    ]
    return "\n".join(text for text in texts if isinstance(text, str))


def _split_reasoning(content: str, *, rest: bool) -> tuple[str, str]:
    """Return the reasoning at the start of a reply, in think tags or, with `rest`, before the second one."""
    if match := THOUGHTS.match(content):
        return re.sub("</?think>", "\n", match[0]).strip(), content[match.end() :]
    thought, tag, reply = content.partition("</think>")
    # Only a tag in a line of its own: others are text about tags.
    line = thought.rpartition("\n")[2] + reply.partition("\n")[0]
    if rest and tag and not line.strip() and "<think>" not in thought:
        return thought.strip(), reply.lstrip("\n")
    return "", content


def _tool_calls(fields: Mapping[str, Any], where: str) -> list[Message]:
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise UsageError(
            f"{where}.tool_calls is of type {type(calls).__name__}; needs a list", param=f"{where}.tool_calls"
        )
    if not calls and "function_call" in fields:
        calls = [{"function": fields["function_call"]}]
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise UsageError(
            f"{where}.function.name is {name!r}; needs the name of the called tool",
            param=f"{where}.function.name",
        )
    described = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function.get("arguments"))},
    }
    return described | ({"id": call["id"]} if call.get("id") else {})


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments as an object, which templates list; other values under one name."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = arguments
    else:
        value = {} if arguments is None else arguments
    return dict(value) if isinstance(value, Mapping) else {"arguments": value}


def _system_as_user(message: Message) -> Message:
    """Return a later system message as user text: moving it up would change the prompt before it."""
    if message["role"] != "system":
        return message
    return {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
