"""Requests that are made to kill a server, to hold it up, or to fill its memory."""

import json
from collections.abc import Callable
from typing import Any

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
FORMATS = "date-time email uri ipv6 uuid hostname duration json-pointer"
Body = dict[str, Any]
Attack = tuple[str, Callable[[], Body]]  # path, body


def chain(length: int, step: Callable[[str], Body], *, last: Body | None = None) -> Body:
    """Return a schema of definitions each of which `step` makes from a reference to the next one."""
    definitions = {f"d{i}": step(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$defs": {**definitions, f"d{length}": last or {"type": "null"}}, "$ref": "#/$defs/d0"}


def property_of(reference: str) -> Body:
    return {"type": "object", "properties": {"a": {"$ref": reference}}}


def any_of(reference: str) -> Body:
    return {"anyOf": [{"$ref": reference}, {"type": "integer"}]}


def all_of(reference: str) -> Body:
    return {"allOf": [{"$ref": reference}, {}]}


def nested(depth: int, step: Callable[[Any], Any], value: Any) -> Any:
    for _ in range(depth):
        value = step(value)
    return value


def choices(count: int) -> list[Body]:
    return [
        {
            "anyOf": [
                {"properties": {f"a{i}": {"type": "string"}}},
                {"properties": {f"b{i}": {"type": "null"}}},
            ]
        }
        for i in range(count)
    ]


def schemas() -> dict[str, Callable[[], Any]]:
    """Return JSON schemas by name."""
    text, number = {"type": "string"}, {"type": "integer"}
    return {
        "1,000 references through properties": lambda: chain(1000, property_of),
        "2,000 references through properties": lambda: chain(2000, property_of),
        "20,000 references through properties": lambda: chain(20000, property_of),
        "300 references through anyOf": lambda: chain(300, any_of),
        "500 references through anyOf": lambda: chain(500, any_of),
        "199 references through anyOf": lambda: chain(199, any_of),
        "500 references through allOf": lambda: chain(500, all_of),
        "199 references through allOf": lambda: chain(199, all_of),
        "199 references through oneOf": lambda: chain(199, lambda r: {"oneOf": [{"$ref": r}, number]}),
        "199 references through items": lambda: chain(199, lambda r: {"type": "array", "items": {"$ref": r}}),
        "199 references through prefixItems": lambda: chain(
            199, lambda r: {"type": "array", "prefixItems": [{"$ref": r}, {"$ref": r}]}
        ),
        "199 references, two each": lambda: chain(
            199, lambda r: {"type": "object", "properties": {"a": {"$ref": r}, "b": {"$ref": r}}}
        ),
        "40 references, anyOf of the same two": lambda: chain(
            40, lambda r: {"anyOf": [{"$ref": r}, {"$ref": r}]}
        ),
        "40 references, allOf of the same two": lambda: chain(
            40, lambda r: {"allOf": [{"$ref": r}, {"$ref": r}]}, last=text
        ),
        "30 references, allOf and anyOf": lambda: chain(
            30, lambda r: {"allOf": [{"anyOf": [{"$ref": r}, text]}, {"anyOf": [{"$ref": r}, number]}]}
        ),
        "a ring of 900": lambda: chain(900, property_of, last={"$ref": "#/$defs/d0"}),
        "a ring of 150 in allOf": lambda: chain(150, all_of, last={"$ref": "#/$defs/d0"}),
        "references to references": lambda: chain(900, lambda r: {"$ref": r}),
        "every definition refers to all": lambda: {
            "$defs": {
                f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(100)]} for i in range(100)
            },
            "$ref": "#/$defs/d0",
        },
        "every definition holds all": lambda: {
            "$defs": {
                f"d{i}": {
                    "type": "object",
                    "properties": {f"p{j}": {"$ref": f"#/$defs/d{j}"} for j in range(60)},
                }
                for i in range(60)
            },
            "$ref": "#/$defs/d0",
        },
        "a reference into a property 90 deep": lambda: {
            "properties": {"a": nested(90, lambda v: {"properties": {"a": v}}, {"$ref": "#/properties/a"})}
        },
        "8 choices of two combined": lambda: {"allOf": choices(8)},
        "9 choices of two combined": lambda: {"allOf": choices(9)},
        "16 choices of two combined": lambda: {"allOf": choices(16)},
        "40 choices of two combined": lambda: {"allOf": choices(40)},
        "1,000 alternatives": lambda: {
            "anyOf": [{"properties": {f"p{i}": {"const": i}}, "required": [f"p{i}"]} for i in range(1000)]
        },
        "10,000 enumerated": lambda: {"enum": [f"value {i * 7919} of many" for i in range(10000)]},
        "100,000 enumerated": lambda: {"enum": [f"value {i * 7919} of many" for i in range(100000)]},
        "5,000 properties": lambda: {"type": "object", "properties": {f"p{i}": text for i in range(5000)}},
        "1,000 required": lambda: {
            "type": "object",
            "properties": {f"p{i}": text for i in range(1000)},
            "required": [f"p{i}" for i in range(1000)],
        },
        "20,000 properties": lambda: {"type": "object", "properties": {f"p{i}": text for i in range(20000)}},
        "a name of 2 MB": lambda: {"type": "object", "properties": {"n" * 2_000_000: text}},
        "nested arrays of 10,000": lambda: nested(
            6, lambda v: {"type": "array", "items": v, "minItems": 10000, "maxItems": 10000}, text
        ),
        "nested arrays of 0 to 9,999": lambda: nested(
            20, lambda v: {"type": "array", "items": v, "minItems": 0, "maxItems": 9999}, text
        ),
        "a string of 10^9": lambda: {"type": "string", "minLength": 10**9, "maxLength": 10**9},
        "a string of up to 10^18": lambda: {"type": "string", "maxLength": 10**18},
        "multiples of 10^-300": lambda: {"type": "number", "multipleOf": 1e-300},
        "multiples of a large prime": lambda: {"type": "integer", "multipleOf": 2**61 - 1},
        "bounds of 300 digits": lambda: {"type": "integer", "minimum": 10**300, "maximum": 10**301},
        "300 patterns": lambda: {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(300)
            },
        },
        "a pattern that repeats a repetition": lambda: {
            "type": "string",
            "pattern": "^((a{1,99}){1,99}){1,99}$",
        },
        "patternProperties": lambda: {
            "type": "object",
            "patternProperties": {f"^(x|y)*z(x|y){{{i}}}$": {"type": "null"} for i in range(60)},
        },
        "not of not": lambda: nested(95, lambda v: {"not": v}, text),
        "references to parts of names": lambda: {
            "$defs": {"a/b~c%d": property_of("#/$defs/a~1b~0c%25d")},
            "$ref": "#/$defs/a~1b~0c%25d",
        },
        "a reference to another machine": lambda: {"$ref": "http://127.0.0.1:1/schema.json"},
        "a reference that is a number": lambda: {"properties": {"a": {"$ref": 7}, "$ref": {"$ref": "#"}}},
        "dynamic references": lambda: {
            "$dynamicAnchor": "a",
            "items": {"$dynamicRef": "#a"},
            "type": "array",
        },
        "a constant nested 99 deep": lambda: {"const": nested(97, lambda v: [v], 1)},
        "a constant of 900 kB": lambda: {"const": "c" * 900_000},
        "20,000 constants in an array": lambda: {"const": list(range(20_000))},
        "200 fields that are 200 fields": lambda: {
            "properties": {f"p{i}": {"properties": {f"q{j}": number for j in range(200)}} for i in range(200)}
        },
        "oneOf of 300 that overlap": lambda: {
            "oneOf": [{"type": "string", "maxLength": i} for i in range(300)]
        },
        "10,000 items by position": lambda: {"type": "array", "prefixItems": [text] * 10_000, "items": False},
        "items of items of enumerations": lambda: nested(
            9, lambda v: {"anyOf": [v, {"type": "array", "items": v}]}, {"enum": list(range(50))}
        ),
        "an empty range": lambda: {"type": "string", "minLength": 10, "maxLength": 9},
        "integers between 1 and 10^4000": lambda: {"type": "integer", "minimum": 1, "maximum": 10**4000},
        "the smallest floats": lambda: {"type": "number", "minimum": 5e-324, "maximum": 1.5e-323},
        "600 digits of a multiple": lambda: {"type": "number", "multipleOf": 10**600 + 1},
        "all formats, 50 times": lambda: {
            "anyOf": [
                {"type": "string", "format": name, "minLength": i}
                for i in range(50)
                for name in FORMATS.split()
            ]
        },
        "look-ahead": lambda: {"type": "string", "pattern": "^(?=.*a)(?!.*b)(.)\\1{1,100}$"},
        "a pattern of 500 kB": lambda: {"type": "string", "pattern": "(a|b)" * 100_000},
        "names by a pattern that explodes": lambda: {
            "propertyNames": {"pattern": "^(a|b)*a(a|b){20}$"},
            "additionalProperties": {"pattern": "^(c|d)*c(c|d){20}$", "type": "string"},
        },
        "keys of every character": lambda: {"properties": {chr(i) * 3: text for i in range(1, 0xD800, 9)}},
        "keywords of the wrong kind": lambda: {
            "properties": [1],
            "required": {"a": 1},
            "items": 3,
            "anyOf": {"a": 1},
            "enum": "x",
            "type": 5,
        },
        "if, then, else": lambda: nested(16, lambda v: {"if": v, "then": v, "else": text}, text),
    }


def grammars() -> dict[str, Callable[[], str]]:
    """Return grammars in GBNF and Lark by name."""

    def rules(count: int, body: Callable[[int], str], last: str = '"b"', mark: str = "::=") -> str:
        start = "root" if mark == "::=" else "start"
        lines = [
            f"{start} {mark} r0",
            *(f"r{i} {mark} {body(i)}" for i in range(count)),
            f"r{count} {mark} {last}",
        ]
        return "\n".join(lines)

    return {
        "4,000 rules in a row": lambda: rules(4000, lambda i: f'"a" r{i + 1}'),
        "20,000 rules in a row": lambda: rules(20000, lambda i: f'"a" r{i + 1}'),
        "50,000 rules in a row": lambda: rules(50000, lambda i: f'"a" r{i + 1}'),
        "199 rules in a row": lambda: rules(199, lambda i: f'"a" r{i + 1}'),
        "3,900 rules side by side": lambda: (
            "root ::= "
            + " | ".join(f"r{i}" for i in range(3900))
            + "\n"
            + "\n".join(f'r{i} ::= "a{i}"' for i in range(3900))
        ),
        "2^60 by doubling": lambda: rules(60, lambda i: f"r{i + 1} r{i + 1}"),
        "2^60 alternatives": lambda: rules(60, lambda i: f'"x" r{i + 1} | "y" r{i + 1} | r{i + 1} r{i + 1}'),
        "repetitions of repetitions": lambda: rules(8, lambda i: f"r{i + 1}{{100}}"),
        "ten thousand times": lambda: 'root ::= ("a" | "b"){10000}',
        "a million times": lambda: 'root ::= "a"{1000000}',
        "all ambiguous": lambda: 'root ::= e\ne ::= e e | e e e | "a" | ""',
        "empty for ever": lambda: 'root ::= e\ne ::= (("" | "")* | e)*',
        "left recursion": lambda: 'root ::= root "a" | root root "b" | "c"',
        "brackets 5,000 deep": lambda: "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
        "brackets 90 deep": lambda: "root ::= " + "(" * 90 + '"a"' + ")*" * 90,
        "10 MB": lambda: 'root ::= "a"\n' + "# comment\n" * 1_000_000,
        "1 MB of one literal": lambda: 'root ::= "' + "a" * 1_000_000 + '"',
        "a class of 60,000": lambda: "root ::= [" + "".join(map(chr, range(0x4E00, 0x9FFF))) * 3 + "]*",
        "no end of a string": lambda: 'root ::= "' + "\\\\" * 200_000,
        "lark, 4,000 rules in a row": lambda: rules(4000, lambda i: f'"a" r{i + 1}', mark=":"),
        "lark, 199 terminals in a row": lambda: (
            "start: T0\n" + "\n".join(f'T{i}: "a" T{i + 1}' for i in range(199)) + '\nT199: "b"'
        ),
        "lark, terminals that double": lambda: (
            "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "b"'
        ),
        "lark, a regular expression that explodes": lambda: "start: /(a|b)*a(a|b){22}(a|b|c)*c(a|b|c){18}/",
        "lark, 200 expressions that explode": lambda: (
            "start: "
            + " | ".join(f"t{i}" for i in range(200))
            + "\n"
            + "\n".join(f"t{i}: /(a|b)*a(a|b){{{i % 20 + 8}}}{i}/" for i in range(200))
        ),
        "lark, a schema inside": lambda: (
            'start: %json {"anyOf": [' + ", ".join(f'{{"const": {i}}}' for i in range(3000)) + "]}"
        ),
        "lark, an intersection that explodes": lambda: (
            "start: T\nT: /(.*a.{14}b.*)/ & /(.*b.{15}a.*)/ & /(.*c.{13}d.*)/"
        ),
        "one rule that is itself": lambda: "root ::= root",
        "a rule that is missing": lambda: "root ::= a b c",
        "3,900 rules with names of 250": lambda: rules(3900, lambda i: f'"a" | {"n" * 250} r0'),
        "a repetition of 10^18": lambda: 'root ::= ("a" | "b"){1,1000000000000000000}',
        "200 times 200 times 200": lambda: 'root ::= ((("a"|"b"){0,200} "c"){0,200} "d"){0,200}',
        "classes that end before they begin": lambda: "root ::= [z-a] [\\U0010FFFF-\\x00]*",
        "nothing in brackets, 30,000 times": lambda: "root ::= " + "() " * 30_000 + '"a"',
        "40,000 alternatives that begin alike": lambda: (
            "root ::= " + " | ".join(f'"prefix {i}"' for i in range(40_000))
        ),
        "an infinity of empty ways": lambda: 'root ::= a*\na ::= b*\nb ::= c*\nc ::= a* | "" | "x"?',
        "strings of escapes": lambda: 'root ::= "' + "\\x41" * 100_000 + '"',
        "marks of other marks": lambda: "root ::= " + "*+?" * 10_000,
        "lark, a repetition of 10^6": lambda: 'start: ("a" | "b")~1000000',
        "lark, imports": lambda: "%import common.WORD\n%import .." + "x." * 5000 + "y\nstart: WORD",
        "lark, ignored texts that explode": lambda: 'start: "a"\n%ignore /(a|b)*a(a|b){24}/',
        "lark, lazy expressions": lambda: (
            "start: "
            + " ".join(f"t{i}" for i in range(60))
            + "\n"
            + "\n".join(f"t{i}[lazy]: /(.|\\n)*x{i}/" for i in range(60))
        ),
        "lark, a schema of 1,000 references inside": lambda: (
            "start: %json " + json.dumps(chain(1000, property_of))
        ),
        "lark, an expression in an expression": lambda: (
            "start: %regex {" + "(" * 90 + "a" + "){1,9}" * 90 + "}"
        ),
        "lark, 400 terminals that intersect": lambda: (
            "start: T\nT: " + " & ".join(f"/(.*a.{{{i % 9}}}b.*)/" for i in range(400))
        ),
        "lark, a complement that explodes": lambda: "start: T\nT: ~/(.*a.{18})/ & ~/(.*b.{19})/",
    }


def expressions() -> dict[str, Callable[[], str]]:
    """Return regular expressions by name."""
    return {
        "10,000 alternatives": lambda: "|".join(f"choice {i}" for i in range(10000)),
        "200,000 alternatives": lambda: "|".join(f"choice {i}" for i in range(200000)),
        "1,000 times 1,000": lambda: "(a{1,1000}){1,1000}",
        "three times 100": lambda: "((a{0,100}){0,100}){0,100}",
        "2^22 states": lambda: "(a|b)*a(a|b){22}",
        "2^60 states": lambda: "(.*x.{60}y.*)",
        "forty wild cards": lambda: "(.*a){40}",
        "500 words": lambda: r"(\w+\s?){1,500}x",
        "classes of all letters": lambda: r"[\p{L}\p{N}\p{P}]{1,2000}",
        "brackets 300 deep": lambda: "(" * 300 + "a" + ")" * 300,
        "brackets 95 deep, repeated": lambda: "(" * 95 + "a" + "){1,3}" * 95,
        "optional 5,000 times": lambda: "a?" * 5000 + "a" * 5000,
        "ten levels of five": lambda: "(" * 10 + "a?" + "){0,5}" * 10,
        "any 1,000 around x, twice": lambda: "(?s).{0,1000}x.{0,1000}y.{0,1000}",
        "words of any language": lambda: r"(\p{Han}|\w|\S){1,3000}\d{500}",
        "case ignored, 20,000 letters": lambda: "(?i)" + "straße" * 3500,
        "the square of the plus": lambda: "(x+x+)+y" * 200,
        "anything but 60 words": lambda: "".join(f"(?!word{i})" for i in range(60)) + ".*",
        "back references": lambda: r"(a*)(b*)\1\2" * 50,
        "a thousand optional groups": lambda: "(ab?c?d?){0,9}" * 1000,
        "40 counted classes": lambda: "".join(f"[^{chr(97 + i % 26)}]{{0,99}}" for i in range(40)) + "z",
        "a class of a class": lambda: "[" * 5000 + "a" + "]" * 5000,
        "900 kB": lambda: "[ab]c?" * 150_000,
    }


def tools(count: int, parameters: Body) -> Body:
    functions = [{"name": f"tool{i}", "strict": True, "parameters": parameters} for i in range(count)]
    return {
        "tools": [{"type": "function", "function": each} for each in functions],
        "tool_choice": "required",
    }


def others() -> dict[str, tuple[str, Callable[[], Body]]]:
    """Return what is no grammar by itself."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}

    def values(count: int) -> dict[str, Body]:
        return {f"k{i}": {"a": i} for i in range(count)}

    return {
        "100,000 choices": (CHAT, lambda: HELLO | {"guided_choice": [f"c{i}" for i in range(100_000)]}),
        "2,000 tools of 200 parameters": (CHAT, lambda: HELLO | tools(2000, wide)),
        "40 tools of 200 parameters": (CHAT, lambda: HELLO | tools(40, wide)),
        "a tool of 1,000 references": (
            CHAT,
            lambda: HELLO | tools(1, chain(1000, property_of) | {"type": "object"}),
        ),
        "a tool whose parameters are an array": (CHAT, lambda: HELLO | tools(1, {"type": "array"})),
        "top_k of 2^63": (CHAT, lambda: HELLO | {"top_k": 2**63}),
        "top_k of 10^300": (CHAT, lambda: HELLO | {"top_k": 10**300}),
        "max_tokens of 2^70": (CHAT, lambda: HELLO | {"max_tokens": 2**70, "stop": ["e", "a"]}),
        "thinking_budget of 2^70": (CHAT, lambda: HELLO | {"thinking_budget": 2**70}),
        "280,000 template options": (
            CHAT,
            lambda: HELLO | {"chat_template_kwargs": dict.fromkeys(map(str, range(280_000)), 1)},
        ),
        "template options inside": (CHAT, lambda: HELLO | {"chat_template_kwargs": {"x": values(50_000)}}),
        "template options 95 deep": (
            CHAT,
            lambda: HELLO | {"chat_template_kwargs": {"x": nested(95, lambda v: {"a": [v]}, 1)}},
        ),
        "200 choices of a schema": (CHAT, lambda: HELLO | {"n": 200, "guided_json": {"type": "integer"}}),
        "a tool with a pattern that explodes": (
            CHAT,
            lambda: (
                HELLO
                | tools(
                    9,
                    {
                        "type": "object",
                        "properties": {"a": {"pattern": "(a|b)*a(a|b){22}", "type": "string"}},
                    },
                )
            ),
        ),
        "a tool whose name is an expression": (
            CHAT,
            lambda: {**HELLO, "tools": [{"type": "function", "function": {"name": "(a|b){1,9999}" * 9}}]},
        ),
        "stop strings, 10,000": (CHAT, lambda: HELLO | {"stop": [f"s{i}" for i in range(10_000)]}),
        "a stop string of 9 MB": (CHAT, lambda: HELLO | {"stop": "ab" * 4_500_000}),
        "a temperature of 10^300": (CHAT, lambda: HELLO | {"temperature": 10**300, "min_p": 0.5}),
        "a seed of 4,000 digits": (CHAT, lambda: HELLO | {"seed": 10**4000}),
        "template, 20,000 messages": (
            "/apply-template",
            lambda: {"messages": [{"role": "user", "content": "x" * 50}] * 20_000},
        ),
        "a role of 5 MB": (CHAT, lambda: {"messages": [{"role": "r" * 5_000_000, "content": "x"}]}),
        "a switch that is a list": (
            CHAT,
            lambda: HELLO | {"chat_template_kwargs": {"enable_thinking": ["x" * 500_000]}},
        ),
        "an effort of 5 MB": (CHAT, lambda: HELLO | {"reasoning_effort": "e" * 5_000_000}),
        "a name of 5 MB": (CHAT, lambda: HELLO | {"tool_choice": "t" * 5_000_000, **tools(1, wide)}),
        "responses, a format of 1,000 references": (
            RESPONSES,
            lambda: {
                "input": "x",
                "max_output_tokens": 2,
                "text": {"format": {"type": "json_schema", "name": "x", "schema": chain(1000, property_of)}},
            },
        ),
        "messages, a format of 500 anyOf": (
            MESSAGES,
            lambda: (
                HELLO | {"output_config": {"format": {"type": "json_schema", "schema": chain(500, any_of)}}}
            ),
        ),
        "Ollama, a format of 500 anyOf": (
            "/api/chat",
            lambda: {**HELLO, "stream": False, "format": chain(500, any_of)},
        ),
        "legacy completion, 4,000 rules": (
            "/v1/completions",
            lambda: {"prompt": "x", "max_tokens": 2, "grammar": grammars()["4,000 rules in a row"]()},
        ),
    }


def large(scale: float = 1.0) -> dict[str, Attack]:
    """Return requests that take long to refuse; all of them below 32 MiB, at `scale` 1."""

    def count(number: int) -> int:
        return max(1, int(number * scale))

    def said(text: str) -> Body:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}

    text = "The quick brown fox, and so on. " * count(10_000_000 // 32)
    return {
        "15M integers in an unknown field": (CHAT, lambda: HELLO | {"x": [1] * count(15_000_000)}),
        "10 MB of text": (CHAT, lambda: said(text)),
        "10 MB of text, count_tokens": ("/v1/messages/count_tokens", lambda: said(text)),
        "a word of 5 MB, /tokenize": ("/tokenize", lambda: {"content": "a" * count(5_000_000)}),
        "28 MiB of escaped pairs": (CHAT, lambda: said("\U0001f600" * count(28 * 2**20 // 12))),
        "500k biases": (CHAT, lambda: HELLO | {"logit_bias": {str(i): 1.0 for i in range(count(500_000))}}),
        "200k messages": (CHAT, lambda: {"messages": HELLO["messages"] * count(200_000)}),
    }


def encoded(body: Body) -> bytes:
    """Return a body as JSON, without spaces."""
    return json.dumps(body, separators=(",", ":")).encode()


def attacks() -> dict[str, Attack]:
    """Return path and body of every request."""

    def with_schema(make: Callable[[], Any]) -> Callable[[], Body]:
        form = {"type": "json_schema"}
        return lambda: HELLO | {"response_format": form | {"json_schema": {"name": "x", "schema": make()}}}

    def with_field(field: str, make: Callable[[], Any]) -> Callable[[], Body]:
        return lambda: HELLO | {field: make()}

    return {
        **{f"schema: {name}": (CHAT, with_schema(make)) for name, make in schemas().items()},
        **{f"grammar: {name}": (CHAT, with_field("grammar", make)) for name, make in grammars().items()},
        **{
            f"regex: {name}": (CHAT, with_field("guided_regex", make)) for name, make in expressions().items()
        },
        **others(),
        **large(),
    }
