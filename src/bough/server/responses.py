"""OpenAI responses, stateless: request bodies in, one object or a stream of events out."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bough.engine.sampler import TokenLogprob
from bough.errors import UsageError
from bough.server import options, outputs
from bough.server.failures import Failure, unfit
from bough.server.schemas import Object, ResponsesBody
from bough.server.service import Service, Writer
from bough.server.sse import comment, event
from bough.session.collected import OutputBlock
from bough.session.events import Finished, SessionEvent
from bough.session.requests import TextRequest
from bough.session.worker import Job

_REFUSED = {
    "previous_response_id": "the server stores nothing: send the whole conversation as input",
    "conversation": "the server stores nothing: send the whole conversation as input",
    "background": "the server stores nothing: stream the response instead",
    "prompt": "there are no stored prompts: send instructions and input",
}
# The argument that holds the input of a free-text tool.
FREE_TEXT = "input"
_FREE_TEXT_SCHEMA = {"type": "object", "properties": {FREE_TEXT: {"type": "string"}}, "required": [FREE_TEXT]}


def to_request(body: ResponsesBody, service: Service) -> TextRequest:
    for field_name, reason in _REFUSED.items():
        if getattr(body, field_name):
            raise UsageError(f"{field_name} is set; {reason}", param=field_name)
    options.reject_constraints(body.extras, "text.format")
    effort = options.effort((body.reasoning or {}).get("effort"), "reasoning.effort")
    tools = tool_list(body.tools)
    form = (body.text or {}).get("format")
    with_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    logprobs = (body.top_logprobs or 0) if with_logprobs else None
    return TextRequest(
        messages=to_messages(body),
        tools=tools or None,
        tool_choice=options.tool_choice(_choice(body.tool_choice), tools),
        allowed_tools=options.allowed_tools(_allowed(body.tool_choice), tools, "tool_choice.tools"),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        **options.fields_of(
            body,
            service,
            "max_output_tokens",
            thinking=effort.otherwise(service.thinking),
            grammar=options.format_grammar(form, "text.format"),
            logprobs=logprobs,
        ),
    )


def tool_list(tools: list[Object] | None) -> list[dict[str, Any]]:
    """Return functions and free-text tools, without the types that a provider would run itself."""
    entries = []
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        match tool.get("type"):
            case "function":
                entries.append(options.function_tool(tool, tool.get("parameters"), where))
            case "custom":
                entries.append(options.function_tool(tool, _FREE_TEXT_SCHEMA, where))
            case "namespace":
                entries += tool_list(_members(tool))
    return entries


def free_text_tools(tools: list[Object] | None) -> set[str]:
    alone = [tool["name"] for tool in tools or () if tool.get("type") == "custom"]
    return {*alone, *(name for group in _groups(tools) for name in free_text_tools(_members(group)))}


def namespaces(tools: list[Object] | None) -> dict[str, str]:
    """Return the namespace of each tool that the client put into one."""
    return {
        each["name"]: str(group.get("name"))
        for group in _groups(tools)
        for each in _members(group)
        if isinstance(each.get("name"), str)
    }


def _groups(tools: list[Object] | None) -> list[Object]:
    return [tool for tool in tools or () if tool.get("type") == "namespace"]


def _members(group: Object) -> list[Object]:
    members = group.get("tools")
    return [each for each in members if isinstance(each, dict)] if isinstance(members, list) else []


def _choice(choice: str | Object | None) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        inner = choice.get("function")  # as the chat protocol has it, which some clients send here
        name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
        return options.chosen_name(name, "tool_choice.name")
    if kind == "allowed_tools":
        return choice.get("mode", "auto")
    raise unfit("tool_choice.type", kind, "function, custom or allowed_tools")


def _allowed(choice: str | Object | None) -> Any:
    allows = isinstance(choice, Mapping) and choice.get("type") == "allowed_tools"
    return choice.get("tools") if allows else None


def to_messages(body: ResponsesBody) -> list[Object]:
    messages = _Messages()
    if body.instructions:
        messages.add({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.add({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            messages.item(item, f"input[{index}]")
    return messages.found


@dataclass(slots=True)
class _Messages:
    """Collects input items as messages: the items of one assistant turn become one message.

    A turn is reasoning, then text, then calls; each is optional.
    """

    found: list[Object] = field(default_factory=list)

    def add(self, message: Object) -> None:
        self.found.append(message)

    def item(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                content = item.get("content")
                parts = content if isinstance(content, list) else []
                texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
                turn = self._turn(fresh=True)
                # A turn may have several reasoning items.
                before = [turn["reasoning_content"]] if turn.get("reasoning_content") else []
                turn["reasoning_content"] = "\n".join(
                    [*before, *(text for text in texts if isinstance(text, str))]
                )
            case "function_call":
                self._call(item, item.get("arguments"), where)
            case "custom_tool_call":
                self._call(item, {FREE_TEXT: item.get("input")}, where)
            case "function_call_output" | "custom_tool_call_output":
                content = item.get("output")
                self.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "item_reference":
                text = f"{where}.type is 'item_reference'; the server stores nothing: send the item"
                raise UsageError(text, param=f"{where}.type")
            case None:
                raise unfit(f"{where}.type", None, "message, function_call or its output")
            # Other items are calls of tools that a provider ran: the text already has their results.

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        if item.get("role") != "assistant":
            return self.add({"role": item.get("role"), "content": item.get("content")})
        self._turn(fresh=True)["content"] = item.get("content")

    def _call(self, item: Mapping[str, Any], arguments: Any, where: str) -> None:
        if not isinstance(item.get("name"), str):
            raise unfit(f"{where}.name", item.get("name"), "the name of the called tool")
        call = {"id": item.get("call_id"), "function": {"name": item["name"], "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, *, fresh: bool = False) -> Object:
        """Return the last message if it is the assistant's, else a new one.

        `fresh` also starts a new one if the last has text or calls already.
        """
        last = self.found[-1] if self.found else {}
        complete = last.get("content") or last.get("tool_calls")
        if last.get("role") != "assistant" or (fresh and complete):
            self.add({"role": "assistant", "content": ""})
        return self.found[-1]


@dataclass(slots=True)
class ResponsesWriter(Writer[ResponsesBody]):
    created: int = field(default_factory=lambda: int(time.time()))
    _sequence: int = 0
    _started: bool = False
    _open: OutputBlock | None = None

    def write(self, index: int, piece: SessionEvent) -> bytes:
        out = b"" if self._started else self._start_response()
        before = self._open
        block, fresh = self.output.add(piece)
        if before is not None and (fresh or isinstance(piece, Finished)):
            out += self._close(before)
        if block is not None and fresh:
            out += self._add(block)
        if block is not None and (text := getattr(piece, "text", "")):
            out += self._delta(block, text, getattr(piece, "logprobs", None))
        if isinstance(piece, Finished):
            truncated = piece.reason == "length"
            kind = "response.incomplete" if truncated else "response.completed"
            out += self._send(kind, response=self.result())
        return out

    def _start_response(self) -> bytes:
        self._started = True
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._send(kind, response=response) for kind in kinds)

    def _add(self, block: OutputBlock) -> bytes:
        self._open = block
        item = self._item(block, done=False)
        out = self._send("response.output_item.added", **self._output_index(block), item=item)
        if block.kind == "text":
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            out += self._send("response.content_part.added", **self._content_ref(block), part=content)
        return out

    def _delta(self, block: OutputBlock, text: str, logprobs: list[TokenLogprob] | None) -> bytes:
        match block.kind:
            case "text":
                entries = self._logprobs(logprobs)
                return self._send(
                    "response.output_text.delta", **self._content_ref(block), delta=text, logprobs=entries
                )
            case "reasoning":
                return self._send("response.reasoning_text.delta", **self._content_ref(block), delta=text)
        if block.name in free_text_tools(self.body.tools):
            return b""  # sent when the arguments' JSON is complete
        return self._send("response.function_call_arguments.delta", **self._item_ref(block), delta=text)

    def _close(self, block: OutputBlock) -> bytes:
        self._open = None
        out = b""
        item = self._item(block, done=True)
        match block.kind:
            case "text":
                content = item["content"][0]
                text = {"text": block.text, "logprobs": content["logprobs"]}
                out += self._send("response.output_text.done", **self._content_ref(block), **text)
                out += self._send("response.content_part.done", **self._content_ref(block), part=content)
            case "reasoning":
                out += self._send("response.reasoning_text.done", **self._content_ref(block), text=block.text)
            case "call" if item["type"] == "custom_tool_call":
                kind, text = "response.custom_tool_call_input", item["input"]
                out += self._send(f"{kind}.delta", **self._item_ref(block), delta=text)
                out += self._send(f"{kind}.done", **self._item_ref(block), input=text)
            case "call":
                call = {"name": block.name, "arguments": block.text}
                out += self._send("response.function_call_arguments.done", **self._item_ref(block), **call)
        return out + self._send("response.output_item.done", **self._output_index(block), item=item)

    def _send(self, kind: str, **fields: Any) -> bytes:
        out = event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return out

    def _output_index(self, block: OutputBlock) -> Object:
        return {"output_index": next(i for i, each in enumerate(self.output.blocks) if each is block)}

    def _item_ref(self, block: OutputBlock) -> Object:
        return self._output_index(block) | {"item_id": self._item_id(block)}

    def _content_ref(self, block: OutputBlock) -> Object:
        return self._item_ref(block) | {"content_index": 0}

    def _item_id(self, block: OutputBlock) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}_{self._output_index(block)['output_index']}"

    def _item(self, block: OutputBlock, *, done: bool) -> Object:
        head = {"id": self._item_id(block), "status": "completed" if done else "in_progress"}
        match block.kind:
            case "text":
                content = {"type": "output_text", "text": block.text, "annotations": []}
                content |= {"logprobs": self._logprobs(block.logprobs)}
                return head | {"type": "message", "role": "assistant", "content": [content] if done else []}
            case "reasoning":
                content = {"type": "reasoning_text", "text": block.text}
                return head | {"type": "reasoning", "summary": [], "content": [content] if done else []}
        called = head | {"call_id": block.id, "name": block.name}
        if block.name in free_text_tools(self.body.tools):
            return called | {"type": "custom_tool_call", "input": _free_text(block.text) if done else ""}
        if (group := namespaces(self.body.tools).get(block.name)) is not None:
            called["namespace"] = group
        return called | {"type": "function_call", "arguments": block.text if done else ""}

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> list[Object]:
        return outputs.logprobs(self.service.session.tokenizer, logprobs or ())

    def keep_alive(self, job: Job) -> bytes:
        if not self._started:
            return comment(job) + self._start_response()
        # Some clients ignore comments and time out without events.
        progress = self._send("response.in_progress", response=self._response("in_progress", []))
        return comment(job) + progress

    def failure(self, failure: Failure) -> bytes:
        error = {"code": failure.code or "server_error", "message": failure.message}
        out = b"" if self._started else self._start_response()
        return out + self._send("response.failed", response=self._response("failed", []) | {"error": error})

    def result(self) -> Object:
        finished = self.output.finished
        truncated = finished is not None and finished.reason == "length"
        output = [self._item(block, done=True) for block in self.output.blocks]
        if truncated and output:
            output[-1]["status"] = "incomplete"
        response = self._response("incomplete" if truncated else "completed", output)
        if truncated:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if finished is not None:
            stats = finished.stats
            response["usage"] = {
                "input_tokens": stats.sent_tokens,
                "input_tokens_details": {"cached_tokens": stats.cached_tokens},
                "output_tokens": stats.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": stats.reasoning_tokens},
                "total_tokens": stats.sent_tokens + stats.generated_tokens,
                "speculation": outputs.speculation(stats),
                **outputs.notes(stats),
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
            "model": self.model,
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
