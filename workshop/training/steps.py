"""Worked solutions as numbered sums, the small model's uniform style.

Tom packs 3 * 12 = 36 apples.          Step 1: 3 * 12 = 36
He keeps 36 - 10 = $26.          ->    Step 2: 36 - 10 = 26
#### 26                                The answer is 26.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

SIGNS = {"x": "*", "X": "*", "×": "*", "÷": "/", "–": "-", "−": "-"}
TOKEN = re.compile(r"\d[\d,]*\.?\d*|\.\d+|[-+*/()=×÷–−]|[A-Za-z%]+|\S")
NUMBER = re.compile(r"\d|\.\d")
WHOLE = re.compile(r"(?<![\w.,/-])\d{1,3}(?:,\d{3})+(?![\d/%]|[.,]\d)|(?<![\w.,/-])\d+(?![\d/%]|[.,]\d)")
MAX_WORDS = 3  # a unit between a number and the next sign: "4800 square inches"
MAX_DECIMALS = 4
# Smaller numbers often represent words of the question: twice, half, a third.
LEAST_VARIED = 5
# Numbers that a solution may use although they are not in the question: small ones, units of time, percent.
COMMON = {*range(13), 16, 24, 30, 31, 36, 50, 52, 60, 100, 365, 1000}
LARGEST = 1_000_000
TRIES = 12


@dataclass(frozen=True, slots=True)
class Sum:
    """One sum; `operands` are numbers, signs and brackets as written."""

    operands: tuple[str, ...]
    value: Fraction

    def __str__(self) -> str:
        left = " ".join(self.operands).replace("( ", "(").replace(" )", ")")
        return f"{left} = {_written(self.value)}"


def as_steps(question: str, solution: str) -> str | None:
    """Return the solution's sums and its answer; None if they do not lead from the question to the answer."""
    sums = _worked(question, solution)
    return None if sums is None else _numbered(sums)


def variants(question: str, solution: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield variants of a problem with other numbers and recomputed sums."""
    sums = _worked(question, solution)
    if sums is None:
        return
    for _ in range(TRIES):
        changed = other_numbers(question, rng)
        fresh = _recomputed(sums, changed) if changed else None
        if fresh is not None:
            yield _replaced(question, changed), _numbered(fresh)


def other_numbers(text: str, rng: random.Random) -> dict[str, str]:
    """Return a new value for each integer of a text, of the same roundness."""
    changed = {}
    for number in dict.fromkeys(match[0].replace(",", "") for match in WHOLE.finditer(text)):
        value = int(number)
        if LEAST_VARIED <= value < LARGEST and number[0] != "0":
            unit = 10 ** (len(number) - len(number.rstrip("0")))
            low, high = max(1, value // (2 * unit)), max(9, 2 * value // unit)
            changed[number] = str(unit * rng.randint(low, high))
    return changed


def with_other_numbers(text: str, rng: random.Random) -> str:
    return _replaced(text, other_numbers(text, rng))


def _numbered(sums: list[Sum]) -> str:
    lines = [f"Step {number}: {line}" for number, line in enumerate(sums, 1)]
    return "\n".join([*lines, f"The answer is {_written(sums[-1].value)}."])


def _replaced(text: str, changed: dict[str, str]) -> str:
    return WHOLE.sub(lambda match: changed.get(match[0].replace(",", ""), match[0]), text)


def _worked(question: str, solution: str) -> list[Sum] | None:
    body, mark, answer = solution.rpartition("#### ")
    result = _value(answer.strip().lstrip("$"))
    if not mark or result is None:
        return None
    sums = list(dict.fromkeys(found for line in body.splitlines() for found in _sums(line)))
    if not sums or sums[-1].value != result:
        return None
    known = {_value(token) for token in TOKEN.findall(question) if NUMBER.match(token)} | COMMON
    for found in sums:
        if not {_value(operand) for operand in found.operands if NUMBER.match(operand)} <= known:
            return None
        known.add(found.value)
    return sums


def _recomputed(sums: list[Sum], changed: dict[str, str]) -> list[Sum] | None:
    """Return the recomputed steps; None if a result changes its kind: half a person, a negative amount."""
    changed, fresh = dict(changed), []
    for old in sums:
        operands = tuple(changed.get(operand, operand) for operand in old.operands)
        try:
            value = _evaluated(operands)
        except ZeroDivisionError:
            return None
        sound = 0 < value <= LARGEST and _written(value) is not None
        if not sound or (value.denominator == 1) != (old.value.denominator == 1):
            return None
        if (written := _written(old.value)) is not None:
            changed[written] = _written(value) or ""
        fresh.append(Sum(operands, value))
    return fresh


def _sums(line: str) -> Iterator[Sum]:
    """Return every correct `a + b = c` of a line."""
    tokens = [SIGNS.get(token, token) for token in TOKEN.findall(line) if token not in "$£€"]
    for i, token in enumerate(tokens[:-1]):
        if token != "=" or not NUMBER.match(tokens[i + 1]):
            continue
        right, operands = _value(tokens[i + 1]), _left_side(tokens[:i])
        if right is None or len(operands) < 3 or _written(right) is None:
            continue
        try:
            value = _evaluated(operands)
        except (SyntaxError, ZeroDivisionError, TypeError):
            continue
        if value == right:
            yield Sum(operands, value)


def _left_side(tokens: list[str]) -> tuple[str, ...]:
    """Return the longest sum that ends here, without units."""
    taken: list[str] = []
    words = depth = 0
    for token in reversed(tokens):
        wants_number = not taken or taken[0] in ("+", "-", "*", "/", ")")
        if NUMBER.match(token) and wants_number:
            taken.insert(0, _written(_value(token)) or "?")
            words = 0
        elif token == ")" and wants_number:
            taken.insert(0, token)
            depth += 1
        elif token == "(" and depth and not wants_number:
            taken.insert(0, token)
            depth -= 1
        elif token in ("+", "-", "*", "/") and not wants_number:
            taken.insert(0, token)
        elif wants_number and re.fullmatch(r"[A-Za-z]+", token) and words < MAX_WORDS:
            words += 1
        else:
            break
    while taken and taken[0] in ("+", "-", "*", "/"):
        taken.pop(0)
    return tuple(taken) if depth == 0 and "?" not in taken else ()


def _evaluated(operands: tuple[str, ...]) -> Fraction:
    exact = [f"Fraction('{token}')" if NUMBER.match(token) else token for token in operands]
    return eval("".join(exact), {"Fraction": Fraction})


def _value(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", "").rstrip("."))
    except (ValueError, ZeroDivisionError):
        return None


def _written(value: Fraction | None) -> str | None:
    """Return the number in ordinary notation; None if that takes too many digits."""
    if value is None:
        return None
    if value.denominator == 1:
        return str(value.numerator)
    if (value * 10**MAX_DECIMALS).denominator != 1:
        return None
    return f"{float(value):.{MAX_DECIMALS}f}".rstrip("0")
