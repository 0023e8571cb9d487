"""Anthropic messages: request bodies in, one object or a stream of events out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bough.errors import UsageError
from bough.server import options, outputs
from bough.server.failures import Failure, unfit
from bough.server.options import Thinking
from bough.server.schemas import MessagesBody, Object
from bough.server.service import Service, Writer
from bough.server.sse import comment, event
from bough.session.collected import OutputBlock
from bough.session.events import Finished, Progress, SessionEvent
from bough.session.requests import TextRequest
from bough.session.worker import Job


def to_request(body: MessagesBody, service: Service) -> TextRequest:
    options.reject_constraints(body.extras, "output_config.format")
    tools = tool_list(body.tools)
    choice = body.tool_choice or {}
    form, where = body.output_format, "output_format"
    if form is None:
        form, where = (body.output_config or {}).get("format"), "output_config.format"
    messages = to_messages(body)
    return TextRequest(
        messages=messages,
        tools=tools or None,
        tool_choice=options.tool_choice(_choice(choice), tools),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        **options.fields_of(
            body,
            service,
            "max_tokens",
            thinking=_thinking(body).otherwise(service.thinking),
            grammar=options.format_grammar(form, where),
        ),
        continue_final=options.continues(messages),
    )


def _thinking(body: MessagesBody) -> Thinking:
    thinking = body.thinking or {}
    budget = thinking.get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise unfit("thinking.budget_tokens", budget, "a number of tokens")
    effort = options.effort((body.output_config or {}).get("effort"), "output_config.effort")
    match thinking.get("type"):
        case "enabled":
            return Thinking(True, budget, effort.effort)
        case "disabled":
            return Thinking(on=False)
        case "adaptive" | None:
            # The template's default decides whether there is any; the effort only how much.
            return Thinking(None, effort=effort.effort)
    raise unfit("thinking.type", thinking.get("type"), "enabled, disabled or adaptive")


def tool_list(tools: list[Object] | None) -> list[dict[str, Any]]:
    """Return the client's own tools, without the types that a provider would run itself."""
    return [
        options.function_tool(tool, tool.get("input_schema"), f"tools[{index}]")
        for index, tool in enumerate(tools or ())
        if tool.get("type", "custom") == "custom" or "input_schema" in tool
    ]


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return options.chosen_name(choice.get("name"), "tool_choice.name")
    if kind not in (None, "auto", "none", "any"):
        raise unfit("tool_choice.type", kind, "auto, any, tool or none")
    return {None: "auto", "any": "required"}.get(kind, kind)


def to_messages(body: MessagesBody) -> list[Object]:
    messages: list[Object] = []
    if body.system:
        messages.append({"role": "system", "content": body.system})
    for index, message in enumerate(body.messages):
        messages += _split(message, f"messages[{index}]")
    return messages


def _split(message: Mapping[str, Any], where: str) -> list[Object]:
    """Split tool results off into messages of their own; the rest keeps its order."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: list[Object] = []
    parts: list[Any] = []
    calls: list[Object] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        match kind:
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "function": function})
            case "tool_result":
                called = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                results.append(called | {"content": _result(block, at)})
            case "thinking" if isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            case "thinking" | "redacted_thinking":
                pass
            case _:
                parts.append(block)
    if calls or thoughts or role == "assistant":
        turn: Object = {"role": role, "content": parts}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        return [*results, turn]
    return [*results, {"role": role, "content": parts}] if parts or not results else results


def _result(block: Mapping[str, Any], where: str) -> Any:
    content = block.get("content")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
        if "document" in kinds:
            at = f"{where}.content[{kinds.index('document')}].type"
            raise UsageError(f"{at} is 'document'; the model reads text and images", param=at)
        # References and other structured results go to the model as JSON.
        if "image" in kinds:
            content = [
                part if kind in ("text", "image") else _json_part(part)
                for kind, part in zip(kinds, content, strict=True)
            ]
        elif set(kinds) - {"text", None}:
            return _json_part(content)["text"]
    if block.get("is_error"):
        return [{"type": "text", "text": "The tool failed:\n"}, *_parts(content)]
    return content


def _json_part(value: Any) -> Object:
    return {"type": "text", "text": json.dumps(value, ensure_ascii=False, default=str)}


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]


@dataclass(slots=True)
class MessagesWriter(Writer[MessagesBody]):
    _started: bool = False
    _open: int | None = None  # index of the block being written

    def write(self, index: int, piece: SessionEvent) -> bytes:
        out = b""
        if not self._started:
            out += self._start_message(piece if isinstance(piece, Progress) else None)
        block, fresh = self.output.add(piece)
        if block is not None and fresh:
            out += self._close() + self._start_block(block)
        if block is not None and (text := getattr(piece, "text", "")):
            delta = {
                "text": {"type": "text_delta", "text": text},
                "reasoning": {"type": "thinking_delta", "thinking": text},
                "call": {"type": "input_json_delta", "partial_json": text},
            }[block.kind]
            out += self._send("content_block_delta", index=self._open, delta=delta)
        if isinstance(piece, Finished):
            out += self._close()
            delta = {"stop_reason": _reason(piece), "stop_sequence": piece.stop_string}
            out += self._send("message_delta", delta=delta, usage=_usage(piece))
        return out

    def _start_message(self, progress: Progress | None) -> bytes:
        self._started = True
        total, cached = (progress.total, progress.cached) if progress else (0, 0)
        usage = {
            "input_tokens": total - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        head = self._message([], None, None, usage)
        return self._send("message_start", message=head) + self._send("ping")

    def _start_block(self, block: OutputBlock) -> bytes:
        self._open = len(self.output.blocks) - 1
        content_block = {
            "text": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "call": {"type": "tool_use", "id": block.id, "name": block.name, "input": {}},
        }[block.kind]
        return self._send("content_block_start", index=self._open, content_block=content_block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        index, self._open = self._open, None
        return self._send("content_block_stop", index=index)

    def _send(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    def end(self) -> bytes:
        return self._send("message_stop")

    def keep_alive(self, job: Job) -> bytes:
        return comment(job) + self._send("ping")

    def failure(self, failure: Failure) -> bytes:
        return event(failure.anthropic(), "error")

    def result(self) -> Object:
        content = [_content_block(block) for block in self.output.blocks]
        finished = self.output.finished
        if finished is None:
            return self._message(content, "end_turn", None, {"input_tokens": 0, "output_tokens": 0})
        return self._message(content, _reason(finished), finished.stop_string, _usage(finished))

    def _message(self, content: list[Object], reason: str | None, stop: str | None, usage: Object) -> Object:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _content_block(block: OutputBlock) -> Object:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}


def _reason(finished: Finished) -> str:
    if finished.reason == "stop":
        return "end_turn" if finished.stop_string is None else "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(finished.reason, "end_turn")


def _usage(finished: Finished) -> Object:
    stats = finished.stats
    return {
        "input_tokens": stats.sent_tokens - stats.cached_tokens,
        "cache_read_input_tokens": stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.generated_tokens,
        "speculation": outputs.speculation(stats),
        **outputs.notes(stats),
    }
