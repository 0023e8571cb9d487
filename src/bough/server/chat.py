"""OpenAI chat completions: request bodies in, one object or a stream of chunks out."""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from bough.engine.sampler import TokenLogprob
from bough.engine.stats import RequestStats
from bough.errors import UsageError
from bough.server import options, outputs
from bough.server.failures import Failure, unfit
from bough.server.schemas import ChatBody, Object, SamplingBody, TemplateBody
from bough.server.service import Service, Writer
from bough.server.sse import DONE, event
from bough.session.collected import GeneratedOutput
from bough.session.events import (
    Finished,
    Progress,
    Reasoning,
    SessionEvent,
    Text,
    ToolArguments,
    ToolCall,
    TreeStep,
)
from bough.session.requests import TextRequest

MAX_TEMPLATE_VALUES = 10_000  # some 25 us each
# Template variables that other fields of the request set.
_RESERVED = (
    *("messages", "tools", "add_generation_prompt", "thinking", "effort", "boundaries", "continue_final"),
)

B = TypeVar("B", bound=SamplingBody)


def to_requests(body: ChatBody, service: Service) -> list[TextRequest]:
    """Return one request for each of the `n` choices."""
    _reject_unsupported(body)
    fields = body.__dict__
    thinking = options.thinking_switch(fields).otherwise(service.thinking)
    tools = tool_list(body.tools, "tools")
    template_options = dict(body.chat_template_kwargs or {})
    template_options.pop("enable_thinking", None)
    check_template_options(template_options)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    choice = options.tool_choice(_choice(body.tool_choice), tools)
    request = TextRequest(
        **options.fields_of(
            body,
            service,
            *("max_completion_tokens", "max_tokens", "n_predict"),
            thinking=thinking,
            grammar=options.answer_grammar(fields),
            must_call=choice not in ("auto", "none"),
            logprobs=logprobs,
        ),
        messages=body.messages,
        tools=tools or None,
        tool_choice=choice,
        allowed_tools=options.allowed_tools(
            _allowed(body.tool_choice).get("tools"), tools, "tool_choice.allowed_tools.tools"
        ),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        continue_final=continues(body),
        template_options=template_options,
        trees=bool(body.stream and body.bough and body.bough.trees),
    )
    return [replace(request, sampling=each) for each in options.choice_params(request.sampling, body.n or 1)]


def continues(body: ChatBody | TemplateBody) -> bool:
    if isinstance(body, TemplateBody) and not body.add_generation_prompt:
        return bool(body.continue_final_message)
    return options.continues(body.messages, body.continue_final_message)


def check_template_options(options: Mapping[str, Any]) -> None:
    pending: list[Any] = [options]
    for count in itertools.count():
        if not pending:
            break
        if count > MAX_TEMPLATE_VALUES:
            text = f"chat_template_kwargs has more than {MAX_TEMPLATE_VALUES} values"
            raise UsageError(text, param="chat_template_kwargs")
        value = pending.pop()
        pending += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for name in _RESERVED:
        if name in options:
            text = f"chat_template_kwargs has {name!r}; the request sets it elsewhere"
            raise UsageError(text, param="chat_template_kwargs")


def _reject_unsupported(body: ChatBody) -> None:
    options.reject_unsupported(body.extras)
    if body.audio is not None or "audio" in (body.modalities or ()):
        field = "audio" if body.audio is not None else "modalities"
        raise UsageError(f"{field} is set; the model reads text and images, and writes text", param=field)
    for field in ("functions", "function_call"):
        if getattr(body, field) is not None:
            text = f"{field} is no longer part of the protocol; use tools and tool_choice"
            raise UsageError(text, param=field)


def tool_list(tools: list[Object] | None, field: str) -> list[dict[str, Any]]:
    """Return the function tools, without the types that a provider would run itself."""
    entries = []
    for index, tool in enumerate(tools or ()):
        where = f"{field}[{index}]"
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise unfit(f"{where}.function", function, "an object with a name")
        entries.append(options.function_tool(function, function.get("parameters"), f"{where}.function"))
    return entries


def _choice(choice: str | Object | None) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    function = choice.get("function")
    if choice.get("type") == "function" and isinstance(function, Mapping):
        return options.chosen_name(function.get("name"), "tool_choice.function.name")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice).get("mode", "auto")
    raise unfit("tool_choice.type", choice.get("type"), "function, with the tool's name, or allowed_tools")


def _allowed(choice: str | Object | None) -> Mapping[str, Any]:
    inner = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


@dataclass(slots=True)
class ChoicesWriter(Writer[B]):
    """What OpenAI's chat and text completions have in common: several choices, in chunks or in one object."""

    created: int = field(default_factory=lambda: int(time.time()))
    outputs: dict[int, GeneratedOutput] = field(default_factory=dict)

    kind: ClassVar[str]  # `object` of the response
    chunk_kind: ClassVar[str]

    def choice(self, index: int, output: GeneratedOutput) -> Object:
        """Return a whole choice without its index and the reason of its end."""
        raise NotImplementedError

    def chunk(self, index: int, part: Object, finished: Finished | None = None, **extra: Any) -> bytes:
        """Return a chunk with a part of a choice. extra: its logprobs, and fields of the chunk."""
        logprobs, reason = extra.pop("logprobs", None), finished and finished.reason
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._usage_wanted else {}
        if finished is not None and self._timings_wanted:
            extra["timings"] = outputs.timings(finished.stats)
        return event(self._head(self.chunk_kind) | {"choices": [choice]} | usage | extra)

    def _head(self, kind: str) -> Object:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
        }

    @property
    def _timings_wanted(self) -> bool:
        return bool(self.body.timings or self.body.timings_per_token)

    @property
    def _usage_wanted(self) -> bool:
        return bool((self.body.stream_options or {}).get("include_usage"))

    @property
    def stats(self) -> list[RequestStats]:
        return [output.finished.stats for output in self.outputs.values() if output.finished is not None]

    def end(self) -> bytes:
        if not self._usage_wanted:
            return DONE
        usage = usage_of(self.stats, self.body.n or 1)
        return event(self._head(self.chunk_kind) | {"choices": [], "usage": usage}) + DONE

    def failure(self, failure: Failure) -> bytes:
        return event(failure.openai()) + DONE

    def result(self) -> Object:
        choices = []
        for index, output in sorted(self.outputs.items()):
            reason = output.finished.reason if output.finished else "stop"
            choices.append({"index": index, **self.choice(index, output), "finish_reason": reason})
        result = self._head(self.kind) | {"choices": choices, "usage": usage_of(self.stats, self.body.n or 1)}
        return result | ({"timings": outputs.timings(*self.stats)} if self._timings_wanted else {})


@dataclass(slots=True)
class ChatWriter(ChoicesWriter[ChatBody]):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def write(self, index: int, piece: SessionEvent) -> bytes:
        if isinstance(piece, Progress):
            return b""
        fresh = index not in self.outputs
        output = self.outputs.setdefault(index, GeneratedOutput())
        output.add(piece)
        # An empty string would start a text in clients before a tool call or reasoning.
        content = "" if isinstance(piece, Text | Finished) else None
        begin = self._delta(index, {"role": "assistant", "content": content}) if fresh else b""
        return begin + self._piece(index, piece)

    def _delta(self, index: int, delta: Object, finished: Finished | None = None, **extra: Any) -> bytes:
        return self.chunk(index, {"delta": delta}, finished, **extra)

    def _piece(self, index: int, piece: SessionEvent) -> bytes:
        match piece:
            case Text(text, logprobs):
                return self._delta(index, {"content": text}, logprobs=self._logprobs(logprobs))
            case Reasoning(text):
                return self._delta(index, {"reasoning_content": text})
            case ToolCall(at, id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": at, "id": id, "type": "function", "function": function}
                return self._delta(index, {"tool_calls": [call]})
            case ToolArguments(at, text):
                return self._delta(index, {"tool_calls": [{"index": at, "function": {"arguments": text}}]})
            case TreeStep():
                return self._delta(index, {}, bough={"tree": outputs.tree(piece)})
            case Finished():
                asked = self.body.bough is not None
                return self._delta(index, {}, piece, **self._extension(piece.stats) if asked else {})
        return b""

    def _extension(self, stats: RequestStats) -> Object:
        return {"bough": {"stats": outputs.statistics(stats)}}

    def result(self) -> Object:
        extension = self._extension(self.stats[-1]) if self.body.bough is not None else {}
        return ChoicesWriter.result(self) | extension

    def choice(self, index: int, output: GeneratedOutput) -> Object:
        message: Object = {"role": "assistant", "content": output.text or None, "refusal": None}
        if not output.calls:
            message["content"] = output.text
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for call in output.calls
            ]
        return {"message": message, "logprobs": self._logprobs(output.logprobs)}

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> Object | None:
        if logprobs is None or not self.body.logprobs:
            return None
        return {"content": outputs.logprobs(self.service.session.tokenizer, logprobs), "refusal": None}


def usage_of(stats: list[RequestStats], copies: int) -> Object:
    """Sum over all outputs of one request; a prompt is counted once for its `copies` outputs."""
    if not stats:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    prompts = stats[::copies]
    prompt = sum(each.sent_tokens for each in prompts)
    completion = sum(each.generated_tokens for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.reasoning_tokens for each in stats)},
        "speculation": outputs.speculation(*stats),
        **outputs.notes(*stats, copies=copies),
    }
