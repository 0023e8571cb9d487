"""Generator of varied function heads: long docstrings, examples of every form, helper functions.

The completion repeats the head and adds a body. Most of a head is unpredictable, so it trains the model to
copy, even where the same few words and symbols recur.
"""

import functools
import random
import re
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from workshop.training.documents import Dialogue, dialogue, fenced
from workshop.training.python_tasks import Example, Solution, indented
from workshop.training.task_documents import (
    completion_request,
    draw_solution,
    function,
    solution_key,
    third_person,
)

TEMPLATES = Path(__file__).parent / "templates"
TYPING = ("Any", "Dict", "List", "Optional", "Tuple", "Union")
MODULES = ("collections", "functools", "itertools", "math", "re", "string")
HELPER_SHARE, RENAMED_SHARE = 0.1, 0.4
MAX_HELPER_CHARACTERS = 300
MAX_CHARACTERS = 1200  # of a completion: with its request it fits into a training row
OWN_WORDS, OWN_SHARE = 5, 0.45  # per docstring, and the probability of reusing one of them
# Few symbols, so that only the position determines the next one.
ALPHABETS = (
    ("(", ")"), ("(", ")", " "), ("[", "]"), ("<", ">"), ("0", "1"), ("a", "b"), ("x", "y", "z"), (".", "#"),
    ("o", ".", "|", " "), ("A", "B", "C"), ("+", "-"), ("N", "E", "S", "W"), ("H", "T"), ("C", "G", "A", "T"),
)  # fmt: skip
NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ONSETS = re.findall(r"\w+", "b br c d dr f fl g gr h j k l m n p pl qu r s st t tr v w z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ee", "ou")
CODAS = ("", "", "n", "r", "l", "s", "t", "m", "ck", "nd", "rt", "x")
# Their bytes are rare tokens.
_FOREIGN = "café naïve Straße señor → ≤ ≥ × — … ‘a’ “so” π 5° ½ √2 λ"
FOREIGN = tuple(_FOREIGN.split())
PEOPLE = ("Anna", "Ben", "Clara", "Hugo", "Mia", "Noah", "Olga", "Paul")


def head_dialogue(rng: random.Random) -> Dialogue:
    """Return a request with a function's head and a new docstring, completed with the whole function."""
    while True:
        author, solution = _Author(rng), draw_solution(rng)
        key = solution_key(solution)
        if rng.random() < RENAMED_SHARE:
            solution = _renamed(solution, author.name())
        head = "\n".join([*_above(solution, rng), solution.signature, *author.docstring(solution)])
        code = f"{head}\n{indented(solution.body)}"
        if len(code) <= MAX_CHARACTERS:
            asked = completion_request("\n" * rng.choice((0, 0, 1, 2)) + head, rng)
            return dialogue("heads", asked, fenced(code), key=key)


def _renamed(solution: Solution, name: str) -> Solution:
    """Return the same function under another name."""

    def new(text: str) -> str:
        return re.sub(rf"\b{solution.name}\(", f"{name}(", text)

    return replace(
        solution,
        name=name,
        signature=new(solution.signature),
        body=new(solution.body),
        examples=tuple(Example(new(each.call), each.value) for each in solution.examples),
    )


def _above(solution: Solution, rng: random.Random) -> list[str]:
    """Return import lines, some of them unused, and sometimes a helper function."""
    imports = list(solution.imports)
    if rng.random() < 0.25 and not any("typing" in line for line in imports):
        names = sorted(rng.sample(TYPING, rng.choice((1, 1, 1, 2, 3))))
        imports.append(f"from typing import {', '.join(names)}")
    if rng.random() < 0.08:
        imports.append(f"import {rng.choice(MODULES)}")
    pieces = ["\n".join(dict.fromkeys(imports))] if imports else []
    if rng.random() < HELPER_SHARE:
        helper = draw_solution(rng)
        code = function(helper, rng.choice(("none", "line", "tight")), imports=False)
        if not helper.imports and helper.name != solution.name and len(code) <= MAX_HELPER_CHARACTERS:
            pieces.append(code)
    gap = rng.choice((["", ""], ["", ""], [""]))
    return [line for piece in pieces for line in (*piece.splitlines(), *gap)]


@dataclass(slots=True)
class _Author:
    """Generates one docstring that reuses a few words."""

    rng: random.Random
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.words = tuple(self.word() for _ in range(OWN_WORDS))

    def docstring(self, solution: Solution) -> list[str]:
        rng = self.rng
        quotes = '"""' if rng.random() < 0.85 else "'''"
        lines = self._lines(solution)
        # some indent a docstring's text by less or more than its quotes
        inner = rng.choice(("    ",) * 8 + ("     ", "  ", "        "))
        trailing = rng.random() < 0.1
        lines = [inner + line + " " * (trailing and rng.random() < 0.5) if line else "" for line in lines]
        if rng.random() < 0.25:
            return [f"    {quotes}", *lines, f"    {quotes}"]
        opening = rng.choice((f"    {quotes}", f"    {quotes} "))
        return [opening + lines[0].lstrip(), *lines[1:], f"    {quotes}"]

    def _lines(self, solution: Solution) -> list[str]:
        rng = self.rng
        width = rng.choice((48, 64, 72, 80, 96, 110, 150))
        said = [self.aside() for _ in range(rng.choice((0, 0, 1, 1, 2, 2, 3)))]
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2)) if said else 0):
            said.append(self._varied(said[-1]))
        said.insert(0 if rng.random() < 0.7 else rng.randint(0, len(said)), self._lead(solution))
        sentences = said if rng.random() < 0.3 else [" ".join(said)]
        blocks = [[line for text in sentences for line in textwrap.wrap(text, width)]]
        if rng.random() < 0.4:
            blocks.append(self._legend())
        if solution.examples and rng.random() < 0.92:
            blocks.append(self._examples(solution))
        if rng.random() < 0.25:
            blocks.append(self._constraints(solution))
        if rng.random() < 0.08:
            blocks.append([self.aside()])
        gap = [""] if rng.random() < 0.5 else []
        return [line for number, block in enumerate(blocks) for line in (*(gap if number else ()), *block)]

    def _lead(self, solution: Solution) -> str:
        """Return a description of the function in one of several forms."""
        statement, third = solution.statement, third_person(solution.statement)
        lower = statement[0].lower() + statement[1:]
        (name, note), *_ = solution.parameter_notes or (("it", "a value"),)
        return self.rng.choice(
            (
                statement,
                statement,
                statement,
                f"Write a function that {third}",
                f"This function {third}",
                f"Create a function which {third}",
                f"Your job: {lower}",
                f"Given {note} {name}, {lower}",
                f"You get {name}, {note}. {statement}",
                f"{solution.name} {third}",
                f"{self.person()} needs a function for this: {lower}",
            )
        )

    def aside(self) -> str:
        """Return an irrelevant sentence of unpredictable words."""
        rng, w, n, value = self.rng, self.word, self.number, self.literal
        return rng.choice(
            (
                lambda: f"A {w()} is {w()} if it has at least {n()} {w()} and no {w()}.",
                lambda: f"Every {w()} of the {w()} is read as {value()}.",
                lambda: f"Valid choices are {self._choices()}.",
                lambda: f"The {w()} comes before the {w()}, the {w()} after the {w()}.",
                lambda: f"The {w()} of the {w()} is the {w()} of the {w()}, not of the {w()}.",
                lambda: f"Note: the {w()} never changes the {w()} ({n()} {w()} at most).",
                lambda: f"You may assume that the {w()} has {n()} to {n()} {w()} {w()}.",
                lambda: f"For {n()} {w()} and {n()} {w()} the {w()} would be {n()}.",
                lambda: f"In the {w()} of {self.pseudo()} this is called the {w()} {w()}.",
                lambda: f"{self.person()} and {self.person()} use it for {w()} and {w()}.",
                lambda: f"It is used by `{w()}_{w()}` and `{self.pseudo()}`.",
                lambda: f"Do not confuse {value()} with {value()}.",
                lambda: " ".join(w() for _ in range(rng.randint(5, 14))).capitalize() + ".",
                lambda: f"So {w()} means {value()}, {w()} means {value()}.",
                lambda: f"The {w()} looks like this: {self.symbols(rng.randint(6, 24))!r}.",
            )
        )()

    def _varied(self, sentence: str) -> str:
        """Return near-identical sentences: copying them requires tracking the position."""
        words = sentence.split(" ")
        for place in self.rng.sample(range(len(words)), min(2, len(words))):
            words[place] = self.word()
        return " ".join(words)

    def _legend(self) -> list[str]:
        """Return two to five lines of one form: a table, a list, a grid of symbols, calls."""
        rng = self.rng
        count = rng.randint(2, 5)
        match rng.randrange(7):
            case 0:
                head = rng.choice(("Legend:", "Here is what they mean:", "Rules:", ""))
                sign = rng.choice("-*:=")
                rows = [
                    f"{self.symbols(rng.randint(1, 3))!r} {sign} {self.word()} {self.word()}"
                    for _ in range(count)
                ]
            case 1:
                head, bullet = rng.choice(("Notes:", "Note:", "")), rng.choice(("- ", "* ", "    * "))
                rows = [bullet + (first := self.aside()), bullet + self._varied(first)]
                rows += [bullet + self.aside() for _ in range(count - 4)]
            case 2:
                head, gap = f"{self.word().capitalize()}    | {self.word()}", rng.randint(4, 14)
                rows = [
                    f"{rng.choice('<>=')} {rng.randint(0, 99) / 10:{gap}} | {self.pseudo()}"
                    for _ in range(count)
                ]
            case 3:
                head, width = f"The {self.word()}:", rng.randint(4, 9)
                rows = [f"    {self.symbols(width)}" for _ in range(count)]
            case 4 | 5:
                head, rows = rng.choice(("Similar:", "Compare:", "See also:", "")), self._calls(count)
            case _:
                head = ""
                rows = [f"{number}. {self.aside()}" for number in range(1, min(count, 3) + 1)]
        return [head, *rows] if head else rows

    def _calls(self, count: int) -> list[str]:
        """Return calls of another function with nearly equal arguments."""
        rng = self.rng
        name, sign = self.name(), rng.choice(("->", "=>", "==>", "➞", "==", "returns"))
        values = rng.choice((("True", "False"), ("0", "1", "2"), ("[]", "None", "[1]"), NUMERALS))
        items: list[str] = [rng.choice((self.word(), self.number())) for _ in range(rng.randint(1, 4))]
        rows = []
        for _ in range(count):
            argument = self._spelt(items) if rng.random() < 0.9 else self.literal()
            rows.append(f"{name}({argument}) {sign} {rng.choice(values)}")
            place = rng.randrange(len(items) + 1)
            items[place : place + rng.randint(0, 1)] = [rng.choice((*items, self.word(), self.number()))]
        return rows

    def _spelt(self, items: list[str]) -> str:
        return f'"{" ".join(items)}"' if all(item.isalpha() for item in items) else repr(items)

    def _examples(self, solution: Solution) -> list[str]:
        rng = self.rng
        examples = solution.examples[: rng.choice((1, 2, 2, 3, 3, 4, 5, 6))]
        heading = rng.choice(("Example:", "Examples:", "For example:", "e.g.", "", ""))
        match rng.randrange(8):
            case 0 | 1 | 2:
                heading = rng.choice((heading, "", ""))
                rows = [line for each in examples for line in (f">>> {each.call}", each.value)]
            case 3 | 4:
                sign = rng.choice(("->", "=>", "==>", "==", "=", "➞", "returns", "# =>"))
                rows = [f"{each.call} {sign} {each.value}" for each in examples]
            case 5:
                sign = rng.choice(("should return", "must be", "gives", "is"))
                rows = [f"For {_arguments(each)} the result {sign} {each.value}." for each in examples[:4]]
            case 6:
                heading, rows = "", []
                for number, each in enumerate(examples[:3], 1):
                    rows += [f"Example {number}:", f"    Input: {_arguments(each)}"]
                    rows.append(f"    Output: {each.value}")
                    if rng.random() < 0.3:
                        rows.append(f"    Explanation: {self.aside()}")
            case _:
                bullet = rng.choice(("* ", "- ", "    "))
                rows = [f"{bullet}{each.call} {rng.choice(('->', '='))} {each.value}" for each in examples]
        if rng.random() < 0.1:
            rows = [f"{row}  # {self.word()} {self.word()}" for row in rows]
        return [heading, *rows] if heading else rows

    def _constraints(self, solution: Solution) -> list[str]:
        rng = self.rng
        names = [name for name, _ in solution.parameter_notes] or ["n"]
        rows = [f"{rng.randint(0, 9)} <= {rng.choice(names)} <= {10 ** rng.randint(1, 6)}" for _ in range(2)]
        rows.append(f"len({rng.choice(names)}) < {rng.randint(2, 5000)}")
        heading = rng.choice(("Constraints:", "Limits:", "Variables:", "Notes:"))
        bullet = rng.choice(("    * ", "- ", "    "))
        return [heading, *(bullet + row for row in rng.sample(rows, rng.randint(1, 3)))]

    def literal(self) -> str:
        """Return a value in a random notation."""
        text = self._value()
        if self.rng.random() < 0.2:
            text = text.replace(", ", ",").replace(": ", ":")
        return text.replace("'", '"') if self.rng.random() < 0.3 else text

    def _value(self) -> str:
        rng = self.rng
        match rng.randrange(7):
            case 0:
                return repr([rng.randint(0, rng.choice((2, 9, 120))) for _ in range(rng.randint(1, 9))])
            case 1:
                return repr(self.symbols(rng.randint(2, 20)))
            case 2:
                return repr([rng.choice(NUMERALS[: rng.randint(2, 10)]) for _ in range(rng.randint(1, 9))])
            case 3:
                return repr([round(rng.uniform(-9, 9), rng.choice((1, 2))) for _ in range(rng.randint(1, 5))])
            case 4:
                return repr({self.word(): rng.randint(0, 99) for _ in range(rng.randint(1, 3))})
            case 5:
                return rng.choice("0123456789") * rng.randint(2, 9) + self.number()
            case _:
                return repr(self.pseudo())

    def _choices(self) -> str:
        rng = self.rng
        known = rng.choice((NUMERALS, [self.word() for _ in range(8)], [self.pseudo() for _ in range(5)]))
        count = rng.randint(3, len(known))
        chosen = known[:count] if rng.random() < 0.5 else rng.sample(known, count)
        return ", ".join(f"'{each}'" for each in chosen)

    def symbols(self, count: int) -> str:
        """Return a string over a few symbols, sometimes in groups separated by spaces."""
        rng = self.rng
        alphabet = rng.choice(ALPHABETS)
        text = "".join(rng.choice(alphabet) for _ in range(count))
        if rng.random() < 0.4:
            text = " ".join(re.findall(f".{{1,{rng.randint(1, 4)}}}", text))
        return text.strip() or alphabet[0]

    def word(self) -> str:
        rng = self.rng
        if self.words and rng.random() < OWN_SHARE:
            return rng.choice(self.words)
        if rng.random() < 0.02:
            return rng.choice(FOREIGN)
        return self.pseudo() if rng.random() < 0.2 else rng.choice(_vocabulary())

    def pseudo(self) -> str:
        """Return a made-up word."""
        rng = self.rng
        count = rng.choice((1, 2, 2, 3))
        return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count))

    def name(self) -> str:
        """Return a name for a function."""
        rng = self.rng
        if rng.random() < 0.15:
            return rng.choice(("solve", "f", "func", "solution", "process", "compute", "check", "answer"))
        words = [rng.choice((self.pseudo(), rng.choice(_vocabulary()))) for _ in range(rng.choice((2, 2, 3)))]
        return "_".join(words) + rng.choice(("", "", "", "2"))

    def number(self) -> str:
        rng = self.rng
        return str(rng.choice((rng.randint(0, 9), rng.randint(10, 99), rng.randint(100, 99999))))

    def person(self) -> str:
        return self.rng.choice((self.pseudo().capitalize(), self.rng.choice(PEOPLE)))


def _arguments(example: Example) -> str:
    return example.call.partition("(")[2].removesuffix(")")


@functools.cache
def _vocabulary() -> tuple[str, ...]:
    """Return every plain word of the templates."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.rglob("*.txt")))
    return tuple(sorted({word for text in texts for word in re.findall(r"\b[a-z]{3,10}\b", text)}))
