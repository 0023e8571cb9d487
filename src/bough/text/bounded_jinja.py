"""BoundedEnvironment: Jinja's sandbox with bounds on the template, repetitions, sizes of values and time.

A chat template is a program from a file. The sandbox keeps it from the machine, but not from filling its
memory or from working for ever: "a" * 3000000000, a text that is doubled forty times, the text of a list that
holds itself twice, forty levels deep. Much of that is one call into C, in which no clock is looked at. So the
sizes of values are measured before an operation, as often as they occur in them, and count towards a budget.
"""

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg, generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

from bough.errors import TemplateFailed

MAX_SECONDS = 2.0  # of the processor
MAX_SOURCE = 256_000  # characters; the largest of 66 models' templates has 17,000
MAX_NODES, MAX_DEPTH = 20_000, 120  # of the syntax tree; real ones have 1,300 and 29
MAX_BITS = 1 << 16  # of an integer
MAX_RARE = 2_000  # characters that an operation takes which chat templates do not use
HINT = "`raw` sends the prompt without a chat template"
# Not names that a template can write.
BUDGET = "render budget"
CONCAT, BUILT, COMPARED = "bounded concatenation", "measured literal", "measured operand"
_VALUE = 200  # what a value inside another costs, in characters
_JSON_WIDTH = 8  # of an indent or a separator
_CLOCK = 4096  # characters after which the clock is looked at
_WIDTH = re.compile(r"[0-9]{6,}|[*{]")
_LISTS = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_HOLDERS = (dict, *_LISTS)
_ENDLESS = 1 << 62


class Budget:
    """What one rendering may still use; calling it counts a repetition."""

    def __init__(self, repetitions: int, characters: int):
        self._repetitions, self._characters = repetitions, characters
        self._most_repetitions, self._most_characters = repetitions, characters
        self._end = time.thread_time() + MAX_SECONDS

    def __call__(self) -> None:
        self._repetitions -= 1
        if self._repetitions < 0:
            raise TemplateFailed(f"the chat template repeats over {self._most_repetitions} times", HINT)
        if not self._repetitions % 16:
            self._look_at_clock()

    def spend(self, characters: int) -> None:
        """Count characters, or what costs as much, that an operation is about to read or to produce."""
        if characters > 0:
            self._characters -= characters
            if self._characters < 0:
                raise TemplateFailed(f"the chat template makes over {self._most_characters} characters", HINT)
            if characters > _CLOCK:
                self._look_at_clock()

    def read(self, value: Any, weight: int = 1) -> None:
        """Count a value that is about to be read as a whole, or written as text."""
        size = len(value) if type(value) is str else measure(value, self._characters // weight)
        self.spend(weight * size)

    def read_rarely(self, name: str, *values: Any) -> None:
        for value in values:
            if measure(value, MAX_RARE) > MAX_RARE:
                raise TemplateFailed(
                    f"the chat template uses {name} on more than {MAX_RARE} characters", HINT
                )

    def _look_at_clock(self) -> None:
        if time.thread_time() > self._end:
            raise TemplateFailed(f"the chat template runs over {MAX_SECONDS:.0f} s", HINT)


_active: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def within(budget: Budget) -> Generator[None]:
    """Count what templates do in this context."""
    token = _active.set(budget)
    try:
        yield
    finally:
        _active.reset(token)


def measure(value: Any, most: int) -> int:
    """Return the characters of a value's text, about; any number above `most` if it has more."""
    if isinstance(value, str):
        return len(value)
    size, pending = 0, [value]
    while pending and size <= most:
        inner = pending.pop()
        if isinstance(inner, str):
            size += len(inner) + 1
            continue
        size += _VALUE
        if type(inner) is Namespace:
            inner = inner._Namespace__attrs
        if isinstance(inner, dict):
            if size + len(inner) > most:
                return most + 1
            pending += inner
            pending += inner.values()
        elif isinstance(inner, _LISTS):
            if size + len(inner) > most:
                return most + 1
            pending += inner
    return size


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any):
        super().__init__(**options, finalize=_written)
        charges = {**dict.fromkeys(_COMPARE, _compared), "lower": _text(8), "upper": _text(8)}
        tests: dict[str, Any] = self.tests
        tests |= {name: _bounded(tests[name], charge) for name, charge in charges.items()}

    def bounded(self, source: str) -> nodes.Template:
        """Return the syntax tree with a count in every loop and macro, the two ways to repeat."""
        if len(source) > MAX_SOURCE:
            raise TemplateFailed(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE} can be used", HINT
            )
        self.filters.update(
            {
                name: _bounded(filter, _FILTERS.get(name, partial(_rarely, name)), gathers=name in _GATHERING)
                for name, filter in self.filters.items()
                if name not in _FREE_FILTERS
            }
        )
        tree = self.parse(source)
        _check_tree(tree)
        for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            block.body.insert(0, nodes.ExprStmt(_call(BUDGET, [])))
        functions: dict[str, Any] = self.globals
        functions |= {CONCAT: _concat, BUILT: _built, COMPARED: _operand}
        return _Measured().visit(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (budget := _active.get()) is not None:
            budget.spend(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(function)
        if kind is Budget or function is _concat or function is _built or function is _operand:
            return function(*args)
        if kind is not Macro and (budget := _active.get()) is not None:
            _count_call(budget, function, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        return None if inner is None else partial(_format, inner, value.__self__)


def _check_tree(tree: nodes.Template) -> None:
    count, pending = 0, list[tuple[nodes.Node, int]]([(tree, 1)])
    while pending:
        node, depth = pending.pop()
        count += 1
        if depth > MAX_DEPTH or count > MAX_NODES:
            what = (
                f"nests deeper than {MAX_DEPTH} levels"
                if depth > MAX_DEPTH
                else f"has over {MAX_NODES} parts"
            )
            raise TemplateFailed(f"the chat template {what}", HINT)
        pending += [(child, depth + 1) for child in node.iter_child_nodes()]


class _Measured(NodeTransformer):
    """Measures what is compared and what lists hold: one that holds itself twice doubles with every level."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(CONCAT, node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in node.items) else _call(BUILT, [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if constant or node.ctx != "load" else _call(BUILT, [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return (
            node if all(isinstance(pair.value, nodes.Const) for pair in node.items) else _call(BUILT, [node])
        )

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(isinstance(each, nodes.Const) for each in (node.expr, *(op.expr for op in node.ops))):
            node.expr = _call(COMPARED, [node.expr])
            for operand in node.ops:
                operand.expr = _call(COMPARED, [operand.expr])
        return node


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    function = nodes.Getitem(nodes.ContextReference(), nodes.Const(name), "load")
    return nodes.Call(function, arguments, [], None, None)


def _written(value: Any) -> Any:
    """Count what a template writes."""
    if (budget := _active.get()) is not None:
        budget.read(value)
    return value


def _concat(*values: Any) -> str:
    if (budget := _active.get()) is not None:
        for value in values:
            budget.read(value)
    return "".join([str(value) for value in values])


def _built(value: Any) -> Any:
    members = value.values() if isinstance(value, dict) else value
    if (budget := _active.get()) is not None and any(isinstance(each, _HOLDERS) for each in members):
        budget.read(value)
    return value


def _operand(value: Any) -> Any:
    if (budget := _active.get()) is not None and isinstance(value, _HOLDERS):
        budget.read(value)
    return value


def _result_size(operator: str, left: Any, right: Any) -> int:
    match operator:
        case "+" if isinstance(left, tuple):
            return measure((left, right), _ENDLESS)
        case "+" if isinstance(left, str | list) and isinstance(right, Sized):
            return len(left) + len(right)
        case "*":
            return _product(left, right)
        case "**" if isinstance(left, int) and isinstance(right, int):
            return _if_over(left.bit_length() * abs(right), MAX_BITS)
        case "%" if isinstance(left, str):
            return _format_size(left, right)
    return 0


def _product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _if_over(left.bit_length() + right.bit_length(), MAX_BITS)
    count, value = (left, right) if isinstance(left, int) else (right, left)
    if not isinstance(count, int) or not isinstance(value, Sized):
        return 0
    return count * (measure(value, MAX_RARE) if isinstance(value, tuple) else len(value) * _weight(value))


def _weight(value: Any) -> int:
    """Return what an item of a value costs that is copied as it is."""
    return 1 if isinstance(value, str) else 16


def _if_over(size: int, limit: int) -> int:
    """Return more than any budget for a size over the limit."""
    return 0 if size <= limit else _ENDLESS


def _format_size(text: str, values: Any) -> int:
    """Return the size of a formatted text, which its widths may make larger than any value."""
    arguments = list(values.values()) if isinstance(values, Mapping) else values
    arguments = list(arguments) if isinstance(arguments, list | tuple) else [arguments]
    widths = [int(each) for each in re.findall("[0-9]+", text) if len(each) < 20]
    if any(len(each) >= 20 for each in re.findall("[0-9]+", text)):
        return _ENDLESS
    nested = [abs(each) for each in arguments if isinstance(each, int)] if _WIDTH.search(text) else []
    return len(text) + sum(widths) + sum(nested) + measure(arguments, 1 << 27)


def _format(inner: Callable[..., str], text: str, *args: Any, **kwargs: Any) -> str:
    if re.search(r"[0-9]{6}", text) or (re.search(r"\{[^{}]*\{", text) and _largest(args, kwargs) > 10**6):
        raise TemplateFailed("the chat template formats a text with a width over 100000", HINT)
    if (budget := _active.get()) is not None:
        budget.read((text, args, kwargs), 1 + text.count("{"))
    return inner(*args, **kwargs)


def _largest(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return max((abs(each) for each in (*args, *kwargs.values()) if isinstance(each, int)), default=0)


Charge = Callable[..., None]  # of the budget, the value, and what else an operation is given


def _bounded(operation: Callable[..., Any], charge: Charge, *, gathers: bool = False) -> Callable[..., Any]:
    """Return a filter or test that counts what it is about to do; `gathers`: it reads whole generators."""
    first = _PassArg.from_obj(operation) is not None  # before the value

    @wraps(operation)
    def bounded(*args: Any, **options: Any) -> Any:
        if (budget := _active.get()) is None or len(args) <= first:
            return operation(*args, **options)
        value = args[first]
        if gathers and isinstance(value, Iterator):
            value = list(value)
            args = (*args[:first], value, *args[first + 1 :])
        with suppress(TypeError, ValueError, AttributeError):  # wrong arguments: the operation says so
            charge(budget, value, *args[first + 1 :], **options)
        return operation(*args, **options)

    return bounded


def _rarely(name: str, budget: Budget, *values: Any, **options: Any) -> None:
    budget.read_rarely(name, *values, *options.values())


def _text(weight: int) -> Charge:
    return lambda budget, value, *_rest, **_options: budget.read(value, weight)


def _json(
    budget: Budget,
    value: Any,
    _ascii: Any = False,
    indent: Any = 0,
    separators: Any = "",
    *_rest: Any,
    **_: Any,
) -> None:
    budget.read(value, 8)
    width = indent if isinstance(indent, int) else measure(indent or "", _JSON_WIDTH)
    if max(width, *map(len, separators or ("",))) > _JSON_WIDTH:
        raise TemplateFailed(
            f"the chat template writes JSON with over {_JSON_WIDTH} characters of space", HINT
        )


def _shallow(budget: Budget, value: Any, count: Any = 0, *_rest: Any, **_options: Any) -> None:
    budget.spend(
        16 * (len(value) if isinstance(value, Sized) else 0) + 16 * (count if isinstance(count, int) else 0)
    )


def _compared(budget: Budget, *values: Any, **_options: Any) -> None:
    for value in values:
        if not isinstance(value, str):
            budget.read(value)


def _summed(budget: Budget, value: Any, _attribute: Any = None, start: Any = 0) -> None:
    budget.read(value, 1 if isinstance(start, int | float) else 1 + len(value))


def _padded(budget: Budget, text: Any, width: Any = 80, *_rest: Any, **_options: Any) -> None:
    budget.read(text)
    budget.spend(int(width))


def _replaced(budget: Budget, text: Any, old: Any, new: Any, *_rest: Any, **_options: Any) -> None:
    for value in (text, old, new):
        budget.read(value)
    budget.spend(str(text).count(str(old)) * len(str(new)))


def _indented(budget: Budget, text: Any, width: Any = 4, *_rest: Any, **_options: Any) -> None:
    budget.read(text, 2)
    budget.spend((str(text).count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))


def _joined(budget: Budget, items: Any, separator: Any = "", *_rest: Any, **_options: Any) -> None:
    budget.read(items, 2)
    budget.read(separator, max(1, len(items)))


def _formatted(budget: Budget, text: Any, *args: Any, **options: Any) -> None:
    budget.read(text)
    budget.spend(_format_size(str(text), options or args))


def _split(budget: Budget, text: str, separator: str | None = None, *_rest: Any) -> None:
    parts = text.count(separator) if separator else len(text) // 2
    budget.spend(len(text) + _VALUE * (parts + 1))


def _expanded(budget: Budget, text: str, size: int = 8) -> None:
    budget.spend(len(text) + text.count("\t") * size)


def _count_call(budget: Budget, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Count what a function or a method is about to read or to make."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, str):
        charge = _METHODS.get(name)
        if charge is None:
            raise TemplateFailed(f"the chat template uses str.{name}, which no model's template needs", HINT)
        with suppress(TypeError, ValueError, AttributeError):
            charge(budget, owner, *args, **kwargs)
    elif isinstance(owner, dict) and name in ("get", "items", "keys", "values"):
        return
    elif isinstance(owner, int | float | bytes):
        raise TemplateFailed(f"the chat template uses {type(owner).__name__}.{name}", HINT)
    elif function is generate_lorem_ipsum:
        n, _html, _least, most = (*args, *(5, True, 20, 100)[len(args) :])
        budget.spend(12 * int(kwargs.get("n", n)) * int(kwargs.get("max", most)))
    elif function not in _FREE_FUNCTIONS and not isinstance(function, partial):
        budget.read((args, kwargs))


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _each(names: str, charge: Charge) -> dict[str, Charge]:
    return dict.fromkeys(names.split(), charge)


_COMPARE = _names("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne")
_FREE_FILTERS = _names("attr count d default first items last length map random reject rejectattr") | _names(
    "select selectattr"
)
_GATHERING = _names("batch groupby join list max min reverse slice sort sum unique")
_FREE_FUNCTIONS = (Namespace, range, jinja2.utils.Cycler, jinja2.utils.Joiner)
_FILTERS: Mapping[str, Charge] = {
    **_each("string safe trim", _text(1)),
    **_each("capitalize e escape forceescape lower truncate upper urlencode", _text(8)),
    **_each("dictsort groupby max min sort unique", _text(4)),
    **_each("batch list reverse slice", _shallow),
    "center": _padded,
    "format": _formatted,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "sum": _summed,
    "tojson": _json,
}
_METHODS: Mapping[str, Charge] = {
    **_each("count endswith find index partition removeprefix removesuffix startswith strip", _text(1)),
    **_each("lstrip rfind rindex rpartition rstrip", _text(1)),
    **_each("isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper", _text(1)),
    **_each("capitalize casefold lower swapcase title upper", _text(8)),
    **_each("center ljust rjust zfill", _padded),
    "expandtabs": _expanded,
    "format": _text(1),
    "join": lambda budget, separator, items: _joined(budget, items, separator),
    "replace": _replaced,
    "rsplit": _split,
    "split": _split,
    "splitlines": lambda budget, text, *_rest: budget.read(text, 32),
}
