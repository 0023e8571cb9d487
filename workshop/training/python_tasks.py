"""Programming tasks with executed solutions: template files and random variants of their tasks."""

import builtins
import copy
import functools
import keyword
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.training.domains import Domain, domain

TEMPLATES = Path(__file__).parent / "templates" / "tasks"
MAX_EXAMPLE_CHARACTERS = 72
MAX_EXAMPLES = 6
EMPTY = ("[]", "{}", "''", "None", "0", "[[]]")
# Alternatives to names in templates; the template's own is the likeliest.
_ROWS = (line.split("\t") for line in (TEMPLATES.parent / "synonyms.tsv").read_text().splitlines())
SYNONYMS: Mapping[str, tuple[str, ...]] = {name: tuple(others.split()) for name, others in _ROWS}
# `first` and `second` change together.
PAIRS = (("a", "b"), ("x", "y"), ("one", "other"), ("left", "right"))
IDENTIFIER = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
RESERVED = frozenset((*keyword.kwlist, *dir(builtins)))


@dataclass(frozen=True, slots=True)
class Task:
    """One task with all constants filled in; `{parameter}` in a statement is a parameter."""

    names: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    returns: str
    statements: tuple[str, ...]
    # Every body computes the same function.
    bodies: tuple[str, ...]
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    call: str
    value: str


@dataclass(frozen=True, slots=True)
class Solution:
    """A task in one choice of names, with executed examples."""

    name: str
    # With type hints in the chosen style, and without.
    signature: str
    bare_signature: str
    # With the parameters' names; and without them, if possible.
    statement: str
    spoken: str | None
    imports: tuple[str, ...]
    body: str
    other_bodies: tuple[str, ...]
    examples: tuple[Example, ...]
    parameter_notes: tuple[tuple[str, str], ...]
    returns: str


@dataclass(frozen=True, slots=True)
class Template:
    """A task as written in a file, with unresolved `@constants`."""

    task: Task
    constants: tuple[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]], ...]

    def draw(self, rng: random.Random) -> Task:
        values: dict[str, str] = {}
        for names, choices in self.constants:
            values.update(zip(names, rng.choice(choices), strict=True))
        if not values:
            return self.task

        def fill(text: str) -> str:
            return re.sub(r"@(\w+?)(?![a-zA-Z])", lambda m: values.get(m[1], m[0]), text)

        return Task(
            tuple(fill(name) for name in self.task.names),
            self.task.parameters,
            self.task.returns,
            tuple(fill(statement) for statement in self.task.statements),
            tuple(fill(body) for body in self.task.bodies),
            self.task.imports,
        )


@functools.cache
def templates() -> tuple[Template, ...]:
    """Return every task of the template files."""
    found = []
    for path in sorted(TEMPLATES.glob("*.txt")):
        blocks = re.split(r"^== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found += map(_parse, blocks[1:])
    return tuple(found)


def _parse(block: str) -> Template:
    head, *bodies = [piece.strip("\n") for piece in block.split("\n--\n")]
    names, signature, *rest = head.splitlines()
    arguments, _, returns = signature.partition(") -> ")
    pairs = [argument.split("=") for argument in arguments.strip("(").split(", ")]
    constants, imports, statements = [], [], []
    for line in rest:
        if line.startswith("@"):
            keys, _, values = line.partition(" = ")
            constants.append((tuple(key.strip("@, ") for key in keys.split(", ")), _choices(values)))
        elif line.startswith("^"):
            imports.append(line[1:])
        else:
            statements.append(line)
    task = Task(
        tuple(names.split(" | ")),
        tuple((name, kind) for name, kind in pairs),
        returns,
        tuple(statements),
        tuple(bodies),
        tuple(imports),
    )
    return Template(task, tuple(constants))


def _choices(values: str) -> tuple[tuple[str, ...], ...]:
    interval = re.fullmatch(r"(\d+)\.\.(\d+)", values)
    if interval:
        return tuple((str(value),) for value in range(int(interval[1]), int(interval[2]) + 1))
    parts = values.split("; ") if ";" in values else values.split(", ")
    return tuple(tuple(part.split(":")) for part in parts)


def solve(task: Task, rng: random.Random) -> Solution:
    """Return a solution with random names; every body is run on the examples, and must agree."""
    renamed = _names(task, rng)
    name = rng.choice((task.names[0], rng.choice(task.names)))
    bodies = [_rename(body, renamed).replace("@self", name) for body in task.bodies]
    kinds = {parameter: domain(kind) for parameter, kind in task.parameters}
    parameters = [renamed.get(parameter, parameter) for parameter in kinds]
    order = list(range(len(bodies)))
    rng.shuffle(order)
    chosen = bodies[order[0]]
    imports = tuple(line for line in task.imports if re.search(rf"\b{line.split()[-1]}\.", chosen))
    examples = _run(task, name, parameters, bodies, kinds=list(kinds.values()), rng=rng)
    statement = rng.choice(task.statements)
    style = rng.choice(("none", "none", "builtin", "typing"))
    hints = [_hint(kind.hint, style) for kind in kinds.values()]
    typed = ", ".join(f"{p}: {h}" for p, h in zip(parameters, hints, strict=True))
    returns = _hint(task.returns, style)
    bare = f"def {name}({', '.join(parameters)}):"
    needed = sorted({word for word in re.findall(r"[A-Z]\w+", f"{typed} {returns}") if word != "None"})
    if style == "typing" and needed:
        imports = (*imports, f"from typing import {', '.join(needed)}")
    return Solution(
        name=name,
        signature=bare if style == "none" else f"def {name}({typed}) -> {returns}:",
        bare_signature=bare,
        statement=re.sub(r"\{(\w+)\}", lambda m: renamed.get(m[1], m[1]), statement),
        spoken=_spoken(statement, kinds, renamed),
        imports=imports,
        body=chosen,
        other_bodies=tuple(bodies[i] for i in order[1:]),
        examples=examples,
        parameter_notes=tuple(
            (parameter, kind.noun or {"int": "a whole number", "str": "a string"}.get(kind.hint, "a point"))
            for parameter, kind in zip(parameters, kinds.values(), strict=True)
        ),
        returns=task.returns,
    )


def _names(task: Task, rng: random.Random) -> dict[str, str]:
    """Return new names for some identifiers, none of which is in use already."""
    used = set(IDENTIFIER.findall("\n".join((*task.bodies, *task.imports, *task.names))))
    used.update(parameter for parameter, _ in task.parameters)
    # a name that is also a word of the sentence would be ambiguous: "the values of values"
    taken = used.union(RESERVED, *(statement.split() for statement in task.statements))
    renamed: dict[str, str] = {}
    for name in sorted(used & SYNONYMS.keys()):
        new = rng.choice(SYNONYMS[name]) if rng.random() < 0.6 else name
        if new not in taken:
            taken.add(new)
            renamed[name] = new
    pair = rng.choice(PAIRS)
    if {"first", "second"} <= used and not taken.intersection(pair) and rng.random() < 0.4:
        renamed |= zip(("first", "second"), pair, strict=True)
    return renamed


def _rename(code: str, renamed: Mapping[str, str]) -> str:
    return IDENTIFIER.sub(lambda match: renamed.get(match[0], match[0]), code)


def _hint(hint: str, style: str) -> str:
    if style != "typing":
        return hint
    hint = re.sub(r"\b(list|dict|tuple)\b", lambda match: match[1].capitalize(), hint)
    return re.sub(r"^(.*) \| None$", r"Optional[\1]", hint)


def _spoken(statement: str, kinds: Mapping[str, Domain], renamed: Mapping[str, str]) -> str | None:
    """Return the statement with "a string" and "the string" instead of names, if that makes a sentence."""
    nouns = [kind.noun for kind in kinds.values() if kind.noun]
    if len(set(nouns)) < len(nouns):
        return None
    if re.search(r"(list|string|numeral|name|address|given|dictionary|matrix|lists|points) \{", statement):
        return None
    if re.search(r"\{\w+\}, (which|a |written|strings)", statement):
        return None
    seen: set[str] = set()

    def say(match: re.Match[str]) -> str:
        kind = kinds.get(match[1])
        if kind is None or kind.noun is None:
            return renamed.get(match[1], match[1])
        if match[1] in seen:
            return "the " + kind.noun.split(" of ")[0].split()[-1]
        seen.add(match[1])
        return kind.noun

    return re.sub(r"\{(\w+)\}", say, statement)


def compile_function(code: str, name: str) -> Callable[..., Any]:
    """Return the function of that name that the code defines."""
    namespace: dict[str, Any] = {}
    exec(compile(code, "<task>", "exec"), namespace)
    return namespace[name]


def indented(code: str) -> str:
    return "\n".join("    " + line if line else line for line in code.splitlines())


def _run(
    task: Task,
    name: str,
    parameters: Iterable[str],
    bodies: list[str],
    *,
    kinds: list[Domain],
    rng: random.Random,
) -> tuple[Example, ...]:
    head = f"def {name}({', '.join(parameters)}):\n"
    imports = "\n".join(task.imports) + "\n"
    functions = [compile_function(imports + head + indented(body), name) for body in bodies]
    examples: list[Example] = []
    values: set[str] = set()
    for attempt in range(24):
        arguments = [kind.draw(rng) for kind in kinds]
        results = [function(*copy.deepcopy(arguments)) for function in functions]
        if any(result != results[0] for result in results):
            if all(isinstance(result, float) for result in results):
                continue  # a rounding tie, on which the bodies differ: not a usable example
            raise ValueError(f"task {task.names[0]}: {arguments} gives {results}, needed: one value")
        example = Example(f"{name}({', '.join(map(repr, arguments))})", repr(results[0]))
        if len(example.call) > MAX_EXAMPLE_CHARACTERS or len(example.value) > MAX_EXAMPLE_CHARACTERS:
            continue
        # different results are preferred; a constant result is used only if there is no other
        if attempt < 12 and (example.value in values or (example.value in EMPTY and not examples)):
            continue
        if all(example.call != other.call for other in examples):
            values.add(example.value)
            examples.append(example)
        if len(examples) == MAX_EXAMPLES:
            break
    return tuple(examples)
