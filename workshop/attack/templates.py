"""Chat templates that work for ever or fill the memory, if nothing stops them."""

from collections.abc import Iterator


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
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 100 + "x" + "{% endcall %}" * 100,
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% for i in [1] recursive %}{{ loop([1,1]) }}{{ loop([1,1]) }}{% endfor %}",
        "{% set x=namespace() %}{% set x.x=x %}{{ x|tojson }}{{ x|string }}{{ x == x }}",
        "{{ range(10**12)|list|length }}",
        "{{ range(99999)|map('string')|join('x'*100000)|length }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%.999999999f' % 1.5 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ 'x'.center(10**9)|length }}{{ 'x'.ljust(10**9)|length }}{{ '1'.zfill(10**9)|length }}",
        "{{ ('\t'*10**6).expandtabs(10**6)|length }}",
        "{{ ('a'*10**6)|replace('', 'x'*10**6)|length }}",
        "{{ ('a'*10**6).replace('a', 'x'*10**6)|length }}",
        "{{ ('\n'*10**6)|indent(10**6)|length }}",
        "{{ [1,2,3]|tojson(indent=10**9) }}",
        "{{ [1,2,3]|tojson(false, 10**9) }}",
        "{{ [1,2,3]|tojson(separators=('x' * 10**8, 'y')) }}",
        "{{ [1,2,3]|tojson(indent='x' * 10**8) }}",
        "{{ 10**10**10 }}",
        "{{ (10**4000)|string|length }}{{ (2**65000) * (2**65000) }}",
        "{{ ('9'*10**6)|int }}",
        "{{ 1.5|round(10**9) }}",
        "{{ [1]|batch(10**9, 'x')|list|length }}",
        "{{ [1]|slice(10**9)|list|length }}",
        "{{ lipsum(n=10**6) }}",
        "{{ strftime_now('%Y' * 1000000)|length }}{{ strftime_now('%99999999Y')|length }}",
        "{{ (range(99999)|list)|sort|unique|list|length }}" * 500,
        "{% for i in range(99999) %}{% set a=range(99999)|list|tojson %}{% endfor %}",
        "{% for i in range(99999) %}{{ messages|tojson|length }}{{ (messages|string)*99 }}{% endfor %}",
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
