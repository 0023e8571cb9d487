"""Texts with planted facts, and questions about them: what compression is measured on.

The haystacks are Python's own: its language reference and its standard library. There are two sets of
templates: layer, weights and hops were chosen on the facts of `CHOSEN_ON`, what is published is measured on
those of `TESTED`.
"""

import ast
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bough.text.tokenizer import Tokenizer

FAILING = "aggregation"  # no selection can keep what is spread over the whole text
MAX_BLOCK = 1500  # characters of a block of code, between which facts are planted
CHAIN = 3  # lines of a chain

_CITIES = """
Lund Porto Bergen Graz Ghent Split Turku Siena Basel York Brno Vigo Kiel Nantes Derby Trier Oslo Riga Bonn
"""
CITIES = _CITIES.split()


@dataclass(frozen=True, slots=True)
class Question:
    task: str
    text: str
    facts: tuple[str, ...]  # lines that have to be kept
    answer: str = ""  # what a right answer says


@dataclass(frozen=True, slots=True)
class Context:
    """A text with planted facts, and questions about them."""

    kind: str  # prose or code
    text: str
    tokens: int
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Lines that lead from a value to a name, over other names."""

    first: str  # with {a} and {value}
    next: str  # with {a} and {b}
    question: str  # with {value}
    names: tuple[str, ...] = ()  # empty: made of letters and digits


@dataclass(frozen=True, slots=True)
class Templates:
    """The words of all tasks: facts, and questions about them."""

    single: tuple[tuple[str, str], ...]  # with {city} and {number}
    multikey: tuple[tuple[str, str], ...]  # with {city} and {number}; several cities have one
    chains: tuple[Chain, ...]
    code_chains: tuple[Chain, ...]
    paraphrases: tuple[tuple[str, str, str], ...]  # fact, question without a word in common, answer
    constants: tuple[str, ...]
    meanings: tuple[tuple[str, str, str], ...]  # a function, a question about what it does, its name


def _templates(table: Mapping[str, Any]) -> Templates:
    meanings = tuple((row["code"], row["question"], row["name"]) for row in table["meanings"])
    rows = {name: tuple(map(tuple, table[name])) for name in ("single", "multikey", "paraphrases")}
    chains = {
        name: tuple(Chain(**chain | {"names": tuple(chain.get("names", ()))}) for chain in table[name])
        for name in ("chains", "code_chains")
    }
    return Templates(**rows, **chains, constants=tuple(table["constants"]), meanings=meanings)


_FACTS = tomllib.loads(Path(__file__).with_name("facts.toml").read_text(encoding="utf-8"))
CHOSEN_ON, TESTED = (_templates(_FACTS[name]) for name in ("chosen_on", "tested"))


def contexts(
    count: int, tokens: int, tokenizer: Tokenizer, *, seed: int = 0, templates: Templates = TESTED
) -> Iterator[Context]:
    """Yield texts of about `tokens` tokens, of prose and of code in turn."""
    for index in range(count):
        rng = random.Random(f"{seed} {index} {tokens}")
        kind = "prose" if index % 2 == 0 else "code"
        blocks = _prose(rng) if kind == "prose" else _code(rng)
        questions, others = (_code_facts if kind == "code" else _prose_facts)(rng, templates)
        planted = list(dict.fromkeys([*(fact for each in questions for fact in each.facts), *others]))
        rng.shuffle(planted)
        room = tokens - len(tokenizer.encode("\n\n".join(planted)))
        chosen: list[str] = []
        while room > 0:
            block = next(blocks)
            room -= len(tokenizer.encode(block))
            chosen.append(block)
        for place, fact in enumerate(planted):  # spread over all depths
            depth = (place + rng.random()) / len(planted)
            chosen.insert(1 + int(depth * (len(chosen) - 1)), fact)
        text = "\n\n".join(chosen)
        yield Context(kind, text, len(tokenizer.encode(text)), tuple(questions))


def _prose(rng: random.Random) -> Iterator[str]:
    from pydoc_data.topics import topics

    names = sorted(topics)
    while True:
        yield from (block.strip("\n") for block in topics[rng.choice(names)].split("\n\n") if block.strip())


def _code(rng: random.Random) -> Iterator[str]:
    files = sorted(Path(ast.__file__).parent.glob("[a-z]*.py"))
    while True:
        source = rng.choice(files).read_text(encoding="utf-8", errors="replace")
        blocks = [block.strip("\n") for block in source.split("\n\n\n")]
        yield from (block for block in blocks if block and len(block) < MAX_BLOCK)


def _prose_facts(rng: random.Random, templates: Templates) -> tuple[list[Question], list[str]]:
    """Return questions about facts in prose, and facts like them that nobody asks for."""
    city, *asked = rng.sample(CITIES, 7)
    fact, question = rng.choice(templates.single)
    number = str(rng.randint(10_000, 99_999))
    found = [Question("single", question.format(city=city), (fact.format(city=city, number=number),), number)]
    fact, question = rng.choice(templates.multikey)
    facts = {
        city: (fact.format(city=city, number=number), number)
        for city in asked
        if (number := str(rng.randint(1000, 9999)))
    }
    found += [
        Question("multikey", question.format(city=city), facts[city][:1], facts[city][1])
        for city in asked[:2]
    ]
    chains, other = _chains(rng, templates.chains, most=2)
    found += [
        Question("paraphrase", text, (fact,), answer)
        for fact, text, answer in rng.sample(templates.paraphrases, 2)
    ]
    return found + chains, [*other, *(facts[city][0] for city in asked[2:])]


def _code_facts(rng: random.Random, templates: Templates) -> tuple[list[Question], list[str]]:
    names = rng.sample(templates.constants, 4)
    values = [str(rng.randint(100, 999)) for _ in names]
    lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    found = [
        Question("code-name", f"What is the value of {name}?", (line,), value)
        for name, line, value in list(zip(names, lines, values, strict=True))[:2]
    ]
    found += [
        Question("code-meaning", text, (fact.strip(),), name)
        for fact, text, name in rng.sample(templates.meanings, 3)
    ]
    chains, other = _chains(rng, templates.code_chains, most=1)
    return found + chains, [*other, *lines[2:]]


def _chains(rng: random.Random, templates: Sequence[Chain], *, most: int) -> tuple[list[Question], list[str]]:
    """Return a question about each of some chains, and the beginning of one more that nobody asks for."""
    chosen = rng.sample(templates, min(most, len(templates)))
    found = [_chain(rng, each) for each in chosen]
    distractor = _chain(rng, chosen[0], taken=found[0]).facts[:2] if chosen else ()
    return found, list(distractor)


def _chain(rng: random.Random, chain: Chain, *, taken: Question | None = None) -> Question:
    free = [name for name in chain.names if taken is None or not any(name in fact for fact in taken.facts)]
    names = (
        rng.sample(free, CHAIN)
        if free
        else [
            f"{rng.choice('ABCDEFGH')}{rng.choice('JKLMNPQR')}{number}"
            for number in rng.sample(range(10, 100), CHAIN)
        ]
    )
    value = str(rng.randint(10_000, 99_999))
    lines = [chain.first.format(a=names[0], value=value)]
    lines += [chain.next.format(a=a, b=b) for a, b in pairwise(names)]
    return Question("chain", chain.question.format(value=value), tuple(lines), names[-1])


def aggregation(tokens: int, tokenizer: Tokenizer, *, seed: int = 0) -> Context:
    """Return the task that must fail: which word is said most often, in a text of such sentences."""
    rng = random.Random(seed)
    most = rng.choice(CITIES)
    words = [*CITIES, *[most] * 8]
    lines: list[str] = []
    while len(tokenizer.encode("\n\n".join(lines))) < tokens:
        lines += [f"The traveller then went to {rng.choice(words)}." for _ in range(20)]
    text = "\n\n".join(lines)
    question = Question(FAILING, "Which town did the traveller visit most often?", (text,), most)
    return Context("prose", text, len(tokenizer.encode(text)), (question,))
