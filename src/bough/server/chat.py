"""OpenAI chat completions: request bodies in, one object or a stream of chunks out."""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bough.errors import UsageError
from bough.server import options, outputs
from bough.server.failures import Failure
from bough.server.schemas import ChatBody, Object, TemplateBody
from bough.server.service import Service
from bough.server.sse import DONE, comment, event
from bough.session.collected import GeneratedOutput
from bough.session.requests import (
    Finished,
    Progress,
    Reasoning,
    SessionEvent,
    Text,
    TextRequest,
    TokenLogprob,
    ToolArguments,
    ToolCall,
    TreeStep,
)
from bough.session.worker import Job

MAX_TEMPLATE_VALUES = 10_000  # some 25 us each
# Template variables that other fields of the request set.
_RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "thinking",
    "effort",
    "boundaries",
    "continue_final",
)


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
    grammar = options.answer_grammar(fields)
    choice = options.tool_choice(_choice(body.tool_choice), tools)
    constrained = grammar is not None or choice not in ("auto", "none")
    ends = options.ends(fields, service.session.tokenizer.vocab_size, constrained=constrained)
    request = TextRequest(
        messages=body.messages,
        tools=tools or None,
        tool_choice=choice,
        allowed_tools=options.allowed_tools(
            _allowed(body.tool_choice).get("tools"), tools, "tool_choice.allowed_tools.tools"
        ),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_tokens=options.token_limit(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        sampling=options.sampling(service.defaults(thinking.on), fields, logprobs=logprobs),
        stop=options.stops(body.stop),
        stop_token_ids=ends.stop_token_ids,
        ignore_eos=ends.ignore_eos,
        **thinking.fields(body.bough),
        grammar=grammar,
        continue_final=continues(body),
        template_options=template_options,
        draft_budget=body.bough.budget if body.bough else None,
        compress=options.compression(fields),
        trees=bool(body.stream and body.bough and body.bough.trees),
    )
    return [replace(request, sampling=each) for each in options.choice_params(request.sampling, body.n or 1)]


def continues(body: ChatBody | TemplateBody) -> bool:
    """Return whether the answer continues the last message."""
    if isinstance(body, TemplateBody) and not body.add_generation_prompt:
        return bool(body.continue_final_message)
    return options.continues(body.messages, body.continue_final_message)


def check_template_options(options: Mapping[str, Any]) -> None:
    pending: list[Any] = [options]
    for count in itertools.count():
        if not pending:
            break
        if count > MAX_TEMPLATE_VALUES:
            raise UsageError(
                f"chat_template_kwargs has more than {MAX_TEMPLATE_VALUES} values",
                param="chat_template_kwargs",
            )
        value = pending.pop()
        pending += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for name in _RESERVED:
        if name in options:
            raise UsageError(
                f"chat_template_kwargs has {name!r}; the request sets it elsewhere",
                param="chat_template_kwargs",
            )


def _reject_unsupported(body: ChatBody) -> None:
    options.reject_unsupported(body.extras)
    if body.audio is not None or "audio" in (body.modalities or ()):
        field = "audio" if body.audio is not None else "modalities"
        raise UsageError(f"{field} is set; the model reads text and images, and writes text", param=field)
    for field in ("functions", "function_call"):
        if getattr(body, field) is not None:
            raise UsageError(
                f"{field} is no longer part of the protocol; use tools and tool_choice", param=field
            )


def tool_list(tools: list[Object] | None, field: str) -> list[dict[str, Any]]:
    """Return the function tools, without the types that a provider would run itself."""
    entries = []
    for index, tool in enumerate(tools or ()):
        where = f"{field}[{index}]"
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise UsageError(
                f"{where}.function is {function!r}; needs an object with a name", param=f"{where}.function"
            )
        entries.append(
            options.function_tool(
                function.get("name"),
                function.get("description"),
                function.get("parameters"),
                function.get("strict"),
                field=f"{where}.function",
            )
        )
    return entries


def _choice(choice: str | Object | None) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    function = choice.get("function")
    if choice.get("type") == "function" and isinstance(function, Mapping):
        return options.chosen_name(function.get("name"), "tool_choice.function.name")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice).get("mode", "auto")
    raise UsageError(
        f"tool_choice.type is {choice.get('type')!r}; needs function, with the tool's name, or allowed_tools",
        param="tool_choice.type",
    )


def _allowed(choice: str | Object | None) -> Mapping[str, Any]:
    """Return the mode and the tools of an `allowed_tools` choice."""
    inner = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


@dataclass(slots=True)
class ChatWriter:
    service: Service
    body: ChatBody
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    outputs: dict[int, GeneratedOutput] = field(default_factory=dict)

    @property
    def model(self) -> str:
        return self.body.model or self.service.model_name

    def write(self, index: int, piece: SessionEvent) -> bytes:
        if isinstance(piece, Progress):
            return b""
        fresh = index not in self.outputs
        output = self.outputs.setdefault(index, GeneratedOutput())
        output.add(piece)
        # An empty string would start a text in clients before a tool call or reasoning.
        content = "" if isinstance(piece, Text | Finished) else None
        begin = self._chunk(index, {"role": "assistant", "content": content}) if fresh else b""
        return begin + self._delta(index, piece)

    def _delta(self, index: int, piece: SessionEvent) -> bytes:
        match piece:
            case Text(text, logprobs):
                return self._chunk(index, {"content": text}, logprobs=self._logprobs(logprobs))
            case Reasoning(text):
                return self._chunk(index, {"reasoning_content": text})
            case ToolCall(at, id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": at, "id": id, "type": "function", "function": function}
                return self._chunk(index, {"tool_calls": [call]})
            case ToolArguments(at, text):
                return self._chunk(index, {"tool_calls": [{"index": at, "function": {"arguments": text}}]})
            case TreeStep():
                return self._chunk(index, {}, extension={"tree": outputs.tree(piece)})
            case Finished():
                asked = self.body.bough is not None
                extension = {"stats": outputs.statistics(piece.stats)} if asked else None
                timings = outputs.timings(piece.stats) if self._timings_wanted else None
                return self._chunk(index, {}, reason=piece.reason, extension=extension, timings=timings)
        return b""

    def _chunk(
        self,
        index: int,
        delta: Object,
        *,
        reason: str | None = None,
        logprobs: Object | None = None,
        extension: Object | None = None,
        timings: Object | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._head("chat.completion.chunk") | {"choices": [choice]}
        if self._usage_wanted:
            chunk["usage"] = None
        if extension is not None:
            chunk["bough"] = extension
        if timings is not None:
            chunk["timings"] = timings
        return event(chunk)

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

    def end(self) -> bytes:
        if not self._usage_wanted:
            return DONE
        usage = usage_of(list(self.outputs.values()), self.body.n or 1)
        return event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage}) + DONE

    def keep_alive(self, job: Job) -> bytes:
        return comment(job)

    def failure(self, failure: Failure) -> bytes:
        return event(failure.openai()) + DONE

    def result(self) -> Object:
        choices = [self._choice_of(index, output) for index, output in sorted(self.outputs.items())]
        result = self._head("chat.completion") | {
            "choices": choices,
            "usage": usage_of(list(self.outputs.values()), self.body.n or 1),
        }
        stats = [output.finished.stats for output in self.outputs.values() if output.finished]
        if self.body.bough is not None:
            result["bough"] = {"stats": outputs.statistics(stats[-1])}
        if self._timings_wanted:
            result["timings"] = outputs.timings(*stats)
        return result

    def _choice_of(self, index: int, output: GeneratedOutput) -> Object:
        message: Object = {"role": "assistant", "content": output.text or None, "refusal": None}
        if not output.calls:
            message["content"] = output.text
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.text},
                }
                for call in output.calls
            ]
        logprobs = self._logprobs(output.logprobs) if self.body.logprobs else None
        reason = output.finished.reason if output.finished else "stop"
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> Object | None:
        if logprobs is None or not self.body.logprobs:
            return None
        token_bytes = self.service.session.tokenizer.token_bytes

        def entry(id: int, logprob: float) -> Object:
            raw = token_bytes(id)
            # JSON has no infinities.
            logprob = max(logprob, -9999.0)
            return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

        content = [
            entry(each.token, each.logprob) | {"top_logprobs": [entry(*pair) for pair in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}


def usage_of(generated: list[GeneratedOutput], copies: int) -> Object:
    """Sum over all outputs of one request; a prompt is counted once for its `copies` outputs."""
    stats = [output.finished.stats for output in generated if output.finished is not None]
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
        **outputs.loops(*stats),
        **outputs.approximate(*stats),
        **outputs.reused(*stats),
        **outputs.compression(*prompts),
    }
