"""OpenAI responses: what goes out, as one object or as its stream of events."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treeflash.server import answers
from treeflash.server.answers import Answer, Part
from treeflash.server.failures import Failure
from treeflash.server.responses import FREE_TEXT, free_text_tools, namespaces
from treeflash.server.schemas import Object, ResponsesBody
from treeflash.server.service import Service
from treeflash.server.sse import comment, event
from treeflash.session.requests import Finished, SessionEvent, TokenLogprob
from treeflash.session.worker import Job


@dataclass(slots=True)
class ResponsesWriter:
    service: Service
    body: ResponsesBody
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    answer: Answer = field(default_factory=Answer)
    _sequence: int = 0
    _begun: bool = False
    _open: Part | None = None

    def write(self, index: int, piece: SessionEvent) -> bytes:
        out = b"" if self._begun else self._begin()
        before = self._open
        part, fresh = self.answer.add(piece)
        if before is not None and (fresh or isinstance(piece, Finished)):
            out += self._close(before)
        if part is not None and fresh:
            out += self._add(part)
        if part is not None and (text := getattr(piece, "text", "")):
            out += self._delta(part, text, getattr(piece, "logprobs", None))
        if isinstance(piece, Finished):
            cut = piece.reason == "length"
            out += self._send("response.incomplete" if cut else "response.completed", response=self.result())
        return out

    def _begin(self) -> bytes:
        self._begun = True
        response = self._response("in_progress", [])
        return self._send("response.created", response=response) + self._send(
            "response.in_progress", response=response
        )

    def _add(self, part: Part) -> bytes:
        self._open = part
        out = self._send("response.output_item.added", **self._place(part), item=self._item(part, done=False))
        if part.kind == "text":
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            out += self._send("response.content_part.added", **self._at(part), part=content)
        return out

    def _delta(self, part: Part, text: str, logprobs: list[TokenLogprob] | None) -> bytes:
        match part.kind:
            case "text":
                found = self._logprobs(logprobs)
                return self._send("response.output_text.delta", **self._at(part), delta=text, logprobs=found)
            case "reasoning":
                return self._send("response.reasoning_text.delta", **self._at(part), delta=text)
        if part.name in free_text_tools(self.body.tools):
            return b""  # its text is known when the arguments' JSON is whole
        return self._send("response.function_call_arguments.delta", **self._named(part), delta=text)

    def _close(self, part: Part) -> bytes:
        self._open = None
        out = b""
        item = self._item(part, done=True)
        match part.kind:
            case "text":
                content = item["content"][0]
                logprobs = content["logprobs"]
                out += self._send(
                    "response.output_text.done", **self._at(part), text=part.text, logprobs=logprobs
                )
                out += self._send("response.content_part.done", **self._at(part), part=content)
            case "reasoning":
                out += self._send("response.reasoning_text.done", **self._at(part), text=part.text)
            case "call" if item["type"] == "custom_tool_call":
                out += self._send(
                    "response.custom_tool_call_input.delta", **self._named(part), delta=item["input"]
                )
                out += self._send(
                    "response.custom_tool_call_input.done", **self._named(part), input=item["input"]
                )
            case "call":
                out += self._send(
                    "response.function_call_arguments.done",
                    **self._named(part),
                    name=part.name,
                    arguments=part.text,
                )
        return out + self._send("response.output_item.done", **self._place(part), item=item)

    def _send(self, kind: str, **fields: Any) -> bytes:
        out = event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return out

    def _place(self, part: Part) -> Object:
        return {"output_index": next(i for i, each in enumerate(self.answer.parts) if each is part)}

    def _named(self, part: Part) -> Object:
        return self._place(part) | {"item_id": self._identity(part)}

    def _at(self, part: Part) -> Object:
        return self._named(part) | {"content_index": 0}

    def _identity(self, part: Part) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[part.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}_{self._place(part)['output_index']}"

    def _item(self, part: Part, *, done: bool) -> Object:
        head = {"id": self._identity(part), "status": "completed" if done else "in_progress"}
        match part.kind:
            case "text":
                content = {
                    "type": "output_text",
                    "text": part.text,
                    "annotations": [],
                    "logprobs": self._logprobs(part.logprobs),
                }
                return head | {
                    "type": "message",
                    "role": "assistant",
                    "content": [content] if done else [],
                }
            case "reasoning":
                content = {"type": "reasoning_text", "text": part.text}
                return head | {"type": "reasoning", "summary": [], "content": [content] if done else []}
        called = head | {"call_id": part.id, "name": part.name}
        if part.name in free_text_tools(self.body.tools):
            return called | {"type": "custom_tool_call", "input": _free_text(part.text) if done else ""}
        if (group := namespaces(self.body.tools).get(part.name)) is not None:
            called["namespace"] = group
        return called | {"type": "function_call", "arguments": part.text if done else ""}

    def _logprobs(self, found: list[TokenLogprob] | None) -> list[Object]:
        token_bytes = self.service.session.tokenizer.token_bytes

        def entry(id: int, logprob: float) -> Object:
            raw = token_bytes(id)
            return {
                "token": raw.decode(errors="replace"),
                "logprob": max(logprob, -9999.0),
                "bytes": list(raw),
            }

        return [
            entry(each.token, each.logprob) | {"top_logprobs": [entry(*pair) for pair in each.top]}
            for each in found or ()
        ]

    def end(self) -> bytes:
        return b""

    def keep_alive(self, job: Job) -> bytes:
        if not self._begun:
            return comment(job) + self._begin()
        # Some clients count events only, and give up for want of them.
        progress = self._send("response.in_progress", response=self._response("in_progress", []))
        return comment(job) + progress

    def failure(self, failure: Failure) -> bytes:
        error = {"code": failure.code or "server_error", "message": failure.message}
        out = b"" if self._begun else self._begin()
        return out + self._send("response.failed", response=self._response("failed", []) | {"error": error})

    def result(self) -> Object:
        finished = self.answer.finished
        cut = finished is not None and finished.reason == "length"
        output = [self._item(part, done=True) for part in self.answer.parts]
        if cut and output:
            output[-1]["status"] = "incomplete"
        response = self._response("incomplete" if cut else "completed", output)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if finished is not None:
            stats = finished.stats
            response["usage"] = {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {"cached_tokens": stats.cached_tokens},
                "output_tokens": stats.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": stats.reasoning_tokens},
                "total_tokens": stats.prompt_tokens + stats.generated_tokens,
                "speculation": answers.speculation(stats),
                **answers.approximate(stats),
            }
        return response

    def _response(self, status: str, output: list[Object]) -> Object:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "model": body.model or self.service.model_name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "text": body.text or {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
        }


def _free_text(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(FREE_TEXT) if isinstance(value, Mapping) else None
    return text if isinstance(text, str) else arguments
