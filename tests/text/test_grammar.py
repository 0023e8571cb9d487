"""Grammars over a vocabulary: what may follow, back and forth, and refusals that say why."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.errors import UsageError
from bough.text.grammar import Grammar, GrammarCompiler, Matcher
from bough.text.tokenizer import Tokenizer
from bough.text.tools import Tool, call_grammar, read_tools, syntax_of, typed
from tests.text.vocabulary import trained

TOKENIZER = Tokenizer.from_metadata(trained("qwen35")[0])
COMPILER = GrammarCompiler(TOKENIZER)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed(matcher: Matcher) -> set[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: TOKENIZER.vocab_size]).tolist())


def follows(matcher: Matcher, text: str) -> bool:
    """Whether the grammar takes all of `text` and may end there; the matcher is left where it was."""
    moved = 0
    for token in TOKENIZER.encode(text):
        sound = token in allowed(matcher)
        assert matcher.advance(token) == sound
        if not sound:
            break
        moved += 1
    else:
        sound = matcher.may_end
    if moved:
        matcher.back(moved)
    return sound


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", {"$ref": "#"}),
        Grammar("json_schema", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        Grammar("lark", "start: a\na: b\nb: a"),
    ],
)
def test_rules_that_match_no_text_are_refused(grammar: Grammar) -> None:
    with pytest.raises(UsageError, match="matches no text") as caught:
        COMPILER.compile(grammar)
    assert "\n" not in caught.value.message


def test_a_schema_is_complete_at_its_end() -> None:
    matcher = COMPILER.compile(Grammar("json_schema", PERSON))
    start = allowed(matcher)
    for text in ('{"name": "Bo", "age": 3}', '{"name": "", "age": -12}'):
        assert follows(matcher, text)
        assert allowed(matcher) == start
    for text in ('{"age": 3}', '{"name": "Bo"}', '{"name": "Bo", "age": "3"}', "[]", '{"name": 1'):
        assert not follows(matcher, text)
    assert TOKENIZER.decode(matcher.forced()).startswith('{"name":')
    for token in TOKENIZER.encode('{"name": "Bo", "age": 3}'):
        assert not matcher.complete
        assert matcher.advance(token)
    assert matcher.complete and matcher.may_end
    assert allowed(matcher) == set(TOKENIZER.stop_ids)
    assert not matcher.advance(TOKENIZER.encode("x")[0])
    matcher.back()
    assert not matcher.complete


def test_control_tokens_never_match() -> None:
    matcher = COMPILER.compile(Grammar("regex", r"(?s:.*)"))
    found = allowed(matcher)
    assert TOKENIZER.id_of("<think>") in found
    assert TOKENIZER.id_of("<|im_start|>") not in found
    assert found >= TOKENIZER.stop_ids


def test_a_fork_is_independent() -> None:
    matcher = COMPILER.compile(Grammar("regex", "ab|ac"))
    a, b, c = (TOKENIZER.encode(letter)[0] for letter in "abc")
    assert matcher.advance(a)
    other = matcher.fork()
    assert matcher.advance(b) and other.advance(c)
    assert matcher.complete and other.complete


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "("), "regex grammar cannot be used"),
        (Grammar("regex", None), "regex grammar is None"),
        (Grammar("lark", "start: nothing"), "unknown name"),
        (Grammar("json_schema", {"type": "banana"}), "Invalid type: banana"),
        (Grammar("json_schema", "{"), "not readable as JSON"),
        (Grammar("json_schema", "[1]"), "type list"),
        (Grammar("json_schema", {"type": "number", "multipleOf": 10**600}), "number out of range"),
        (Grammar("yaml", "x"), "kind is 'yaml'"),  # ty: ignore[invalid-argument-type]
    ],
)
def test_invalid_requests(grammar: Grammar, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        COMPILER.compile(grammar)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    )
)
def test_any_json_object(value: object) -> None:
    matcher = COMPILER.compile(Grammar("json_object"))
    text = json.dumps({"value": value}, ensure_ascii=False)
    # JSON has no raw control characters; the library wants them, and DEL, escaped in one way.
    if text.isprintable():
        assert follows(matcher, text)
    assert not follows(matcher, json.dumps([value]))


TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "units": {"enum": ["C", "F"]},
                    },
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        },
        {"name": "clock"},
    ]
)
XML = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>{}\n</function>\n</tool_call>"
DAYS = "\n<parameter=days>\n{}\n</parameter>"


def test_the_grammar_of_xml_calls() -> None:
    one = COMPILER.compile(call_grammar(TOOLS, "xml", many=False))
    assert follows(one, XML.format("Rome\n or <b>so</b>", ""))
    assert follows(one, XML.format("Rome", DAYS.format(3) + "\n<parameter=units>\nF\n</parameter>"))
    assert follows(one, "<tool_call>\n<function=clock>\n</function>\n</tool_call>")
    assert not follows(one, XML.format("Rome", DAYS.format("three")))
    assert not follows(one, XML.format("Rome", "\n<parameter=units>\nK\n</parameter>"))
    assert not follows(one, "<tool_call>\n<function=weather>\n</function>\n</tool_call>")
    assert not follows(one, "<tool_call>\n<function=cook>\n</function>\n</tool_call>")
    assert not follows(one, "Rome")
    twice = XML.format("Rome", "") + "\n" + XML.format("Oslo", "")
    assert not follows(one, twice)
    assert follows(COMPILER.compile(call_grammar(TOOLS, "xml", many=True)), twice)
    opened = COMPILER.compile(call_grammar(TOOLS, "xml", many=False, opened=True))
    assert follows(opened, XML.format("Rome", "").removeprefix("<tool_call>"))


def test_strings_in_xml_calls_match_their_schema() -> None:
    limits = {
        "length": {"type": "string", "minLength": 1, "maxLength": 3},
        "form": {"type": "string", "pattern": "^[a-c]/+$"},
        "part": {"type": "string", "pattern": "x"},
    }
    for key, sound, unsound in [
        ("length", ["a", "abc", "\n"], ["", "abcd"]),
        ("form", ["a/", "c///"], ["a", "d/", "xa/"]),
        ("part", ["x", "axb"], ["", "ab"]),
    ]:
        tool = Tool("f", {"properties": {key: limits[key]}, "required": [key]}, strict=True)
        matcher = COMPILER.compile(call_grammar([tool], "xml", many=False, opened=True))
        written = "\n<function=f>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
        for texts, expected in ((sound, True), (unsound, False)):
            for text in texts:
                assert follows(matcher, written.format(key, text)) == expected, (key, text)


def test_the_grammar_of_json_calls() -> None:
    one = COMPILER.compile(call_grammar(TOOLS, "json", many=False))

    def written(name: str, arguments: object) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    assert follows(one, written("weather", {"city": "Rome", "days": 2}))
    assert follows(one, written("clock", {}))
    assert not follows(one, written("weather", {"days": 2}))
    assert not follows(one, written("weather", {"city": "Rome", "moon": 1}))
    assert not follows(one, written("cook", {}))


def test_parsing_tools() -> None:
    assert [(tool.name, tool.strict) for tool in TOOLS] == [("weather", True), ("clock", False)]
    assert read_tools(None) == []
    for bad, reason in [
        ({}, r"tools\[0\].function.name is None"),
        ({"name": "a>b"}, "is 'a>b'"),
        ({"function": {"name": "f", "parameters": [1]}}, "type list, needed a JSON schema"),
    ]:
        with pytest.raises(UsageError, match=reason):
            read_tools([bad])
    assert syntax_of("... <function= ...") == "xml"
    assert syntax_of("... <tool_call> ...") == "json"
    assert syntax_of("messages") is None
    assert typed("1", Tool("f").schema("x")) == 1
