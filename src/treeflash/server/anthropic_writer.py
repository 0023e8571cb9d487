"""Anthropic messages: what goes out, as one object or as its stream of events."""

import json
from dataclasses import dataclass, field
from typing import Any

from treeflash.server import answers
from treeflash.server.answers import Answer, Part
from treeflash.server.failures import Failure
from treeflash.server.schemas import MessagesBody, Object
from treeflash.server.service import Service
from treeflash.server.sse import comment, event
from treeflash.session.requests import Finished, Progress, SessionEvent
from treeflash.session.worker import Job


@dataclass(slots=True)
class MessagesWriter:
    service: Service
    body: MessagesBody
    id: str
    answer: Answer = field(default_factory=Answer)
    _begun: bool = False
    _open: int | None = None  # the block that is being written

    def write(self, index: int, piece: SessionEvent) -> bytes:
        out = b""
        if not self._begun:
            out += self._begin(piece if isinstance(piece, Progress) else None)
        part, fresh = self.answer.add(piece)
        if part is not None and fresh:
            out += self._close() + self._start(part)
        if part is not None and (text := getattr(piece, "text", "")):
            delta = {
                "text": {"type": "text_delta", "text": text},
                "reasoning": {"type": "thinking_delta", "thinking": text},
                "call": {"type": "input_json_delta", "partial_json": text},
            }[part.kind]
            out += self._send("content_block_delta", index=self._open, delta=delta)
        if isinstance(piece, Finished):
            out += self._close()
            delta = {"stop_reason": _reason(piece), "stop_sequence": piece.stop_string}
            out += self._send("message_delta", delta=delta, usage=_usage(piece))
        return out

    def _begin(self, progress: Progress | None) -> bytes:
        self._begun = True
        total, cached = (progress.total, progress.cached) if progress else (0, 0)
        usage = {
            "input_tokens": total - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        head = self._message([], None, None, usage)
        return self._send("message_start", message=head) + self._send("ping")

    def _start(self, part: Part) -> bytes:
        self._open = len(self.answer.parts) - 1
        block = {
            "text": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "call": {"type": "tool_use", "id": part.id, "name": part.name, "input": {}},
        }[part.kind]
        return self._send("content_block_start", index=self._open, content_block=block)

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
        content = [_block(part) for part in self.answer.parts]
        finished = self.answer.finished
        if finished is None:
            return self._message(content, "end_turn", None, {"input_tokens": 0, "output_tokens": 0})
        return self._message(content, _reason(finished), finished.stop_string, _usage(finished))

    def _message(self, content: list[Object], reason: str | None, stop: str | None, usage: Object) -> Object:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model or self.service.model_name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _block(part: Part) -> Object:
    match part.kind:
        case "text":
            return {"type": "text", "text": part.text}
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.text)}


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
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_read_input_tokens": stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.generated_tokens,
        "speculation": answers.speculation(stats),
        **answers.approximate(stats),
    }
