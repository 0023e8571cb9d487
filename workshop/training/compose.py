"""Programming tasks composed of a source, a condition, a mapping and a reduction."""

import random
from dataclasses import dataclass

from workshop.training.python_tasks import Task


@dataclass(frozen=True, slots=True)
class Source:
    """The source of the values: `{kind}` in a phrase is their noun."""

    phrase: str
    parameter: tuple[str, str]
    iterable: str
    name: str


@dataclass(frozen=True, slots=True)
class Condition:
    """Words `before` the noun or `after` it, the test in Python and a piece of a function's name."""

    before: str
    after: str
    test: str
    name: str

    def verb(self) -> str:
        """Return the predicate of the values that meet the condition: "are even", "start with a vowel"."""
        return self.after.removeprefix(" that ") or f"are {self.before.strip()}"


@dataclass(frozen=True, slots=True)
class Change:
    phrase: str
    code: str
    name: str
    result: str


NUMBER_SOURCES = (
    Source("numbers in {numbers}", ("numbers", "ints"), "numbers", ""),
    Source("numbers in {numbers}", ("numbers", "ints"), "numbers", ""),
    Source("numbers from 1 to {n}", ("n", "3..12"), "range(1, n + 1)", "_up_to"),
    Source("digits of {n}", ("n", "100..99999"), "map(int, str(n))", "_digits"),
    Source("values of {mapping}", ("mapping", "counts"), "mapping.values()", "_values"),
)
WORD_SOURCES = (
    Source("words in {words}", ("words", "words"), "words", ""),
    Source("words in {text}", ("text", "phrase"), "text.split()", "_in_text"),
    Source("keys of {mapping}", ("mapping", "counts"), "mapping", "_keys"),
)


def _number_condition(rng: random.Random) -> Condition:
    k = rng.randint(2, 9)
    return rng.choice(
        (
            Condition("even ", "", "number % 2 == 0", "even"),
            Condition("even ", "", "number % 2 == 0", "even"),
            Condition("odd ", "", "number % 2 == 1", "odd"),
            Condition("odd ", "", "number % 2 != 0", "odd"),
            Condition("positive ", "", "number > 0", "positive"),
            Condition("non-zero ", "", "number != 0", "nonzero"),
            Condition("", f" that are greater than {k}", f"number > {k}", f"over_{k}"),
            Condition("", f" that are less than {k}", f"number < {k}", f"under_{k}"),
            Condition("", f" that are at least {k}", f"number >= {k}", f"at_least_{k}"),
            Condition("", f" that are divisible by {k}", f"number % {k} == 0", f"divisible_by_{k}"),
            Condition("", f" that are not divisible by {k}", f"number % {k} != 0", f"not_divisible_by_{k}"),
        )
    )


def _word_condition(rng: random.Random) -> Condition:
    k, letter = rng.randint(3, 6), rng.choice("abcdefglmoprstw")
    return rng.choice(
        (
            Condition("", f" that have more than {k} letters", f"len(word) > {k}", "long"),
            Condition("", f" that have fewer than {k} letters", f"len(word) < {k}", "short"),
            Condition("", f" that have exactly {k} letters", f"len(word) == {k}", f"length_{k}"),
            Condition(
                "", f' that start with "{letter}"', f'word.startswith("{letter}")', f"starting_with_{letter}"
            ),
            Condition(
                "", f' that end with "{letter}"', f'word.endswith("{letter}")', f"ending_with_{letter}"
            ),
            Condition("", f' that contain "{letter}"', f'"{letter}" in word', f"containing_{letter}"),
            Condition("", " that start with a vowel", 'word[0] in "aeiou"', "starting_with_vowel"),
        )
    )


def _number_change(rng: random.Random) -> Change | None:
    k = rng.randint(2, 9)
    return rng.choice(
        (
            None,
            None,
            Change("squares", "number ** 2", "squares", "int"),
            Change("squares", "number * number", "squares", "int"),
            Change("cubes", "number ** 3", "cubes", "int"),
            Change("doubles", "number * 2", "doubles", "int"),
            Change("absolute values", "abs(number)", "absolutes", "int"),
            Change(f"products with {k}", f"number * {k}", f"times_{k}", "int"),
            Change("last digits", "abs(number) % 10", "last_digits", "int"),
        )
    )


def _word_change(rng: random.Random) -> Change | None:
    return rng.choice(
        (
            None,
            None,
            Change("lengths", "len(word)", "lengths", "int"),
            Change("upper case forms", "word.upper()", "uppercased", "str"),
            Change("capitalized forms", "word.capitalize()", "capitalized", "str"),
            Change("reversed forms", "word[::-1]", "reversed", "str"),
            Change("first letters", "word[0]", "first_letters", "str"),
            Change("last letters", "word[-1]", "last_letters", "str"),
        )
    )


def composed_task(rng: random.Random) -> Task:
    """Return a task that filters, maps and reduces numbers or words."""
    is_number = rng.random() < 0.62
    variable = "number" if is_number else "word"
    source = rng.choice(NUMBER_SOURCES if is_number else WORD_SOURCES)
    condition = _number_condition(rng) if is_number else _word_condition(rng)
    change = _number_change(rng) if is_number else _word_change(rng)
    # for non-negative values some conditions and mappings are trivial
    while source.name and condition.name in ("positive", "nonzero"):
        condition = _number_condition(rng)
    while source.name and change is not None and change.name in ("absolutes", "last_digits"):
        change = _number_change(rng)
    roll = rng.random()
    if roll < 0.12:
        return _question(source, condition, variable, rng)
    if roll < 0.24:
        return _count(source, condition, variable)
    return _summary(source, condition, change, variable, rng)


def _question(source: Source, condition: Condition, variable: str, rng: random.Random) -> Task:
    every = rng.random() < 0.5
    word = "all" if every else "any"
    failing = f"not ({condition.test})" if every else condition.test
    stem = f"{condition.name}{source.name}"
    said = f"{word} of the {source.phrase} {condition.verb()}."
    return Task(
        (f"{word}_{stem}", f"{'are' if every else 'has'}_{word}_{stem}"),
        (source.parameter,),
        "bool",
        (f"Return True if {said}", f"Check whether {said}"),
        (
            f"return {word}({condition.test} for {variable} in {source.iterable})",
            f"for {variable} in {source.iterable}:\n    if {failing}:\n        return {not every}\n"
            f"return {every}",
        ),
    )


def _count(source: Source, condition: Condition, variable: str) -> Task:
    phrase = f"{condition.before}{source.phrase}{condition.after}"
    return Task(
        (f"count_{condition.name}{source.name}", f"number_of_{condition.name}{source.name}"),
        (source.parameter,),
        "int",
        (f"Return the number of {phrase}.", f"Count the {phrase}."),
        (
            f"count = 0\nfor {variable} in {source.iterable}:\n    if {condition.test}:\n        count += 1\n"
            "return count",
            f"return sum(1 for {variable} in {source.iterable} if {condition.test})",
            f"return len([{variable} for {variable} in {source.iterable} if {condition.test}])",
        ),
    )


def _summary(
    source: Source, condition: Condition, change: Change | None, variable: str, rng: random.Random
) -> Task:
    phrase = f"{condition.before}{source.phrase}{condition.after}"
    value = change.code if change else variable
    kind = change.result if change else ("int" if variable == "number" else "str")
    of = f"the {change.phrase} of the {phrase}" if change else f"the {phrase}"
    stem = f"{condition.name}_{change.name}" if change else condition.name
    generator = f"{value} for {variable} in {source.iterable} if {condition.test}"
    loop = f"for {variable} in {source.iterable}:\n    if {condition.test}:\n        "
    options = ["list", "list", "sorted", "unique"]
    options += ["sum", "sum", "max", "min"] if kind == "int" else ["join", "join"]
    if change is not None and source.iterable in ("numbers", "words", "text.split()"):
        options.append("map")
    summary = rng.choice(options)
    collect = f"result = []\n{loop}result.append({value})\n"
    match summary:
        case "list":
            said = (f"Return a list of {of}.", f"Return {of} as a list.")
            bodies = (f"return [{generator}]", f"{collect}return result")
            names, returns = (f"{stem}", f"get_{stem}", f"list_{stem}"), f"list[{kind}]"
        case "sorted":
            said = (f"Return a sorted list of {of}.", f"Return {of} in ascending order.")
            bodies = (f"return sorted({generator})", f"{collect}result.sort()\nreturn result")
            names, returns = (f"sorted_{stem}", f"sort_{stem}"), f"list[{kind}]"
        case "unique":
            said = (f"Return a sorted list of the different values among {of}.",)
            bodies = (f"return sorted({{{generator}}})", f"{collect}return sorted(set(result))")
            names, returns = (f"unique_{stem}", f"distinct_{stem}"), f"list[{kind}]"
        case "sum":
            said = (f"Return the sum of {of}.", f"Add up {of}.")
            bodies = (f"return sum({generator})", f"total = 0\n{loop}total += {value}\nreturn total")
            names, returns = (f"sum_{stem}", f"sum_of_{stem}", f"total_{stem}"), "int"
        case "max" | "min":
            adjective = "largest" if summary == "max" else "smallest"
            said = (f"Return the {adjective} of {of}, or None if there are none.",)
            bodies = (
                f"return {summary}(({generator}), default=None)",
                f"{collect}return {summary}(result, default=None)",
            )
            names, returns = (f"{adjective}_{stem}", f"{summary}_{stem}"), "int | None"
        case "join":
            said = (f"Return {of}, joined by spaces.", f"Join {of} with spaces.")
            bodies = (f'return " ".join({generator})', f'{collect}return " ".join(result)')
            names, returns = (f"join_{stem}", f"joined_{stem}"), "str"
        case _:
            assert change is not None
            said = (f"Return a dictionary that maps the {phrase} to their {change.phrase}.",)
            pair = f"{variable}: {value}"
            test = f"for {variable} in {source.iterable} if {condition.test}"
            bodies = (
                f"return {{{pair} {test}}}",
                f"result = {{}}\n{loop}result[{variable}] = {value}\nreturn result",
            )
            base = "int" if variable == "number" else "str"
            names, returns = (f"{stem}_by_{variable}", f"map_{stem}"), f"dict[{base}, {kind}]"
    return Task(tuple(name + source.name for name in names), (source.parameter,), returns, said, bodies)
