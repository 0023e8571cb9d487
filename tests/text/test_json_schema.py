"""Schemas prepared for grammars: closed objects, formats, bounds, patterns."""

import json
from typing import Any

import pytest

from bough.errors import UsageError
from bough.text.grammar import Grammar
from bough.text.json_schema import MAX_INTEGER, prepare
from tests.text.test_grammar import COMPILER, follows

NULL = {"type": "null"}
A, B = ({"type": "object", "properties": {name: NULL}, "required": [name]} for name in "ab")
# Schema, values that match it, values that it would match if its objects were open.
CLOSED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "plain": (A, [{"a": None}], [{"a": None, "b": 1}]),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    "nested": (
        {"type": "object", "properties": {"x": {"type": "array", "items": A}}},
        [{"x": [{"a": None}]}],
        [{"x": [{"a": None, "b": 1}]}],
    ),
    "definition": (
        {"$defs": {"A": A}, "type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}},
        [{"x": {"a": None}}],
        [{"x": {"a": None, "b": 1}}],
    ),
    "alternatives": ({"anyOf": [A, B]}, [{"a": None}, {"b": None}], [{"a": None, "c": 1}]),
    "both": ({"allOf": [A, B]}, [{"a": None, "b": None}], [{"a": None, "b": None, "c": 1}]),
    "derived": (
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]},
        [{"a": None, "b": None}],
        [{"a": None, "b": None, "c": 1}],
    ),
    "derived twice": (
        {
            "$defs": {"A": A, "AB": {"allOf": [{"$ref": "#/$defs/A"}, B]}},
            "allOf": [
                {"$ref": "#/$defs/AB"},
                {"type": "object", "properties": {"c": NULL}, "required": ["c"]},
            ],
        },
        [{"a": None, "b": None, "c": None}],
        [{"a": None, "b": None, "c": None, "d": 1}],
    ),
    "one of several": (
        {
            "properties": {"a": NULL, "b": NULL},
            "type": "object",
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": None}, {"b": None}, {"a": None, "b": None}],
        [{"a": None, "c": 1}],
    ),
    "one alternative": (
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}]},
        [{"a": None}],
        [{"a": None, "b": 1}],
    ),
}
OPEN = {
    "asked": {"type": "object", "properties": {"a": NULL}, "additionalProperties": True},
    "typed": {"type": "object", "properties": {"a": NULL}, "additionalProperties": {"type": "integer"}},
    "any": {"type": "object"},
    "required elsewhere": {"type": "object", "properties": {"a": NULL}, "required": ["b"]},
    "at least two": {"type": "object", "properties": {"a": NULL}, "required": ["a"], "minProperties": 2},
}


def matches(schema: dict[str, Any], value: Any) -> bool:
    return follows(COMPILER.compile(Grammar("json_schema", schema)), json.dumps(value))


@pytest.mark.parametrize("case", CLOSED)
def test_objects_that_list_their_properties_are_closed(case: str) -> None:
    schema, valid, open_only = CLOSED[case]
    before = json.dumps(schema)
    for value in valid:
        assert matches(schema, value), value
    for value in open_only:
        assert not matches(schema, value), value
    assert json.dumps(schema) == before


@pytest.mark.parametrize("case", OPEN)
def test_other_objects_stay_open(case: str) -> None:
    assert matches(OPEN[case], {"a": None, "b": 1})


def test_keys_are_not_repeated() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    matcher = COMPILER.compile(Grammar("json_schema", schema))
    assert follows(matcher, '{"a": 1}') and not follows(matcher, '{"a": 1, "a": 2}')


@pytest.mark.parametrize(
    ("names", "right", "wrong"),
    [
        ({"type": "string"}, '{"any": true}', '{"any": 1}'),
        (True, '{"any": true, "b": false}', '{"any": null}'),
        ({"type": "string", "enum": ["a", "b"]}, '{"a": true, "b": false}', '{"c": true}'),
    ],
)
def test_names_of_a_record(names: object, right: str, wrong: str) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}}
    assert matches(schema, json.loads(right)) and not matches(schema, json.loads(wrong))


def test_names_that_are_keywords() -> None:
    schema = {"type": "object", "properties": {"properties": NULL, "format": {"enum": ["regex"]}}}
    assert matches(schema, {"properties": None, "format": "regex"})


def test_unknown_formats_are_annotations() -> None:
    for name in ("regex", "iri", "json-pointer", "anything"):
        assert matches({"type": "string", "format": name}, "any text")
    assert matches({"type": "string", "format": "date"}, "2026-01-31")
    assert not matches({"type": "string", "format": "date"}, "any text")


@pytest.mark.parametrize("bound", [2**53 + 1, 2**63 - 1, 2**63, 10**20, 1e20])
def test_large_bounds_keep_integers_valid(bound: float) -> None:
    for value in (int(bound) + 1, int(bound) + 1000, 10**22):
        assert not matches({"type": "integer", "maximum": bound}, value)
        assert not matches({"type": "integer", "minimum": -bound}, -value)
    assert matches({"type": "integer", "maximum": bound}, 2**53)
    assert matches({"type": "integer", "minimum": -bound}, -(2**53))
    assert matches({"type": "integer", "minimum": 0}, 10**22)


REFUSED = {
    "minimum": ({"type": "integer", "minimum": 1e20}, f"minimum is 1e+20; needs at most {MAX_INTEGER}"),
    "maximum": ({"type": "integer", "maximum": -(10**20)}, "maximum is -1"),
    "items": (
        {"properties": {"x": {"type": "array", "items": NULL, "minItems": 100_000}}},
        "properties.x.minItems is 100000; needs at most 10000",
    ),
    "look-ahead": (
        {"properties": {"x": {"type": "string", "pattern": "^(?=a)b"}}},
        r"properties.x.pattern is '\^\(\?=a\)b'; .*look-around",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_keyword(case: str) -> None:
    schema, reason = REFUSED[case]
    with pytest.raises(UsageError, match=reason.replace("1e+20", r"1e\+20")) as caught:
        COMPILER.compile(Grammar("json_schema", schema, "response_format.json_schema.schema"))
    assert caught.value.param == "response_format.json_schema.schema"


def test_lenient_preparation_drops_patterns() -> None:
    schema = {"properties": {"x": {"type": "string", "pattern": "^(?=a)b"}, "y": {"pattern": "^a$"}}}
    made = COMPILER.prepare(schema, lenient=True)
    assert made["properties"] == {"x": {"type": "string"}, "y": {"pattern": "^a$"}}
    assert prepare({"const": {"properties": 1}}) == {"const": {"properties": 1}}


def test_a_grammar_that_grows_too_large_is_the_request_s_fault() -> None:
    matcher = COMPILER.compile(Grammar("lark", 'start: item{100000}\nitem: "null" ", "', "response_format"))
    with pytest.raises(UsageError, match="cannot be followed further") as caught:
        matcher.advance(matcher.forced()[0])
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "answer",
    [Grammar("json_schema", A), Grammar("regex", "yes|no"), Grammar("lark", 'start: one\none: "yes"')],
)
def test_calls_or_an_answer(answer: Grammar) -> None:
    calls = Grammar("lark", 'start: one\none: "<call>" /[a-z]+/')
    matcher = COMPILER.compile(answer, calls=calls)
    text = '{"a": null}' if answer.kind == "json_schema" else "yes"
    assert follows(matcher, text) and follows(matcher, "<call>abc")
    assert not follows(matcher, "other") and not follows(matcher, text + "<call>abc")
