"""Bounds on grammars and JSON schemas, checked before anything is compiled: size, nesting, references.

A compiler that descends 4,000 references overflows its stack. What stays below these bounds can still take
long or much memory: `grammar_process` has the limits for that.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from bough.errors import UsageError
from bough.text.json_schema import resolve

MAX_CHARACTERS = 1 << 20  # of a grammar's text, or of all strings of its schemas
MAX_VALUES = 50_000  # of all schemas of a request: objects, arrays, strings, numbers
MAX_NESTING = 100
MAX_DEFINITIONS = 1_000
MAX_RULES = 4_000
MAX_PATH = 200  # references that follow each other, without a cycle
_MAX_LOOKS = 20 * MAX_VALUES  # where many references lead into each other's targets
_DEFINITIONS = ("$defs", "definitions")
# What is no name of a rule: strings, classes of characters, expressions, comments.
_OPAQUE = re.compile(r'"(?:[^"\\\n]|\\.)*+"|\[(?:[^\]\\\n]|\\.)*+\]|(?://|#)[^\n]*|/(?:[^/\\\n]|\\.)++/')
_RULE = re.compile(r"(?m)^[ \t]*[?!]?([A-Za-z_][\w-]*)[^\n:|]*?(?:::=|:)")
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_BRACKET = re.compile(r"\\.|[(){}]", re.DOTALL)


def check_schemas(schemas: Mapping[str, Any]) -> None:
    """Raise UsageError, with the limit and the value, unless schemas may be compiled together.

    schemas: by the request field that holds each.
    """
    values = characters = definitions = 0
    for field, schema in schemas.items():
        for value, depth in _walk(schema):
            values += 1
            if isinstance(value, str):
                characters += len(value)
            elif isinstance(value, Mapping):
                characters += sum(map(len, value))
                definitions += sum(
                    len(value[key]) for key in _DEFINITIONS if isinstance(value.get(key), Mapping)
                )
            _check(depth, MAX_NESTING, "levels of nested values", field)
            _check(values, MAX_VALUES, "values", field)
            _check(characters, MAX_CHARACTERS, "characters", field)
            _check(definitions, MAX_DEFINITIONS, "definitions", field)
        if isinstance(schema, Mapping):
            _References(schema, field).check()


def check_text(text: str, field: str | None) -> None:
    """Raise UsageError unless a grammar's text, or a regular expression, may be compiled."""
    _check(len(text), MAX_CHARACTERS, "characters", field)
    plain = _OPAQUE.sub(" ", text)
    depth = deepest = 0
    for match in _BRACKET.finditer(plain):
        depth = max(0, depth + {"(": 1, "{": 1, ")": -1, "}": -1}.get(match[0], 0))
        deepest = max(deepest, depth)
    _check(deepest, MAX_NESTING, "levels of nested brackets", field)


def check_rules(text: str, field: str | None) -> None:
    """Raise UsageError unless the rules of a Lark or GBNF grammar may be compiled."""
    check_text(text, field)
    plain = _OPAQUE.sub(" ", text)
    rules = list(_RULE.finditer(plain))
    _check(len(rules), MAX_RULES, "rules", field)
    names = {match[1] for match in rules}
    bodies: dict[str, set[str]] = {}
    for match, following in zip_longest(rules, rules[1:]):
        end = following.start() if following else len(plain)
        bodies.setdefault(match[1], set()).update(names & set(_NAME.findall(plain, match.end(), end)))
    _check(_longest_path(bodies), MAX_PATH, "rules that refer to each other in a row", field)


class _References:
    """The references of one schema, and where each leads."""

    def __init__(self, schema: Mapping[str, Any], field: str):
        self._schema, self._field, self._looks = schema, field, 0

    def check(self) -> None:
        edges: dict[str, set[str]] = {"#": self._inside(self._schema)}
        pending = list(edges["#"])
        while pending:
            reference = pending.pop()
            if reference not in edges:
                edges[reference] = self._inside(resolve(reference, self._schema))
                pending += edges[reference]
        _check(_longest_path(edges), MAX_PATH, "references in a row", self._field)

    def _inside(self, schema: Any) -> set[str]:
        """Return the references in a schema and in all schemas inside."""
        references: set[str] = set()
        for value, _ in _walk(schema):
            self._looks += 1
            _check(self._looks, _MAX_LOOKS, "values in the targets of its references", self._field)
            if isinstance(value, Mapping) and isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
        return references


def _longest_path(edges: Mapping[str, set[str]]) -> int:
    """Return the number of edges of the longest path that depth-first search sees; cycles end it."""
    lengths: dict[str, int] = {}
    for start in edges:
        path = [(start, iter(edges[start]))] if start not in lengths else []
        lengths.setdefault(start, 0)
        while path:
            name, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                if path:
                    above = path[-1][0]
                    lengths[above] = max(lengths[above], lengths[name] + 1)
            elif following in lengths:
                lengths[name] = max(lengths[name], lengths[following] + 1)
            else:
                lengths[following] = 0
                path.append((following, iter(edges.get(following, ()))))
    return max(lengths.values(), default=0)


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield a value and all values inside, with their depths."""
    pending = [(value, 1)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        if isinstance(value, Mapping):
            pending += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple):
            pending += [(inner, depth + 1) for inner in value]


def _check(count: int, limit: int, what: str, field: str | None) -> None:
    if count > limit:
        raise UsageError(
            f"{field or 'the grammar'} has {count} {what}; at most {limit} can be used", param=field
        )
