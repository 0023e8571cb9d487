"""Arguments get the types that their schemas mean, and no schema that a client can send is too odd."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.errors import UsageError
from bough.text.grammar import GrammarCompiler
from bough.text.output import OutputParser
from bough.text.tokenizer import Tokenizer
from bough.text.tools import Tool, call_grammar, read_tools, typed
from tests.text.vocabulary import trained

TOKENIZER = Tokenizer.from_metadata(trained("qwen35")[0])
COMPILER = GrammarCompiler(TOKENIZER)
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}}
WORDS = ["type", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "a"]
WORDS += ["minLength", "maxLength", "pattern", "additionalProperties", "items"]
VALUES = ["object", "string", "#", "#/properties/a", "^a+$", "[", "a/b", "\n", 5, -1, 2.5, True, None]
SCHEMAS = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


def takes(tool: Tool, text: str) -> bool:
    matcher = COMPILER.compile(call_grammar([tool], "xml", many=False))
    return all(map(matcher.advance, TOKENIZER.encode(CALL.format(text)))) and matcher.may_end


def one_argument(schema: Any, **more: Any) -> Tool:
    return Tool("f", {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}, strict=True)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"enum": [1, 2]}, {"type": "null"}]}, "2", 2),
        ({"anyOf": [{}, {"type": "null"}]}, "[1]", [1]),
        ({"anyOf": [{"enum": ["on", "off"]}, {"const": "auto"}]}, "5", "5"),
        ({"enum": ["red", 5, None, True]}, "red", "red"),
        ({"enum": ["red", 5, None, True]}, "5", 5),
        ({"enum": ["red", 5, None, True]}, "null", None),
        ({"const": 17}, "17", 17),
        ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
        ({"type": ["string", "null"]}, "null", None),
    ],
)
def test_arguments_are_converted_to_the_types_of_their_schema(schema: dict, text: str, value: object) -> None:
    tool = one_argument(schema, **{"$defs": {"Place": PLACE}})
    assert typed(text, tool.schema("a")) == value
    parser = OutputParser(tools=[tool])
    deltas = [*parser.push(CALL.format(text)), *parser.flush()]
    assert json.loads("".join(each.text for each in deltas if each.kind == "arguments")) == {"a": value}


def test_listed_values_are_enforced_whatever_their_type() -> None:
    tool = one_argument({"enum": ["red", 5, None, "a b"]})
    assert all(takes(tool, text) for text in ("red", "5", "null", "a b"))
    assert not any(takes(tool, text) for text in ('"red"', "6", "blue", ""))


@pytest.mark.parametrize(
    ("pattern", "sound", "unsound"),
    [
        (r"^https?:\/\/[a-z]+$", "https://abc", "ftp://abc"),
        ("^https?://[a-z]+$", "http://abc", "http:/abc"),
        (r"^\\/$", "\\/", "/"),
        ("^a\nb$", "a\nb", "ab"),
    ],
)
def test_patterns_with_slashes(pattern: str, sound: str, unsound: str) -> None:
    tool = one_argument({"type": "string", "pattern": pattern})
    assert takes(tool, sound) and not takes(tool, unsound)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, text=st.sampled_from(["1", "x", "[1", "True"]), strict=st.booleans())
def test_an_invalid_schema_is_a_usage_error(schema: Any, text: str, strict: bool) -> None:
    for parameters in ({"properties": {"a": schema}}, schema if isinstance(schema, dict) else {}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        tools = read_tools([tool])
        parser = OutputParser(tools=tools)
        deltas = [*parser.push(CALL.format(text)), *parser.flush()]
        assert "a" in json.loads("".join(each.text for each in deltas if each.kind == "arguments"))
        for syntax in ("xml", "json"):
            try:
                COMPILER.compile(call_grammar(tools, syntax, many=False))
            except UsageError as error:
                assert "grammar" in error.message
