"""Request fields that several protocols share, as engine and session values."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bough.config import EFFORTS, SAMPLING
from bough.engine.sampler import SamplingParams
from bough.errors import UsageError
from bough.server.failures import unfit
from bough.server.schemas import AnswerBody, Object, SamplingBody
from bough.session.requests import CompressOptions
from bough.text.grammar import Grammar

if TYPE_CHECKING:
    from bough.server.service import Service

MAX_COUNT = 2**31 - 1  # of tokens; a larger number is no limit either
MAX_BIAS = 100  # as OpenAI limits it
MAX_STOP_IDS = 32
_SAMPLING = (*SAMPLING, "seed")


@dataclass(frozen=True, slots=True)
class Thinking:
    """None falls back to `otherwise`, then to the template's default, without a limit."""

    on: bool | None = None
    budget: int | None = None
    effort: str | None = None

    def otherwise(self, other: "Thinking") -> "Thinking":
        # An effort that is a number of tokens stands for a budget.
        says = self.budget is not None or (self.effort is not None and EFFORTS[self.effort] is not None)
        return Thinking(
            other.on if self.on is None else self.on,
            self.budget if says else other.budget,
            self.effort or other.effort,
        )

    def fields(self) -> dict[str, Any]:
        return {"thinking": self.on, "thinking_budget": self.budget, "effort": self.effort}


def fields_of(
    body: SamplingBody | AnswerBody,
    service: "Service",
    *limits: str,
    thinking: Thinking | None = None,
    grammar: Grammar | None = None,
    must_call: bool = False,
    logprobs: int | None = None,
) -> dict[str, Any]:
    """Return the fields of a TextRequest that protocols share.

    limits: fields of the most tokens. thinking None: a raw prompt. must_call: a tool, which ends the text.
    """
    fields, extension = body.__dict__, body.bough
    defaults = service.defaults(None if thinking is None else thinking.on, raw=thinking is None)
    vocabulary = service.session.tokenizer.vocab_size
    return {
        "max_tokens": token_limit(fields, *limits),
        "sampling": sampling(defaults, fields, logprobs=logprobs),
        "stop": stops(fields.get("stop") or fields.get("stop_sequences")),
        **_ends(fields, vocabulary, constrained=grammar is not None or must_call),
        **({} if thinking is None else thinking.fields()),
        "break_loops": extension is None or extension.break_loops,
        "grammar": grammar,
        "draft_budget": extension.budget if extension else None,
        "compress": compression(fields),
    }


def sampling(
    defaults: SamplingParams, fields: Mapping[str, Any], *, logprobs: int | None = None
) -> SamplingParams:
    values = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    repeat = fields.get("repeat_penalty")
    if repeat is not None and values.setdefault("repetition_penalty", repeat) != repeat:
        other = values["repetition_penalty"]
        raise UsageError(
            f"repeat_penalty is {repeat}, repetition_penalty {other}; needs one", param="repeat_penalty"
        )
    if "seed" in values:
        values["seed"] %= 2**64  # clients send any integer
    if values.get("top_k", 0) == -1:  # some clients' value for no limit
        values["top_k"] = 0
    if "top_k" in values:
        values["top_k"] = min(values["top_k"], MAX_COUNT)
    if values.get("top_p") == 0:  # only the likeliest token
        values["top_p"] = 1e-9
    biases = _biases(fields.get("logit_bias"))
    return defaults.changed(values | {"logit_bias": biases, "logprobs": logprobs})


def _biases(biases: Mapping[str, float] | None) -> dict[int, float]:
    wrong = [name for name in biases or {} if not re.fullmatch("[0-9]{1,9}", name)]
    if wrong:
        raise UsageError(f"logit_bias has the key {wrong[0]!r}; needs token ids", param="logit_bias")
    for name, value in (biases or {}).items():
        if not -MAX_BIAS <= value <= MAX_BIAS:
            text = f"logit_bias is {value} for the token {name}; needs -{MAX_BIAS} to {MAX_BIAS}"
            raise UsageError(text, param="logit_bias")
    return {int(name): value for name, value in (biases or {}).items()}


def continues(messages: Sequence[Mapping[str, Any]], value: bool | None = None) -> bool:
    """Return whether the answer continues the last message: by default if it is the assistant's text."""
    if value is not None:
        return value
    # A conversation of the assistant's message alone is left to the template, which may refuse it.
    return (
        len(messages) > 1 and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
    )


def choice_params(params: SamplingParams, count: int) -> list[SamplingParams]:
    first = params.seeded()
    assert first.seed is not None
    return [replace(first, seed=(first.seed + index) % 2**64) for index in range(count)]


def token_limit(fields: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of the named fields that is set; None: as many as fit."""
    for name in names:
        value = fields.get(name)
        if value is not None and value != -1:  # -1: some clients' value for no limit
            if value < 1:
                raise unfit(name, value, "at least 1")
            return min(value, MAX_COUNT)
    return None


def stops(texts: str | Sequence[str] | None) -> list[str]:
    return [text for text in ([texts] if isinstance(texts, str) else texts or []) if text]


def effort(value: Any, field: str) -> Thinking:
    if value is None:
        return Thinking()
    if value == "none":
        return Thinking(on=False)
    if not isinstance(value, str) or value not in EFFORTS:
        raise unfit(field, value, f"one of none, {', '.join(EFFORTS)}")
    return Thinking(True, effort=value)


def thinking_switch(fields: Mapping[str, Any]) -> Thinking:
    """Return what a chat request sets for reasoning, in any of the fields that can."""
    options = fields.get("chat_template_kwargs") or {}
    on = options.get("enable_thinking", fields.get("enable_thinking"))
    if on is not None and not isinstance(on, bool):
        raise unfit("chat_template_kwargs.enable_thinking", on, "true or false")
    budget = fields.get("thinking_budget")
    named = Thinking(on, budget if budget is None else min(budget, MAX_COUNT))
    return named.otherwise(effort(fields.get("reasoning_effort"), "reasoning_effort"))


def answer_grammar(fields: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that a chat or text completion asks for, in any server's dialect."""
    present = [name for name in _GRAMMARS if fields.get(name) is not None]
    grammars = [(name, grammar) for name in present if (grammar := _GRAMMARS[name](fields[name], name))]
    if len(grammars) > 1:
        names = " and ".join(name for name, _ in grammars)
        raise UsageError(f"{names} are both set; needs one of them", param=grammars[1][0])
    return grammars[0][1] if grammars else None


def format_grammar(form: Any, field: str) -> Grammar | None:
    """Return the grammar of `response_format` or a field like it; `json_schema` may nest the schema."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else form
    match kind:
        case "text":
            return None
        case "json_object":
            if isinstance(form, Mapping) and form.get("schema") is not None:
                return _json_grammar(form["schema"], f"{field}.schema")
            return Grammar("json_object", None, field)
        case "json_schema":
            form = form if isinstance(form, Mapping) else {}
            inner = form.get("json_schema", form)
            where = f"{field}.json_schema.schema" if "json_schema" in form else f"{field}.schema"
            return _json_grammar(inner.get("schema") if isinstance(inner, Mapping) else None, where)
        case "regex":
            return _regex_grammar(form.get("pattern"), f"{field}.pattern")
        case "grammar" | "lark" | "gbnf":
            return _text_grammar(form.get("grammar"), f"{field}.grammar")
    raise unfit(f"{field}.type", kind, "text, json_object, json_schema, regex or grammar")


def structured_grammar(form: Mapping[str, Any] | None, field: str) -> Grammar | None:
    """`structured_outputs`: exactly one of json, json_object, regex, choice, grammar."""
    kinds = {
        name: value
        for name, value in (form or {}).items()
        if value is not None and value is not False and name not in _STRUCTURED_IGNORED
    }
    if not kinds:
        return None
    if len(kinds) > 1:
        raise UsageError(f"{field} has {', '.join(kinds)}; needs one of them", param=field)
    [(name, value)] = kinds.items()
    if name not in _STRUCTURED:
        raise UsageError(f"{field} has {name!r}; needs one of json, regex, choice, grammar", param=field)
    return _STRUCTURED[name](value, f"{field}.{name}")


def _json_grammar(value: Any, field: str) -> Grammar:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{field} is not JSON: {error}", param=field) from error
    if not isinstance(schema, Mapping | bool):
        raise unfit(field, schema, "a JSON schema")
    if isinstance(schema, bool):  # true: any value
        schema = {} if schema else {"not": {}}
    return Grammar("json_schema", schema, field)


def _regex_grammar(value: Any, field: str) -> Grammar:
    return Grammar("regex", _text(value, field), field)


def _choice_grammar(value: Any, field: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise unfit(field, value, "a list of strings")
    return Grammar("regex", "|".join(re.escape(each) for each in value), field)


def _text_grammar(value: Any, field: str) -> Grammar:
    """Return a Lark grammar, or one in llama.cpp's GBNF, whose rules are written `name ::= ...`."""
    text = _text(value, field)
    is_lark = re.search(r"(?m)^\s*(%llguidance\b|\??start\s*:(?!:=))", text)
    return Grammar("gbnf" if "::=" in text and not is_lark else "lark", text, field)


# Fields that constrain the text, and how each is read.
_GRAMMARS: Mapping[str, Callable[[Any, str], Grammar | None]] = {
    "response_format": format_grammar,
    "structured_outputs": structured_grammar,
    "json_schema": _json_grammar,
    "grammar": _text_grammar,
    "guided_json": _json_grammar,
    "guided_choice": _choice_grammar,
    "guided_regex": _regex_grammar,
    "guided_grammar": _text_grammar,
}
_STRUCTURED: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _json_grammar,
    "json_object": lambda _value, field: Grammar("json_object", None, field),
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _text_grammar,
}
# Settings of vLLM that do not change which texts are valid here.
_STRUCTURED_IGNORED = ("disable_fallback", "disable_any_whitespace")
# Fields of other servers that change the text and are not supported: refused, never ignored.
_UNSUPPORTED = (
    *("allowed_token_ids", "bad_words", "grammar_lazy", "guided_whitespace_pattern", "image_data", "images"),
    *("include_stop_str_in_output", "logits_processors"),
)


def reject_unsupported(extras: Mapping[str, Any]) -> None:
    """Refuse fields outside the protocol that would change the text if they were supported."""
    for name in _UNSUPPORTED:
        if extras.get(name):
            raise UsageError(f"{name} is set; this server does not support it", param=name)


def reject_constraints(extras: Mapping[str, Any], instead: str) -> None:
    """Refuse another protocol's constraints on the text; `instead` is the field of this protocol."""
    reject_unsupported(extras)
    for name in (*_GRAMMARS, "stop_token_ids", "ignore_eos", "min_tokens", "continue_final_message"):
        if extras.get(name):
            hint = f"; use {instead}" if name in _GRAMMARS else ""
            raise UsageError(f"{name} is set, which is not a field of this route{hint}", param=name)


def compression(fields: Mapping[str, Any]) -> CompressOptions | None:
    """Return the request's own settings of compression: a switch, a mode, or an object."""
    value = fields.get("compress")
    if value is None:
        return None
    if isinstance(value, bool):
        value = {"mode": "on" if value else "off"}
    elif isinstance(value, str):
        value = {"mode": value}
    for name in value:
        if name not in ("mode", "above", "to", "query", "keep"):
            raise UsageError(
                f"compress has the key {name!r}; needs mode, above, to, query or keep",
                param=f"compress.{name}",
            )
    mode, query, keep = value.get("mode"), value.get("query", ""), value.get("keep", [])
    if mode not in (None, "off", "auto", "on"):
        raise unfit("compress.mode", mode, "off, auto or on")
    if not isinstance(query, str):
        raise unfit("compress.query", query, "a string")
    if not isinstance(keep, list) or not all(isinstance(each, str | int) for each in keep):
        raise unfit("compress.keep", keep, "a list of texts or numbers of messages")
    above, to = (_amount(value.get(name), f"compress.{name}") for name in ("above", "to"))
    return CompressOptions(mode, None if above is None else int(above), to, query, tuple(keep))


def _amount(value: Any, field: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 30:
        raise unfit(field, value, "a number above 0")
    return float(value)


def _ends(fields: Mapping[str, Any], vocabulary: int, *, constrained: bool) -> dict[str, Any]:
    """Return which tokens end the text; `constrained`: a grammar or a forced tool call does."""
    if (least := fields.get("min_tokens")) is not None and least != 0:
        raise UsageError(
            f"min_tokens is {least}; only 0 is supported",
            "ignore_eos generates max_tokens",
            param="min_tokens",
        )
    if fields.get("ignore_eos") and constrained:
        text = "ignore_eos is set together with a grammar or a forced tool call, which end the text"
        raise UsageError(text, param="ignore_eos")
    ids = frozenset(fields.get("stop_token_ids") or ())
    if len(ids) > MAX_STOP_IDS:
        text = f"stop_token_ids has {len(ids)} ids; needs at most {MAX_STOP_IDS}"
        raise UsageError(text, param="stop_token_ids")
    if wrong := [id for id in ids if not 0 <= id < vocabulary]:
        text = f"stop_token_ids has {wrong[0]}; the vocabulary has {vocabulary} tokens"
        raise UsageError(text, param="stop_token_ids")
    return {"stop_token_ids": ids, "ignore_eos": bool(fields.get("ignore_eos"))}


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise unfit(field, value, "a string")
    return value


def function_tool(tool: Mapping[str, Any], parameters: Any, field: str) -> dict[str, Any]:
    """Return a tool in the form that chat templates expect; parameters: its schema, or what stands for it."""
    if not isinstance(name := tool.get("name"), str) or not name:
        raise unfit(f"{field}.name", name, "the tool's name")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise unfit(f"{field}.parameters", parameters, "a JSON schema")
    if parameters and (kind := parameters.get("type", "object")) not in ("object", ["object"]):
        raise unfit(f"{field}.parameters.type", kind, "object: a tool has named arguments")
    function: Object = {"name": name, "parameters": parameters or {"type": "object", "properties": {}}}
    if isinstance(description := tool.get("description"), str):
        function = {"name": name, "description": description} | function
    return {"type": "function", "function": function | ({"strict": True} if tool.get("strict") else {})}


def allowed_tools(entries: Any, tools: Sequence[Mapping[str, Any]], field: str) -> frozenset[str] | None:
    """Return the names in the list of an `allowed_tools` choice."""
    if entries is None:
        return None
    names = {tool["function"]["name"] for tool in tools}
    if not isinstance(entries, list) or not entries:
        raise unfit(field, entries, "a list of tools")
    allowed: set[str] = set()
    for index, entry in enumerate(entries):
        inner = entry.get("function", entry) if isinstance(entry, Mapping) else {}
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str) or name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise UsageError(f"{field}[{index}] names {name!r}; tools has {known}", param=f"{field}[{index}]")
        allowed.add(name)
    return frozenset(allowed)


def chosen_name(name: Any, field: str) -> str:
    if not isinstance(name, str) or not name:
        raise unfit(field, name, "the name of a tool")
    return name


def tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return auto, none, required or a tool's name."""
    choice = "auto" if choice is None else choice
    if choice in ("auto", "none"):
        return choice
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" or choice in names:
        if not names:
            raise unfit("tool_choice", "required", "tools")
        return choice
    raise UsageError(
        f"tool_choice names {choice!r}; tools has {', '.join(names) or 'none'}", param="tool_choice"
    )
