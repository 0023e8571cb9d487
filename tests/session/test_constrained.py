"""Grammars, tools, reasoning budgets and stop strings on the embedded pair, identical with any tree.

The model was hardly trained on JSON and tools, so valid answers are due to the grammar.
"""

import json
import random
from functools import cache
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.sampler import SamplingParams
from bough.errors import UsageError
from bough.hub.catalog import named
from bough.session.events import Finished, Reasoning, Text, ToolArguments, ToolCall, TreeStep
from bough.session.loading import load_session
from bough.session.prompts import CLOSING, Prompts
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.text.grammar import Grammar
from bough.text.template import ChatTemplate
from tests.session.schemas import random_schema, random_tools
from tests.text.templates import QWEN35

GREEDY = SamplingParams(seed=1)
WARM = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.05, seed=5)
MESSAGES = [{"role": "user", "content": "Write a Python function that counts the vowels in a string."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", PERSON),
    "expression": Grammar("regex", r"(yes|no), because [a-z ]{10,40}\."),
    "lark": Grammar("lark", 'start: item (", " item)*\nitem: /[a-z]{2,5}/'),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                    "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "days", "units"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]


@cache
def session(kind: str, template: str | None = None) -> Session:
    """Return the session of this kind: plain, tree or controlled; `template` replaces its chat template."""
    if template is not None:
        made = session(kind)
        controls = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
        return Session(made.engine, made.tokenizer, ChatTemplate(template, controls=controls), made.plan)
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    speculation = {"plain": None, "tree": SpecConfig(adaptive=False), "controlled": SpecConfig()}[kind]
    draft = DraftConfig(pair.draft) if speculation else None
    config = EngineConfig(device="cpu", max_ctx=768, speculation=speculation, draft=draft)
    return load_session(pair.target, config)


class Output:
    def __init__(self, made: Session, **options: Any):
        request = {"messages": MESSAGES, "max_tokens": 64, "sampling": GREEDY, **options}
        self.events = list(made.generate(TextRequest(**request)))
        assert isinstance(self.events[-1], Finished)
        self.done = self.events[-1]
        self.text = "".join(event.text for event in self.events if isinstance(event, Text))
        self.reasoning = "".join(event.text for event in self.events if isinstance(event, Reasoning))
        self.calls = [
            (call.name, "".join(e.text for e in self.events if isinstance(e, ToolArguments) and e.index == i))
            for i, call in enumerate(event for event in self.events if isinstance(event, ToolCall))
        ]

    def key(self) -> tuple:
        return (
            self.done.tokens,
            self.done.reason,
            self.done.stop_string,
            self.text,
            self.reasoning,
            self.calls,
        )


def everywhere(template: str | None = None, **options: Any) -> Output:
    """Return the output, which is identical with and without trees."""
    plain = Output(session("plain", template), **options)
    assert Output(session("tree", template), **options).key() == plain.key()
    return plain


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_the_same_constrained_text_with_every_tree(name: str, sampling: SamplingParams) -> None:
    options = {"grammar": GRAMMARS[name], "sampling": sampling, "max_tokens": 40}
    answer = everywhere(**options)
    assert Output(session("controlled"), **options).key() == answer.key()
    if name == "schema":
        jsonschema.validate(json.loads(answer.text), PERSON)
        assert answer.done.reason == "stop"
    if name == "expression":
        assert answer.text.startswith(("yes, because ", "no, because ")) and answer.text.endswith(".")


def test_forced_tokens_are_proposed() -> None:
    found = Output(session("tree"), grammar=GRAMMARS["schema"])
    assert found.done.stats.acceptance_length > 1.5


def test_a_bias_cannot_break_a_grammar() -> None:
    yes = session("plain").tokenizer.encode("yes")[0]
    sampling = SamplingParams(logit_bias={yes: float("-inf")}, seed=1)
    only = everywhere(grammar=Grammar("regex", "yes"), sampling=sampling)
    assert only.text == "yes"


def fits_random_schemas(count: int) -> None:
    choose = random.Random(6)
    made = session("controlled")
    for case in range(count):
        schema = random_schema(choose)
        sampling = SamplingParams(temperature=choose.choice([0.0, 1.0, 1.5]), seed=case)
        grammar = Grammar("json_schema", schema)
        found = Output(made, grammar=grammar, sampling=sampling, max_tokens=300)
        assert found.done.reason == "stop", schema
        jsonschema.validate(json.loads(found.text), schema)


def test_answers_fit_random_schemas() -> None:
    fits_random_schemas(30)


@pytest.mark.slow
def test_answers_fit_two_hundred_random_schemas() -> None:
    fits_random_schemas(200)


def fits_random_schemas_beside_tools(count: int) -> None:
    choose = random.Random(7)
    made = session("controlled")
    tag = made.tokenizer.id_of("<tool_call>")
    kinds = {"call": 0, "text": 0}
    for case in range(count):
        schema, tools = random_schema(choose), random_tools(choose)
        parameters = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
        choice = choose.choice(["auto", "auto", "auto", "required", choose.choice(list(parameters))])
        sampling = SamplingParams(
            temperature=choose.choice([0.0, 1.0, 1.5]),
            logit_bias=choose.choice([{}, {tag: 60.0}]),
            seed=case,
        )
        found = Output(
            made,
            grammar=Grammar("json_schema", schema),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            sampling=sampling,
            max_tokens=400,
        )
        if found.calls:
            kinds["call"] += 1
            assert (found.done.reason, found.text, len(found.calls)) == ("tool_calls", "", 1), (schema, tools)
            name, arguments = found.calls[0]
            assert choice in ("auto", "required", name)
            jsonschema.validate(json.loads(arguments), parameters[name])
        else:
            kinds["text"] += 1
            assert (choice, found.done.reason) == ("auto", "stop"), (schema, tools)
            jsonschema.validate(json.loads(found.text), schema)
    assert min(kinds.values()) > count // 5


def test_answers_beside_tools_are_valid_calls_or_fit_the_schema() -> None:
    fits_random_schemas_beside_tools(25)


@pytest.mark.slow
def test_two_hundred_answers_beside_tools_are_valid_calls_or_fit_the_schema() -> None:
    fits_random_schemas_beside_tools(200)


def biased_to_call(amount: float) -> SamplingParams:
    tag = session("plain").tokenizer.id_of("<tool_call>")
    assert tag is not None
    return SamplingParams(logit_bias={tag: amount}, seed=1)


@pytest.mark.parametrize("template", [None, QWEN35], ids=["json", "xml"])
@pytest.mark.parametrize("thinking", [False, True])
def test_tools_beside_a_format(template: str | None, thinking: bool) -> None:
    options = {
        "tools": TOOLS[:1],
        "grammar": GRAMMARS["schema"],
        "parallel_tool_calls": False,
        "thinking": thinking,
        "thinking_budget": 4 if thinking else None,
        "max_tokens": 150,
    }
    called = everywhere(template, **options, sampling=biased_to_call(0.0 if thinking else 60.0))
    if not thinking:
        assert (called.done.reason, called.text, called.calls[0][0]) == ("tool_calls", "", "weather")
    answered = everywhere(template, **options, sampling=biased_to_call(-60.0))
    assert answered.done.reason == "stop" and not answered.calls
    jsonschema.validate(json.loads(answered.text), PERSON)
    forced = everywhere(template, **options, tool_choice="weather", sampling=biased_to_call(-60.0))
    assert (forced.done.reason, forced.text, forced.calls[0][0]) == ("tool_calls", "", "weather")


def test_text_of_a_format_that_spells_a_call_is_no_call() -> None:
    spelled = "<tool_call><function=clock></function></tool_call>"
    grammar = Grammar("json_schema", {"const": spelled})
    found = everywhere(tools=TOOLS, grammar=grammar, sampling=biased_to_call(-60.0))
    assert json.loads(found.text) == spelled and not found.calls


@pytest.mark.parametrize("template", [None, QWEN35], ids=["json", "xml"])
def test_a_call_that_the_limit_cuts_off_is_no_text(template: str | None) -> None:
    for limit in range(1, 30, 4):
        found = everywhere(template, tools=TOOLS, tool_choice="weather", thinking=False, max_tokens=limit)
        assert (found.done.reason, found.text) == ("length", ""), limit


def test_the_last_message_is_continued() -> None:
    made = session("plain")
    begun = [*MESSAGES, {"role": "assistant", "content": "def count_vowels(text"}]
    whole = made.tokenizer.decode(made.encode(TextRequest(messages=MESSAGES)), skip_special=False)
    ids = made.encode(TextRequest(messages=begun, continue_final=True))
    assert made.tokenizer.decode(ids, skip_special=False) == whole + "def count_vowels(text"
    found = everywhere(messages=begun, continue_final=True, max_tokens=8)
    raw = everywhere(messages=None, prompt=ids, max_tokens=8)
    assert found.done.tokens == raw.done.tokens


UNSUPPORTED = {"x": {"type": "array", "items": {"type": "null"}, "uniqueItems": True}}
LOOKAHEAD = {"x": {"type": "string", "pattern": "^(?=a)b"}}


@pytest.mark.parametrize("template", [None, QWEN35], ids=["json", "xml"])
@pytest.mark.parametrize(("properties", "keyword"), [(UNSUPPORTED, "uniqueItems"), (LOOKAHEAD, "pattern")])
def test_refusals_name_the_tool_and_the_keyword(
    template: str | None, properties: dict[str, Any], keyword: str
) -> None:
    function = {"name": "cook", "strict": True, "parameters": {"type": "object", "properties": properties}}
    tools = [*TOOLS, {"type": "function", "function": function}]
    with pytest.raises(UsageError, match=f"the tool 'cook' cannot be enforced: .*{keyword}") as caught:
        Output(session("plain", template), tools=tools)
    assert caught.value.param == "tools[2]" and "\n" not in caught.value.message
    loose = [{"type": "function", "function": function | {"strict": False}}]
    options = {"tools": loose, "tool_choice": "cook", "thinking": False, "max_tokens": 20}
    assert Output(session("plain", template), **options).text == ""


def test_a_checked_request_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = session("plain")
    checked = made.check(TextRequest(messages=MESSAGES, max_tokens=3, sampling=GREEDY))
    assert checked.encoded is not None and checked.encoded.ids == made.encode(checked)
    expected = Output(made, max_tokens=3).done.tokens
    monkeypatch.setattr(ChatTemplate, "render", None)
    done = list(made.generate(checked))[-1]
    assert isinstance(done, Finished) and done.tokens == expected


CALLS = {
    "json, any": (None, "required", WARM),
    "json, one": (None, "clock", GREEDY),
    "xml, any": (QWEN35, "required", GREEDY),
    "xml, one": (QWEN35, "weather", WARM),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_required_call_is_generated(case: str) -> None:
    template, choice, sampling = CALLS[case]
    options = {"tools": TOOLS, "tool_choice": choice, "sampling": sampling, "parallel_tool_calls": False}
    found = everywhere(template, thinking=False, max_tokens=120, **options)
    assert (found.done.reason, found.text, len(found.calls)) == ("tool_calls", "", 1)
    name, arguments = found.calls[0]
    assert choice in ("required", name)
    if name == "weather":
        found_arguments = json.loads(arguments)
        assert found_arguments.keys() == {"city", "days", "units"}
        assert len(found_arguments["city"]) <= 12 and found_arguments["days"] in range(1, 8)
        assert found_arguments["units"] in ("celsius", "fahrenheit")
    ids = [event.id for event in found.events if isinstance(event, ToolCall)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("template", [None, QWEN35], ids=["json", "xml"])
def test_calls_of_strict_tools_match_their_schema(template: str | None) -> None:
    tag = session("plain").tokenizer.id_of("<tool_call>")
    sampling = SamplingParams(temperature=1.0, logit_bias={tag: 60.0}, seed=3)
    options = {"tools": TOOLS[:1], "parallel_tool_calls": False, "sampling": sampling, "thinking": False}
    found = everywhere(template, max_tokens=120, **options)
    assert found.done.reason == "tool_calls"
    assert json.loads(found.calls[0][1]).keys() == {"city", "days", "units"}


def test_parallel_calls() -> None:
    found = everywhere(tools=TOOLS[1:], tool_choice="required", max_tokens=60, sampling=WARM)
    assert len(found.calls) >= 1 and all(name == "clock" for name, _ in found.calls)


@pytest.mark.parametrize("tool", ["weather", "clock"])
def test_reasoning_before_a_call_is_cached(tool: str) -> None:
    made = session("tree", QWEN35)
    # Reasoning that is a plain word: random tokens would be encoded differently when they are sent back.
    word = SamplingParams(logit_bias={made.tokenizer.encode("Yes")[0]: 60.0}, seed=1)
    tools = {"tools": TOOLS, "tool_choice": tool, "parallel_tool_calls": False}
    first = Output(made, thinking=True, thinking_budget=1, sampling=word, max_tokens=150, **tools)
    call = {"id": "call_1", "function": {"name": tool, "arguments": first.calls[0][1]}}
    turn = {"role": "assistant", "content": "", "reasoning_content": first.reasoning, "tool_calls": [call]}
    messages = [*MESSAGES, turn, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    second = Output(made, messages=messages, thinking=True, tools=TOOLS, max_tokens=2)
    # All but the last token, after which no forward pass has run.
    assert second.done.stats.cached_tokens == first.done.stats.prompt_tokens + len(first.done.tokens) - 1
    assert first.reasoning.startswith("Yes")


def test_no_calls_with_tool_choice_none() -> None:
    made = session("plain")
    without = made.encode(TextRequest(messages=MESSAGES))
    assert made.encode(TextRequest(messages=MESSAGES, tools=TOOLS, tool_choice="none")) == without
    assert made.encode(TextRequest(messages=MESSAGES, tools=TOOLS)) != without


@pytest.mark.parametrize("budget", [0, 7])
@pytest.mark.parametrize("grammar", [None, GRAMMARS["expression"]], ids=["free", "grammar"])
def test_reasoning_ends_at_its_budget(budget: int, grammar: Grammar | None) -> None:
    found = everywhere(thinking=True, thinking_budget=budget, grammar=grammar, max_tokens=50)
    closing = len(session("plain").tokenizer.encode(CLOSING)) + 1
    assert found.done.stats.reasoning_tokens == budget + closing
    assert found.reasoning.endswith(CLOSING.strip())
    assert found.text and "</think>" not in found.reasoning + found.text
    if grammar is not None:
        assert found.text.startswith(("yes, because ", "no, because "))


def test_an_effort_is_a_budget_where_the_template_has_no_word_for_it() -> None:
    prompts = Prompts(session("plain").tokenizer, ChatTemplate(QWEN35), break_loops=False)
    worded = Prompts(session("plain").tokenizer, ChatTemplate(QWEN35 + "{#- reasoning_effort 'low' #}"))

    def limit(prompts: Prompts, **options: Any) -> int | None:
        request = TextRequest(messages=MESSAGES, thinking=True, **options)
        made = prompts.constraint(request, prompts.encode(request))
        return None if made is None else made.spec.budget

    assert limit(prompts, effort="low") == 2048 and limit(prompts, effort="high") is None
    assert limit(prompts, effort="low", thinking_budget=5) == 5
    assert limit(worded, effort="minimal") is None and limit(worded, effort="medium") == 8192


def test_the_grammar_follows_reasoning_that_would_end_the_text() -> None:
    ends = {token: 50.0 for token in session("plain").tokenizer.stop_ids}
    sampling = SamplingParams(logit_bias=ends, seed=1)
    found = everywhere(
        thinking=True, thinking_budget=4, grammar=Grammar("regex", "yes|no"), sampling=sampling
    )
    assert found.text in ("yes", "no")


def test_stop_strings_end_the_answer_and_are_reported() -> None:
    whole = everywhere()
    for stop in ("vowels", whole.text[20:23]):
        found = everywhere(stop=["never there", stop])
        assert found.text == whole.text[: whole.text.index(stop)]
        assert (found.done.reason, found.done.stop_string) == ("stop", stop)


def test_trees_are_reported_on_request() -> None:
    found = Output(session("tree"), trees=True, max_tokens=30)
    trees = [event for event in found.events if isinstance(event, TreeStep)]
    assert len(trees) == found.done.stats.steps
    for tree in trees:
        assert len(tree.tokens) == len(tree.parents) and tree.parents[0] == -1
        assert all(parent < row for row, parent in enumerate(tree.parents))
        assert all(tree.parents[b] == a for a, b in pairwise(tree.accepted))
        assert 0 <= tree.draft_ms <= tree.step_ms
    # Without the first token, which the prompt gives, and the last, which no tree has confirmed.
    shown = "".join(tree.tokens[row] for tree in trees for row in tree.accepted)
    assert found.text.startswith(shown[: len(found.text)]) and len(shown) > 20
    assert not any(isinstance(event, TreeStep) for event in Output(session("tree"), max_tokens=5).events)


def test_a_request_can_limit_its_trees() -> None:
    for budget, most in ((0, 1), (3, 4), (1000, 23)):
        found = Output(session("tree"), draft_budget=budget, trees=True, max_tokens=30)
        rows = [len(event.tokens) for event in found.events if isinstance(event, TreeStep)]
        assert max(rows) == most
    assert found.key() == everywhere(max_tokens=30).key()


def test_without_a_limit_the_context_is_the_limit() -> None:
    made = session("plain")
    prompt = (made.tokenizer.encode("1 2 3 4 5 6 7 8 9 10 11 12 ") * 30)[:740]
    found = Output(made, messages=None, prompt=prompt, max_tokens=None)
    assert found.done.reason == "length"
    assert len(found.done.tokens) == made.max_ctx - 740 + 1


def test_log_probabilities_come_with_the_text() -> None:
    found = Output(session("tree"), sampling=SamplingParams(logprobs=2, seed=1), max_tokens=20)
    along = [each for event in found.events if isinstance(event, Text) for each in event.logprobs or []]
    assert found.done.logprobs is not None
    assert [each.token for each in along] == found.done.tokens[: len(along)]
    assert [each.token for each in found.done.logprobs] == found.done.tokens


def test_recommended_sampling_comes_from_the_card() -> None:
    made = session("plain")
    assert made.recommended.source == "the card bough-40m"
    assert made.sampling_for(None) == SamplingParams(temperature=0.7, top_p=0.95, top_k=40, recommended=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown tool": (
        {"tools": TOOLS, "tool_choice": "cook"},
        "needed auto, none, required or weather, clock",
    ),
    "no tools": ({"tool_choice": "required"}, "the request has no tools"),
    "bad schema": ({"grammar": Grammar("json_schema", {"type": "banana"})}, "Invalid type"),
    "budget": ({"thinking": True, "thinking_budget": -1}, "thinking_budget is -1"),
    "raw tools": ({"messages": None, "prompt": "x", "tools": TOOLS}, "tools need messages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_requests(case: str) -> None:
    options, reason = REFUSED[case]
    with pytest.raises(UsageError, match=reason):
        Output(session("plain"), **options)
    with pytest.raises(UsageError, match=reason):
        session("plain").check(TextRequest(**{"messages": MESSAGES, **options}))
