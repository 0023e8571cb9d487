"""JSON schemas as clients send them, prepared for grammars.

Objects that list their properties are closed, unknown formats are dropped, and bounds that the grammar cannot
represent are clamped or refused. Every text that matches the result matches the original.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bough.errors import UsageError

# Formats that the grammar enforces; any other is an annotation.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
MAX_INTEGER = 2**63 - 1024  # the grammar's bounds are double-precision numbers and its integers have 64 bits
MAX_ITEMS = 10_000  # required items of an array: the parser fails above 50,000 items
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # lists of schemas of the same value
_CONDITIONS = ("if", "then", "else")
_LISTS = (*_IN_PLACE, "prefixItems", "items")
_ONE = (*_CONDITIONS, "items", "additionalItems", "additionalProperties", "contains", "unevaluatedProperties")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")

CheckPattern = Callable[[str], None]


def prepare(
    schema: Mapping[str, Any], *, check_pattern: CheckPattern | None = None, lenient: bool = False
) -> dict[str, Any]:
    """Return the schema for the grammar.

    `check_pattern` raises UsageError for an unsupported pattern; `lenient` drops such patterns.
    """
    work = _Preparation(schema, check_pattern, lenient)
    work.find_open(schema, part=False)
    return work.rewrite(schema, "#", part=False)


@dataclass(slots=True)
class _Properties:
    names: dict[str, None] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    least: int = 0
    listed: bool = False  # whether a schema has `properties`
    closable: bool = True


class _Preparation:
    """`part`: the schema is one of several for the same value, so it cannot be closed alone."""

    def __init__(self, root: Mapping[str, Any], check_pattern: CheckPattern | None, lenient: bool):
        self._root, self._check_pattern, self._lenient = root, check_pattern, lenient
        self._open: set[str] = set()  # references to schemas that are parts

    def find_open(self, schema: Any, *, part: bool) -> None:
        """Find the definitions that are parts of other schemas."""
        if not isinstance(schema, Mapping):
            return
        parts = part or _is_combined(schema)
        reference = schema.get("$ref")
        if parts and isinstance(reference, str) and _unescaped(reference) not in self._open:
            self._open.add(_unescaped(reference))
            self.find_open(resolve(reference, self._root), part=True)
        for key, _, inner in _children(schema):
            self.find_open(inner, part=parts and _same_value(key))

    def rewrite(self, schema: Any, path: str, *, part: bool) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        part = part or path in self._open
        parts = part or _is_combined(schema)
        result: dict[str, Any] = dict(schema)
        for key in (*_LISTS, *_NAMED):
            if isinstance(result.get(key), list | Mapping):
                result[key] = list(result[key]) if isinstance(result[key], list) else dict(result[key])
        for key, name, inner in _children(schema):
            where = f"{path}/{key}/{name}" if name is not None else f"{path}/{key}"
            below = self.rewrite(inner, where, part=parts and _same_value(key))
            if name is None:
                result[key] = below
            else:
                result[key][name] = below
        self._values(result, path)
        if not part:
            self._close(schema, result)
        return result

    def _close(self, schema: Mapping[str, Any], result: dict[str, Any]) -> None:
        collected = _Properties()
        self._collect(schema, collected, set())
        complete = collected.required <= collected.names.keys() and collected.least <= len(collected.names)
        combined = "properties" in schema or _is_combined(schema)
        if not (collected.listed and collected.closable and complete and combined):
            return
        properties = result.get("properties") or {}
        result["properties"] = {
            **properties,
            **{name: {} for name in collected.names if name not in properties},
        }
        result["additionalProperties"] = False

    def _collect(self, schema: Any, collected: _Properties, seen: set[str]) -> None:
        """Add the properties of a schema and of its parts."""
        if not isinstance(schema, Mapping):
            return
        collected.closable &= not any(key in schema for key in _OPEN)
        properties, required, least = (schema.get(key) for key in ("properties", "required", "minProperties"))
        if isinstance(properties, Mapping):
            collected.listed = True
            collected.names |= dict.fromkeys(properties)
        collected.required |= (
            {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        )
        collected.least = max(collected.least, least) if isinstance(least, int) else collected.least
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            self._collect(resolve(reference, self._root), collected, seen)
        for key, _, part in _children(schema):
            if _same_value(key):
                self._collect(part, collected, seen)

    def _values(self, result: dict[str, Any], path: str) -> None:
        """Drop or check the keywords of one schema that the grammar cannot represent."""
        if isinstance(result.get("format"), str) and result["format"] not in FORMATS:
            del result["format"]
        if isinstance(result.get("minItems"), int | float) and result["minItems"] > MAX_ITEMS:
            raise _refused(path, "minItems", result["minItems"], f"at most {MAX_ITEMS}")
        _listed_names(result)
        if _may_be_integer(result):
            _clamp_bounds(result, path)
        pattern = result.get("pattern")
        if isinstance(pattern, str) and self._check_pattern is not None:
            try:
                self._check_pattern(pattern)
            except UsageError as error:
                if not self._lenient:
                    raise UsageError(
                        f"{_shown(path)}pattern is {pattern[:100]!r}; {error.message}"
                    ) from error
                del result["pattern"]


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema at a local reference, None where there is none."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for key in _unescaped(reference).split("/")[1:]:
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            target = target.get(key) if isinstance(target, Mapping) else None
    return target


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """Yield keyword, name or index, and schema of each schema inside; the name is None for a single one."""
    for key in _ONE:
        if isinstance(schema.get(key), Mapping):
            yield key, None, schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((key, index, each) for index, each in enumerate(schema[key]))
    for key in _NAMED:
        if isinstance(schema.get(key), Mapping):
            yield from ((key, name, each) for name, each in schema[key].items())


def _same_value(key: str) -> bool:
    """Return whether the schemas under a keyword are for the same value as the schema around them."""
    return key in _IN_PLACE or key in _CONDITIONS or key == "dependentSchemas"


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas apply to one value."""
    every = schema.get("allOf")
    count = len(every) if isinstance(every, list) else 0
    return count + sum(key in schema for key in ("properties", "anyOf", "oneOf", "$ref", "if")) > 1


def _listed_names(result: dict[str, Any]) -> None:
    """Rewrite the `propertyNames` that zod writes for records: any string, or an enumeration."""
    names = result.get("propertyNames")
    if names is True or names in ({}, {"type": "string"}):
        del result["propertyNames"]
    elif (
        isinstance(names, Mapping)
        and isinstance(names.get("enum"), list)
        and not names.keys() - {"type", "enum"}
    ):
        value = result.get("additionalProperties", {})
        listed = {name: value for name in names["enum"] if isinstance(name, str)}
        result["properties"] = listed | dict(result.get("properties") or {})
        result["additionalProperties"] = False
        del result["propertyNames"]


def _may_be_integer(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "integer")
    return "integer" in types if isinstance(types, list) else types == "integer"


def _clamp_bounds(result: dict[str, Any], path: str) -> None:
    for keys, sign, side in ((_UPPER, 1, "at least"), (_LOWER, -1, "at most")):
        for key in keys:
            bound = result.get(key)
            if not isinstance(bound, int | float) or isinstance(bound, bool):
                continue
            if sign * bound < -MAX_INTEGER:
                raise _refused(path, key, bound, f"{side} {-sign * MAX_INTEGER} for an integer")
            if abs(bound) > 2**53:
                result[key] = sign * _rounded_down(sign * bound)


def _rounded_down(bound: int | float) -> int:
    """Return the largest double-precision integer that is not above `bound` or MAX_INTEGER."""
    bound = min(int(bound), MAX_INTEGER)
    near = float(bound)
    return int(near if near <= bound else math.nextafter(near, -math.inf))


def _refused(path: str, key: str, value: Any, needed: str) -> UsageError:
    return UsageError(f"{_shown(path)}{key} is {value}; needs {needed}")


def _shown(path: str) -> str:
    return path.removeprefix("#").removeprefix("/").replace("/", ".") + "." * (path != "#")


def _unescaped(reference: str) -> str:
    return reference.replace("~1", "/").replace("~0", "~")
