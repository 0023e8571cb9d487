"""Tools of a request, the types of their arguments, and the grammar of tool calls.

Two syntaxes are supported, both inside `<tool_call>`: `<function=NAME>` with a `<parameter=KEY>` for each
argument (Qwen3.5), and a JSON object (Hermes, Qwen3).
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from bough.errors import UsageError
from bough.text.grammar import JSON_STYLE, Grammar

Syntax = Literal["xml", "json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
_OPTIONS = ("anyOf", "oneOf")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_PYTHON = 10_000  # characters of a value in Python's spelling
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of an object
    strict: bool = False
    field: str = "tools"  # of the request, for errors

    def schema(self, key: str) -> Mapping[str, Any]:
        """Return the schema of an argument with references resolved; empty where any value may be.

        An argument that is not declared beside others is text.
        """
        undeclared = {"type": "string"} if self.properties else {}
        schema = _resolved(self.properties.get(key, undeclared), self.parameters)
        options = {name: values for name in _OPTIONS if (values := _list(schema, name))}
        resolved = {name: [_resolved(each, self.parameters) for each in options[name]] for name in options}
        return {**schema, **resolved}

    @property
    def properties(self) -> Mapping[str, Any]:
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Parse function tools, whose fields are in `function` or next to `type`."""
    read: list[Tool] = []
    for index, tool in enumerate(tools or ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or any(mark in name for mark in "<>\n\"'"):
            raise UsageError(
                f"tools[{index}].function.name is {name!r}, needed the name of a function",
                param=f"tools[{index}].function.name",
            )
        assert isinstance(function, Mapping)
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise UsageError(
                f"tools[{index}].function.parameters is of type {type(parameters).__name__},"
                " needed a JSON schema",
                param=f"tools[{index}].function.parameters",
            )
        read.append(Tool(name, parameters, bool(function.get("strict")), f"tools[{index}]"))
    return read


def syntax_of(template: str) -> Syntax | None:
    """Return how a chat template writes calls, None where it has no tools."""
    if FUNCTION in template:
        return "xml"
    return "json" if OPEN in template else None


def is_string(schema: Mapping[str, Any]) -> bool:
    """Return whether an argument is always a string, so that its text is not parsed as JSON."""
    return _types(schema) == {"string"}


def parsed(text: str) -> Any:
    """Return a model's JSON; numbers that JSON has not, NaN and infinities, are their text."""
    return json.loads(text, parse_constant=str, parse_float=_finite)


def _finite(text: str) -> float | str:
    number = float(text)
    return number if isfinite(number) else text


def json_text(value: Any) -> str:
    """Return JSON that UTF-8 can encode: half a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Convert an argument's text to the type in its schema; text that does not convert stays text."""
    if is_string(schema):
        return text
    try:
        value = parsed(text)
    except (ValueError, RecursionError):
        value = _python_value(text)
    if isinstance(value, str):
        return text
    types = _types(schema)
    if not types:
        return value
    matching = [name for name in types if isinstance(value, _TYPES.get(name, ()))]
    if isinstance(value, bool):
        matching = [name for name in matching if name == "boolean"]
    return value if matching else text


def _python_value(text: str) -> Any:
    """Return what a word, a list or a dictionary in Python's spelling is in JSON, else the text."""
    if len(text) > _MAX_PYTHON or not text.lstrip().startswith(("[", "{")):
        return _PYTHON_WORDS.get(text.strip(), text)
    try:
        return parsed(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def call_grammar(tools: Sequence[Tool], syntax: Syntax, *, many: bool, opened: bool = False) -> Grammar:
    """Return a grammar of calls of `tools` only; `opened`: of one call after its opening tag."""
    write = _xml_call if syntax == "xml" else _json_call
    rules = [
        f"one: {json.dumps(chr(10))} body",
        "body: " + " | ".join(f"tool{index}" for index in range(len(tools))),
        _text_rule("argument", {}),
    ]
    for index, tool in enumerate(tools):
        rules += write(f"tool{index}", tool)
    call = json.dumps(OPEN)
    start = "start: one" if opened else f"start: {call} one" + (f" ( /\\n/ {call} one )*" if many else "")
    return Grammar("lark", "\n".join([start, *rules]))


def _xml_call(rule: str, tool: Tool) -> list[str]:
    required = _list(tool.parameters, "required")
    names, rules = [], []
    for index, key in enumerate(tool.properties):
        name = f"{rule}x{index}"
        head = json.dumps(f"\n{PARAMETER}{key}>\n", ensure_ascii=False)
        value = _xml_value(tool, key)
        if value is None:
            value = f"{name}text"
            rules.append(_text_rule(value, tool.schema(key), strict=tool.strict))
        rules.append(f"{name}: {head} {value}")
        names.append(name if key in required else f"{name}?")
    if tool.parameters.get("additionalProperties"):
        opening, closing = json.dumps(f"\n{PARAMETER}"), json.dumps(">\n")
        rules.append(f"{rule}any: {opening} /[^<>\\n]+/ {closing} argument")
        names.append(f"{rule}any*")
    head = json.dumps(f"{FUNCTION}{tool.name}>", ensure_ascii=False)
    tail = json.dumps(f"\n{END_FUNCTION}\n{CLOSE}")
    return [f"{rule}: {head} {' '.join(names)} {tail}", *rules]


def _xml_value(tool: Tool, key: str) -> str | None:
    """Return the rule of a parameter's value, None for any text."""
    schema = tool.schema(key)
    tail = json.dumps(f"\n{END_PARAMETER}")
    if values := _choices(schema):
        # Strings unquoted, other values as JSON; both as literals of the grammar.
        texts = [value if isinstance(value, str) else _literal(value) for value in values]
        return f"( {' | '.join(map(_literal, texts))} ) {tail}"
    if "string" in _types(schema) or not schema:
        return None
    return f"%json {_json(schema, tool)} {tail}"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text_rule(name: str, schema: Mapping[str, Any], *, strict: bool = False) -> str:
    """Return a rule of text up to the closing tag, with the length and pattern of its schema."""
    expression = "(?s:.*)"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if strict and isinstance(schema.get("pattern"), str):
        # A schema's pattern matches anywhere unless anchored; the grammar's matches the whole text.
        pattern = re.sub(r"\\.|[/\n]", _in_slashes, schema["pattern"], flags=re.DOTALL)
        before = "" if pattern.startswith("^") else expression
        after = "" if pattern.endswith("$") else expression
        expression = f"{before}({pattern.removeprefix('^').removesuffix('$')}){after}"
    elif least or most != "":
        expression = f"(?s:.{{{least},{most}}})"
    return f'{name}[suffix="\\n{END_PARAMETER}"]: /{expression}/'


def _in_slashes(match: re.Match[str]) -> str:
    """Escape characters that would end an expression between slashes, unless escaped already."""
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _json_call(rule: str, tool: Tool) -> list[str]:
    arguments = {"type": "object", "additionalProperties": False, **tool.parameters}
    call = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return [f"{rule}: %json {_json(call, tool)} {json.dumps(chr(10) + CLOSE)}"]


def _json(schema: Mapping[str, Any], tool: Tool) -> str:
    """Return the schema with the definitions it refers to; only strict tools reject unsupported keywords."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    options = JSON_STYLE | ({} if tool.strict else {"lenient": True})
    return json.dumps({**schema, **shared, "x-guidance": options}, ensure_ascii=False)


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return _list(schema, "enum") or ([schema["const"]] if "const" in schema else [])


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the names of the JSON types that a schema allows; none for any type."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if named := {name for name in _list(schema, "type") if isinstance(name, str)}:
        return named
    if values := _choices(schema):
        return {_type(value) for value in values}
    options = [each for name in _OPTIONS for each in _list(schema, name)]
    kinds = [_types(each) if isinstance(each, Mapping) else set() for each in options]
    # One alternative of any type makes the whole any type.
    return set().union(*kinds) if all(kinds) else set()


def _type(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    return next(name for name, kind in _TYPES.items() if isinstance(value, kind))


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list in a schema; some clients send another type there, which counts as empty."""
    values = schema.get(key)
    return values if isinstance(values, list) else []


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        return {}
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    target: Any = root
    for key in reference[2:].split("/"):
        target = target.get(key) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else {}
