"""Answers to reasoning, content and calls: the same however the text is split, and nothing lost."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bough.text.output import Delta, OutputParser
from bough.text.tools import Tool

WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/place"},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "note": {"type": ["string", "null"]},
            "free": {},
        },
        "$defs": {"place": {"type": "array", "items": {"type": "number"}}},
    },
)
CLOCK = Tool("clock")
TOOLS = (WEATHER, CLOCK)


def parse(pieces: Sequence[str], *, whole: bool = True, **options) -> list[Delta]:
    """All deltas, neighbours of one kind joined."""
    parser = OutputParser(**options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.flush(whole=whole)
    joined: list[Delta] = []
    for delta in deltas:
        assert delta.text
        last = joined[-1] if joined else None
        if last and (last.kind, last.index) == (delta.kind, delta.index) and delta.kind != "call":
            joined[-1] = Delta(delta.kind, last.text + delta.text, delta.index)
        else:
            joined.append(delta)
    return joined


def strict_json(text: str) -> object:
    """Parse JSON as clients do: without NaN and infinities, and each key once."""

    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is no JSON")

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len(dict(pairs)) == len(pairs), f"repeated key in {text}"
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


def shown(text: str, **options) -> list[tuple[str, str]]:
    return [(delta.kind, delta.text) for delta in parse([text], **options)]


def call(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def test_reasoning_and_content() -> None:
    assert shown("hm\nwell\n</think>\n\nYes. <think>", reasoning="open") == [
        ("reasoning", "hm\nwell"),
        ("content", "Yes. <think>"),
    ]
    assert shown("\n<think>\nhm</think>Yes", reasoning="possible") == [
        ("reasoning", "hm"),
        ("content", "Yes"),
    ]
    assert shown("<thinner> </think>", reasoning="possible") == [("content", "<thinner> </think>")]
    assert shown("<thi", reasoning="possible") == [("content", "<thi")]
    assert shown("never ends \n</thi", reasoning="open") == [("reasoning", "never ends \n</thi")]
    assert shown("</think>\n\n", reasoning="open") == []
    assert shown(" <think>x</think> ") == [("content", " <think>x</think> ")]


def test_xml_calls_are_typed_by_the_schema() -> None:
    text = "Let me see.\n\n" + call(
        "weather",
        ("city", "07"),
        ("days", "7"),
        ("units", "C"),
        ("where", "[1, 2.5]"),
        ("exact", "True"),
        ("note", "null"),
        ("free", '{"a": 1}'),
    )
    deltas = parse([text + "\n" + call("clock") + "\n"], tools=TOOLS)
    assert [delta.kind for delta in deltas] == ["content", "call", "arguments", "call", "arguments"]
    assert deltas[0].text == "Let me see."
    assert [(delta.text, delta.index) for delta in deltas if delta.kind == "call"] == [
        ("weather", 0),
        ("clock", 1),
    ]
    assert json.loads(deltas[2].text) == {
        "city": "07",
        "days": 7,
        "units": "C",
        "where": [1, 2.5],
        "exact": True,
        "note": None,
        "free": {"a": 1},
    }
    assert deltas[4].text == "{}"


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("5", {"type": "string"}, "5"),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "integer"}, "true"),
        ("5.0", {"type": "number"}, 5.0),
        ("5", {"type": ["integer", "string"]}, 5),
        ('"5"', {"type": ["integer", "string"]}, '"5"'),
        ("text", {}, "text"),
        ("[1", {"type": "array"}, "[1"),
        ("['x', None]", {"type": "array"}, ["x", None]),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("{1, 2}", {"type": "object"}, "{1, 2}"),
        ("['x']", {"type": "string"}, "['x']"),
        ("[__import__('os')]", {"type": "array"}, "[__import__('os')]"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("  spaced\n", {"type": "string"}, "  spaced\n"),
        ("", {"type": "string"}, ""),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("-Infinity", {}, "-Infinity"),
        ("[1, NaN]", {"type": "array"}, [1, "NaN"]),
        ('["\\ud800é"]', {"type": "array"}, ["\ud800é"]),
    ],
)
def test_one_argument(value: str, schema: dict, expected: object) -> None:
    tool = Tool("f", {"properties": {"x": schema}})
    deltas = parse([call("f", ("x", value))], tools=[tool])
    assert strict_json(deltas[-1].text) == {"x": expected}
    deltas[-1].text.encode()


def test_arguments_in_json_are_numbers_that_json_has() -> None:
    text = (
        '<tool_call>\n{"name": "clock", "arguments": {"n": NaN, "m": [-Infinity, 1e999, 1.5]}}\n</tool_call>'
    )
    deltas = parse([text], tools=TOOLS)
    assert strict_json(deltas[-1].text) == {"n": "NaN", "m": ["-Infinity", "1e999", 1.5]}


def test_the_first_value_of_a_repeated_argument_counts() -> None:
    text = call("weather", ("city", "Rome"), ("city", "Paris\n\n"), ("days", "1"), ("days", "2"))
    deltas = parse([text], tools=TOOLS)
    assert deltas[-1].text == '{"city": "Rome", "days": 1}'
    assert parse(list(text), tools=TOOLS) == deltas


def test_an_argument_that_is_not_declared_is_text() -> None:
    deltas = parse([call("weather", ("phone", "5551234"))], tools=TOOLS)
    assert json.loads(deltas[-1].text) == {"phone": "5551234"}
    deltas = parse([call("clock", ("phone", "5551234"))], tools=TOOLS)
    assert json.loads(deltas[-1].text) == {"phone": 5551234}  # it declares nothing


def test_a_string_may_hold_tags_of_its_own() -> None:
    text = "a</parameter>b\n</parameter>\nc </tool_call> </function>"
    deltas = parse([call("weather", ("city", text), ("days", "1"))], tools=TOOLS)
    assert json.loads(deltas[-1].text) == {"city": text, "days": 1}


def test_a_string_is_not_held_back_until_it_ends() -> None:
    parser = OutputParser(tools=TOOLS)
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\nPar")
    assert [delta.text for delta in parser.push("is is in Fr")] == ["is is in Fr"]
    assert parser.push("\n</par") == []


def test_a_call_without_the_tag_around_it() -> None:
    bare = call("weather", ("city", "Rome")).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    asked = [("call", "weather"), ("arguments", '{"city": "Rome"}')]
    for text in (bare, bare + "\n</tool_call>"):
        assert shown(f"Sure.\n\n{text}\n", tools=TOOLS) == [("content", "Sure."), *asked]
        assert shown(text + text, tools=TOOLS) == asked * 2
    other = "Write <function=name> or <function=weather"
    assert shown(other, tools=TOOLS) == [("content", other)]


def test_json_calls() -> None:
    text = 'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "</tool_call>"}}\n</tool_call>'
    assert shown(text, tools=TOOLS) == [
        ("content", "Sure."),
        ("call", "weather"),
        ("arguments", '{"city": "</tool_call>"}'),
    ]
    as_string = '<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}</tool_call> done'
    assert shown(as_string, tools=TOOLS) == [
        ("call", "clock"),
        ("arguments", '{"a": 1}'),
        ("content", "done"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "see <tool_call> tags",
        '<tool_call>\n{"name": 5}\n</tool_call>',
        '<tool_call>\n{"name": "clock", "arguments": [1]}\n</tool_call>',
        "<tool_call>\n{not json}\n</tool_call> more",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=a\nb>",
        "<tool_call>\n<func",
        '<tool_call>\n{"name": "clock"',
        "x \n <tool_call>\n\nplain",
    ],
)
def test_malformed_calls_are_content(text: str) -> None:
    assert shown(text, tools=TOOLS) == [("content", text)]


JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_without_tools_nothing_is_a_call() -> None:
    assert shown(call("clock")) == [("content", call("clock"))]


def test_a_call_that_breaks_off_leaves_the_rest_as_content() -> None:
    text = "<tool_call>\n<function=weather>\noops</function>\n</tool_call>"
    assert shown(text, tools=TOOLS) == [
        ("call", "weather"),
        ("arguments", "{}"),
        ("content", "oops</function>\n</tool_call>"),
    ]
    late = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\noops"
    assert shown(late, tools=TOOLS)[1:] == [("arguments", '{"days": 3}'), ("content", "oops")]
    # The end tags are what models forget first.
    unclosed = "<tool_call>\n<function=weather>\n<parameter=city>\nRome"
    assert shown(unclosed, tools=TOOLS)[1] == ("arguments", '{"city": "Rome"}')
    assert shown(unclosed, tools=TOOLS, whole=False)[1] == ("arguments", '{"city": "Rome')


@pytest.mark.parametrize("written", [call("weather", ("city", "Rome")), JSON_CALL], ids=["xml", "json"])
def test_a_call_that_is_cut_off_is_no_content(written: str) -> None:
    for end in range(len("<tool"), len(written)):
        kinds = shown(f"Let me see.\n{written[:end]}", tools=TOOLS, whole=False)
        assert [text for kind, text in kinds if kind == "content"] == ["Let me see."], written[:end]
    # Less than that may be other text.
    assert shown("a <", tools=TOOLS, whole=False) == [("content", "a <")]
    assert shown("a <tool", whole=False) == [("content", "a <tool")]


def test_an_answer_is_either_text_or_calls() -> None:
    text = '"<tool_call><function=clock></function></tool_call>"'
    assert shown(text, tools=TOOLS, either=True) == [("content", text)]
    assert shown(call("clock"), tools=TOOLS, either=True) == [("call", "clock"), ("arguments", "{}")]
    assert shown("<tool_box>", tools=TOOLS, either=True) == [("content", "<tool_box>")]


def test_counts_of_begun_and_complete_calls() -> None:
    parser = OutputParser(reasoning="open", tools=TOOLS)
    assert parser.in_reasoning
    parser.push("</think>")
    assert not parser.in_reasoning
    parser.push(call("clock")[:-1])
    assert (parser.calls_begun, parser.calls_done) == (1, 0)
    parser.push(">")
    assert (parser.calls_begun, parser.calls_done) == (1, 1)


words = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=weather>",
        "<function=",
        "</function>",
        "<parameter=city>",
        "<parameter=days>",
        "<parameter=free>",
        "</parameter>",
        "\n",
        "\n\n",
        " ",
        '{"name": "clock", "arguments": {}}',
        '{"name": "clock',
        "Rome",
        "5",
        '"é\\',
        "<",
        "🙂",
        call("weather", ("city", "Rome"), ("days", "5")),
        call("clock"),
    ]
)
texts = st.lists(words, max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(
    text=texts,
    cuts=st.lists(st.integers(0, 400), max_size=12),
    reasoning=st.sampled_from(["open", "possible", "none"]),
    whole=st.booleans(),
)
def test_any_split_gives_the_same_deltas(text: str, cuts: list[int], reasoning: str, whole: bool) -> None:
    options = {"reasoning": reasoning, "tools": TOOLS, "whole": whole}
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    expected = parse([text], **options)
    assert parse(pieces, **options) == expected
    assert parse(list(text), **options) == expected


@settings(max_examples=300, deadline=None)
@given(text=texts, reasoning=st.sampled_from(["open", "possible", "none"]))
def test_only_tags_and_whitespace_are_dropped(text: str, reasoning: str) -> None:
    assume(text.count("<parameter=city>") < 2)  # of a repeated argument the first value counts
    kept = "".join(delta.text for delta in parse([text], reasoning=reasoning, tools=TOOLS))
    assert kept.count("Rome") == text.count("Rome")
    assert kept.count("🙂") == text.count("🙂")


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.text().filter(lambda text: "</parameter>" not in text), min_size=1, max_size=4))
def test_string_arguments_are_unchanged(values: list[str]) -> None:
    tool = Tool("f", {"properties": {f"p{i}": {"type": "string"} for i in range(len(values))}})
    written = call("f", *((f"p{i}", value) for i, value in enumerate(values)))
    deltas = parse([written], tools=[tool])
    assert json.loads(deltas[-1].text) == {f"p{i}": value for i, value in enumerate(values)}


def pieces_of(choose: random.Random, text: str) -> list[str]:
    """Cut a text at random places, with a preference for those after a line break and within tags."""
    likely = [at for at in range(1, len(text)) if text[at - 1] in "\n<>/" and choose.random() < 0.3]
    cuts = {0, len(text), *likely, *(choose.randrange(len(text)) for _ in range(choose.randrange(12)))}
    return [text[a:b] for a, b in pairwise(sorted(cuts))]


def random_value(choose: random.Random, kind: str) -> object:
    if kind == "integer":
        return choose.randrange(-99, 10**9)
    if kind == "array":
        return [choose.choice([1, 2.5, "x", None, {"a": True}]) for _ in range(choose.randrange(4))]
    bits = [
        "\n",
        "\n\n",
        "a",
        "é🙂",
        " ",
        "</function>",
        "</tool_call>",
        "<parameter=b>",
        '"',
        "\\",
        "</",
        "<",
    ]
    return "".join(choose.choice(bits) for _ in range(choose.randrange(9)))


@pytest.mark.parametrize("style", ["xml", "json"])
def test_thousands_of_random_splits_of_calls(style: str) -> None:
    """500 answers of one to three calls, each cut in four ways: 4,000 splits with both styles."""
    choose, kinds = random.Random(2026), ["string", "integer", "array", "string"]
    tool = Tool("f", {"properties": {f"{kind}{i}": {"type": kind} for i, kind in enumerate(kinds)}})
    for _ in range(500):
        calls = [
            {
                f"{kind}{i}": random_value(choose, kind)
                for i, kind in enumerate(kinds)
                if choose.random() < 0.8
            }
            for _ in range(choose.randint(1, 3))
        ]
        if style == "json":
            blocks = [
                f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': each})}\n</tool_call>" for each in calls
            ]
        else:
            texts = [
                [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in each.items()]
                for each in calls
            ]
            blocks = [call("f", *each) for each in texts]
        text = choose.choice(["", "Well.\n\n"]) + "\n".join(blocks)
        expected = parse([text], tools=[tool])
        assert [strict_json(delta.text) for delta in expected if delta.kind == "arguments"] == calls, text
        for _ in range(4):
            assert parse(pieces_of(choose, text), tools=[tool]) == expected, text
