"""BoundedEnvironment: Jinja's sandbox with bounds on repetitions, characters and time.

A chat template is a program from a file. The sandbox keeps it from the machine, but not from filling its
memory: "a" * 3000000000, center(2000000000), or a text that is doubled forty times.
"""

import re
import time
from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg, generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

from bough.errors import TemplateFailed

MAX_SECONDS = 30.0
MAX_BITS = 1 << 16  # of an integer
HINT = "`raw` sends the prompt without a chat template"
# Not names that a template can write.
BUDGET = "render budget"
CONCAT = "bounded concatenation"
_WIDTH = re.compile(r"[0-9]{6,}|[*{]")


class Budget:
    """What one rendering may still use; calling it counts a repetition."""

    def __init__(self, repetitions: int, characters: int):
        self._repetitions, self._characters = repetitions, characters
        self._most_repetitions, self._most_characters = repetitions, characters
        self._end = time.monotonic() + MAX_SECONDS

    def __call__(self) -> None:
        self._repetitions -= 1
        if self._repetitions < 0:
            raise TemplateFailed(f"the chat template repeats over {self._most_repetitions} times", HINT)
        if time.monotonic() > self._end:
            raise TemplateFailed(f"the chat template runs over {MAX_SECONDS:.0f} s", HINT)

    def spend(self, characters: int) -> None:
        """Count characters, or items of a list, that an operation is about to produce."""
        self._characters -= max(0, characters)
        if self._characters < 0:
            raise TemplateFailed(f"the chat template makes over {self._most_characters} characters", HINT)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any):
        super().__init__(**options)
        for name, size in _FILTERS.items():
            self.filters[name] = _bounded_filter(self.filters[name], size)

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Insert a count in every loop and macro, the two ways to repeat, and replace the operator ~."""
        for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            block.body.insert(0, nodes.ExprStmt(_call(BUDGET, [])))
        functions: dict[str, Any] = self.globals
        functions[CONCAT] = _concat
        return _Concatenations().visit(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: Budget = context[BUDGET]
        match operator:
            case "+" if isinstance(left, str | list | tuple) and isinstance(right, Sized):
                budget.spend(len(left) + len(right))
            case "*":
                budget.spend(_product(left, right))
            case "**" if isinstance(left, int) and isinstance(right, int):
                budget.spend(_if_over(left.bit_length() * abs(right), MAX_BITS))
            case "%" if isinstance(left, str):
                budget.spend(_format_size(left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str) and name in _METHODS:
            context[BUDGET].spend(_guess(_METHODS[name], owner, *args, **kwargs))
        if function is generate_lorem_ipsum:
            context[BUDGET].spend(_guess(_paragraphs, *args, **kwargs))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        return None if inner is None else partial(_format, inner, value.__self__)


class _Concatenations(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(CONCAT, node.nodes)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    function = nodes.Getitem(nodes.ContextReference(), nodes.Const(name), "load")
    return nodes.Call(function, arguments, [], None, None)


@jinja2.pass_context
def _concat(context: Context, *values: Any) -> str:
    texts = [str(value) for value in values]
    context[BUDGET].spend(sum(map(len, texts)))
    return "".join(texts)


def _bounded_filter(filter: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    passes = _PassArg.from_obj(filter)

    @jinja2.pass_context
    def bounded(context: Context, *args: Any, **kwargs: Any) -> Any:
        context[BUDGET].spend(_guess(size, *args, **kwargs))
        if passes is _PassArg.eval_context:
            return filter(context.eval_ctx, *args, **kwargs)
        if passes is _PassArg.environment:
            return filter(context.environment, *args, **kwargs)
        return filter(*args, **kwargs)

    return bounded


def _guess(size: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    try:
        return size(*args, **kwargs)
    except (TypeError, ValueError, AttributeError):
        return 0  # wrong arguments: the function itself says so


def _product(left: Any, right: Any) -> int:
    match left, right:
        case int(), int():
            return _if_over(left.bit_length() + right.bit_length(), MAX_BITS)
        case int(), Sized():
            return left * len(right)
        case Sized(), int():
            return len(left) * right
    return 0


def _if_over(size: int, limit: int) -> int:
    """Return more than any budget for a size over the limit."""
    return 0 if size <= limit else 1 << 62


def _format_size(text: str, values: Any) -> int:
    """Return the size of a formatted text, which its widths may make larger than any value."""
    given = list(values.values()) if isinstance(values, Mapping) else values
    given = list(given) if isinstance(given, list | tuple) else [given]
    widths = [int(each) for each in re.findall("[0-9]+", text) if len(each) < 20]
    if any(len(each) >= 20 for each in re.findall("[0-9]+", text)):
        return 1 << 62
    nested = [abs(each) for each in given if isinstance(each, int)] if _WIDTH.search(text) else []
    return len(text) + sum(widths) + sum(nested) + sum(len(each) for each in given if isinstance(each, str))


def _format(inner: Callable[..., str], text: str, *args: Any, **kwargs: Any) -> str:
    # No rendering is known here; a format beyond this is no chat template's.
    if re.search(r"[0-9]{6}", text) or (re.search(r"\{[^{}]*\{", text) and _largest(args, kwargs) > 10**6):
        raise TemplateFailed("the chat template formats a text with a width over 100000", HINT)
    return inner(*args, **kwargs)


def _largest(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return max((abs(each) for each in (*args, *kwargs.values()) if isinstance(each, int)), default=0)


def _paragraphs(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> int:
    return 12 * n * max


def _padded(text: Any, width: int = 80, *_rest: Any, **_options: Any) -> int:
    return max(len(str(text)), int(width))


def _replaced(text: Any, old: Any, new: Any, *_rest: Any, **_options: Any) -> int:
    text = str(text)
    return len(text) + text.count(str(old)) * len(str(new))


def _indented(text: Any, width: Any = 4, *_rest: Any, **_options: Any) -> int:
    step = len(width) if isinstance(width, str) else int(width)
    return len(str(text)) + (str(text).count("\n") + 1) * step


def _joined(items: Any, separator: Any = "", *_rest: Any, **_options: Any) -> int:
    # Only what can be read twice; a generator's items were counted when they were made.
    found = items if isinstance(items, list | tuple | str) else ()
    return sum(len(each) if isinstance(each, str) else 8 for each in found) + len(found) * len(str(separator))


def _sized(items: Any, *_rest: Any, **_options: Any) -> int:
    return len(items) if isinstance(items, Sized) else 0


def _batched(items: Any, count: int, *_rest: Any, **_options: Any) -> int:
    return _sized(items) + int(count)


_METHODS: Mapping[str, Callable[..., int]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": lambda text, size=8: len(text) + text.count("\t") * int(size),
    "replace": _replaced,
    "join": lambda separator, items: _joined(items, separator),
}
_FILTERS: Mapping[str, Callable[..., int]] = {
    "center": _padded,
    "replace": _replaced,
    "indent": _indented,
    "join": _joined,
    "format": lambda text, *args, **kwargs: _format_size(str(text), kwargs or args),
    "list": _sized,
    "batch": _batched,
    "slice": _batched,
    "wordwrap": lambda text, width=79, _long=True, wrap="\n", *_rest, **_options: (
        len(text) * (1 + len(wrap or "\n"))
    ),
}
