"""Chat templates that work for ever or fill the memory, if nothing stops them."""

from collections.abc import Iterator
from pathlib import Path


def templates() -> Iterator[str]:
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
    yield from Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    yield from (
        "{{ " + ".".join("a" * 50000) + " }}",
        "{{ " + "+".join("1" * 50000) + " }}",
        "{{ " + "(" * 50000 + " }}",
        "{{a}}" * 40000,
        "{% macro f() %}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 100 + "x" + "{% endcall %}" * 100,
        "{{ ('\t'*10**6).expandtabs(10**6)|length }}",
        "{{ ('\n'*10**6)|indent(10**6)|length }}",
        "{{ (range(99999)|list)|sort|unique|list|length }}" * 500,
        "{% filter upper %}" * 110 + "x" + "{% endfilter %}" * 110,
        "{% if 1 %}" * 9000 + "{% endif %}" * 9000,
        "".join(f"{{% macro m{i}() %}}{{{{ m{i + 1}() }}}}{{% endmacro %}}" for i in range(3000))
        + "{{ m0() }}",
        "{{-" + " " * 250_000 + "-}}",
        "{%" * 100_000,
        "{#" * 100_000,
        "{{ '" + "\\" * 200_000 + "' }}",
        "{{ x" + "[0]" * 60_000 + " }}",
        "{{ x" + "|e" * 60_000 + " }}",
        "{{ not " + "not " * 50_000 + "x }}",
        "{{ 1 if " + "1 if 1 else " * 20_000 + "1 else 1 }}",
        "{% set a = [" + "[" * 50_000 + "]" * 50_000 + "] %}",
    )
