"""Word problems with worked solutions, generated from templates/stories."""

import functools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from workshop.training.wordlists import pick, pick_several

TEMPLATES = Path(__file__).parent / "templates" / "stories"
_SPELLED = "zero one two three four five six seven eight nine ten eleven twelve"
SPELLED = tuple(_SPELLED.split())
PRONOUNS = {"female": ("she", "her", "her"), "male": ("he", "his", "him")}
MAX_TRIES = 200

Draw = Callable[[random.Random, dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its worked solution and the answer alone."""

    question: str
    solution: str
    answer: str


@dataclass(frozen=True, slots=True)
class Story:
    """One scenario: random numbers, phrasings of the question, and phrasings of each step."""

    name: str
    numbers: tuple[tuple[str, Draw], ...]
    needs: tuple[CodeType, ...]
    questions: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]


@functools.cache
def stories() -> tuple[Story, ...]:
    found = []
    for path in sorted(TEMPLATES.glob("*.txt")):
        for block in re.split(r"^= ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            found.append(_parse(block))
    return tuple(found)


def story_problem(rng: random.Random) -> Problem:
    """Return a problem from a random scenario."""
    story = rng.choice(stories())
    values = _words(rng) | _numbers(story, rng)
    lines = [_fill(rng.choice(step), values, rng) for step in story.steps]
    answer = _brackets(story.steps[-1][0], values)[-1]
    question = _fill(rng.choice(story.questions), values, rng)
    return Problem(question, "\n".join([*lines, f"#### {answer}"]), answer)


def _parse(block: str) -> Story:
    name, *lines = block.strip().splitlines()
    numbers: list[tuple[str, Draw]] = []
    needs, questions, steps = [], [], []
    for line in lines:
        mark, _, rest = line.partition(" ")
        if mark == "?":
            questions.append(rest)
        elif mark == "!":
            steps.append(tuple(rest.split(" || ")))
        elif mark == "need":
            needs.append(compile(rest, name, "eval"))
        else:
            numbers += map(_number, line.split("; "))
    return Story(name, tuple(numbers), tuple(needs), tuple(questions), tuple(steps))


def _number(clause: str) -> tuple[str, Draw]:
    """`name LOW..HIGH`, `name in A,B,C` or `name = EXPRESSION`; bounds may use earlier names."""
    name, _, rest = clause.partition(" ")
    if rest.startswith("= "):
        code = compile(rest[2:], clause, "eval")
        return name, lambda _, values: eval(code, values)
    if rest.startswith("in "):
        choices = [int(value) for value in rest[3:].split(",")]
        return name, lambda rng, _: rng.choice(choices)
    low, high = (compile(bound, clause, "eval") for bound in rest.split(".."))
    return name, lambda rng, values: rng.randint(
        eval(low, values), max(eval(low, values), eval(high, values))
    )


def _numbers(story: Story, rng: random.Random) -> dict[str, Any]:
    for _ in range(MAX_TRIES):
        values: dict[str, Any] = {}
        for name, draw in story.numbers:
            values[name] = draw(rng, values)
        if all(eval(need, values) for need in story.needs):
            values.pop("__builtins__", None)
            return values
    raise ValueError(f"story {story.name}: {MAX_TRIES} draws met no condition, needed: one that does")


def _words(rng: random.Random) -> dict[str, str]:
    gender = rng.choice(("female", "male"))
    he, his, him = PRONOUNS[gender]
    others = [pick(rng, rng.choice(("female", "male"))) for _ in range(6)]
    first = pick(rng, gender)
    second, third = [name for name in dict.fromkeys(others) if name != first][:2] or ["Dana", "Robin"]
    goods, goods2 = pick_several(rng, "goods", 2)
    gift = pick(rng, "gift")
    values = {
        "A": first, "B": second, "C": third, "he": he, "He": he.capitalize(), "his": his, "him": him,
        "His": his.capitalize(), "goods": goods, "Goods": goods.capitalize(), "goods2": goods2,
        "a_gift": gift, "A_gift": gift.capitalize(),
    }  # fmt: skip
    for name in ("food", "thing", "fruit", "plant", "plant1", "toys", "vehicle", "place", "day"):
        values[name] = pick(rng, name)
    return values


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, expression, "eval")


def _brackets(text: str, values: Mapping[str, Any]) -> list[str]:
    return [str(eval(_compiled(found), dict(values))) for found in re.findall(r"\[([^]]+)\]", text)]


def _fill(text: str, values: dict[str, Any], rng: random.Random) -> str:
    """`<a|b>` is a choice, `{name}` a value, `{name~}` a number that may be spelled, `[expression]` a sum."""
    text = re.sub(r"<([^>]+)>", lambda match: rng.choice(match[1].split("|")), text)
    text = re.sub(r"\[([^]]+)\]", lambda match: str(eval(_compiled(match[1]), values)), text)

    def value(match: re.Match[str]) -> str:
        found = values[match[1]]
        if match[2] and found < len(SPELLED) and rng.random() < 0.3:
            return SPELLED[found]
        return str(found)

    text = re.sub(r"\{(\w+)(~?)\}", value, text)
    return text[0].upper() + text[1:]
