"""Greetings, simple facts and small word tasks, as dialogues."""

import functools
import random
from dataclasses import dataclass
from pathlib import Path

from workshop.training.documents import Dialogue
from workshop.training.wordlists import pick, pick_several

TEMPLATES = Path(__file__).parent / "templates"
Turn = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Facts:
    """Fact pairs of one kind, with phrasings of the question and of the answer."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


@functools.cache
def facts() -> tuple[Facts, ...]:
    found = []
    for section in (TEMPLATES / "facts.txt").read_text(encoding="utf-8").split("# ")[1:]:
        _, *lines = section.strip().splitlines()
        rows = [row for line in lines if line[:2] not in ("? ", "! ") for row in line.split("; ")]
        pairs = tuple((left, right) for left, _, right in (row.partition(" = ") for row in rows))
        found.append(Facts(_marked(lines, "? "), _marked(lines, "! "), pairs))
    return tuple(found)


@functools.cache
def exchanges() -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return small-talk messages with replies."""
    found = []
    for block in (TEMPLATES / "talk.txt").read_text(encoding="utf-8").strip().split("\n\n"):
        asked, answered = block.splitlines()
        found.append((tuple(asked[2:].split("; ")), tuple(answered[2:].replace("\\n", "\n").split("; "))))
    return tuple(found)


def _marked(lines: list[str], mark: str) -> tuple[str, ...]:
    return tuple(line[len(mark) :] for line in lines if line.startswith(mark))


def talk_dialogue(rng: random.Random) -> Dialogue:
    """Return a conversation of one to four turns."""
    count = rng.choice((1, 1, 2, 3, 4))
    turns = [rng.choices((_fact, _exchange, _word_job), (4, 2, 5))[0](rng) for _ in range(count)]
    key = "\n".join(asked for asked, _ in turns)
    messages = tuple(
        message for asked, answer in turns for message in (("user", asked), ("assistant", answer))
    )
    return Dialogue("talk", messages, key)


def _fact(rng: random.Random) -> Turn:
    group = rng.choices(facts(), [len(group.pairs) for group in facts()])[0]
    left, right = rng.choice(group.pairs)
    asked, answer = (
        _capitalised(rng.choice(forms).replace("{0}", left).replace("{1}", right))
        for forms in (group.questions, group.answers)
    )
    return asked, answer


def _exchange(rng: random.Random) -> Turn:
    asked, answers = rng.choice(exchanges())
    return rng.choice(asked), rng.choice(answers)


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _word_job(rng: random.Random) -> Turn:
    word = pick(rng, rng.choice(("noun", "fruit", "doubled")))
    several = pick_several(rng, "noun", rng.randint(3, 6))
    listed = ", ".join(several)
    low = rng.randint(1, 20)
    high = low + rng.randint(4, 12)
    letter = rng.choice("aeioulrst")
    longest = max(several, key=len)
    times = f"{word.count(letter)} time{'' if word.count(letter) == 1 else 's'}"
    jobs = [
        (f'Write the word "{word}" in capital letters.', word.upper()),
        (f"Write {word} in upper case.", word.upper()),
        (f'Spell the word "{word}".', f"{_capitalised(word)} is spelled {'-'.join(word)}."),
        (f'How many letters are in the word "{word}"?', f'The word "{word}" has {len(word)} letters.'),
        (f'Reverse the word "{word}".', word[::-1]),
        (f'What is the first letter of "{word}"?', f'The first letter of "{word}" is {word[0]}.'),
        (f'What is the last letter of "{word}"?', f'The last letter of "{word}" is {word[-1]}.'),
        (f"Sort these words alphabetically: {listed}", ", ".join(sorted(several))),
        (f"Put these words in alphabetical order: {listed}", ", ".join(sorted(several))),
        (f"Make a list of these words: {listed}", "\n".join(f"- {one}" for one in several)),
        (f"Make a numbered list: {listed}", "\n".join(f"{i}. {one}" for i, one in enumerate(several, 1))),
        (f"How many words are there: {listed}", f"There are {len(several)} words."),
        (f"Count from {low} to {high}.", ", ".join(map(str, range(low, high + 1)))),
        (f"Count down from {high} to {low}.", ", ".join(map(str, range(high, low - 1, -1)))),
        (f"Repeat after me: {' '.join(several)}", " ".join(several)),
        (f"Write these words as a Python list: {listed}", f"`{several!r}`"),
        (
            f'How many times does the letter {letter} occur in "{word}"?',
            f'The letter {letter} occurs {times} in "{word}".',
        ),
        (
            f'Does the word "{word}" contain the letter {letter}?',
            f'{"Yes" if letter in word else "No"}, "{word}" '
            + (
                f"contains the letter {letter}."
                if letter in word
                else f"does not contain the letter {letter}."
            ),
        ),
        (
            f'Is "{word}" a palindrome?',
            f'{"Yes" if word == word[::-1] else "No"}, backwards it reads "{word[::-1]}".',
        ),
    ]
    if sum(len(one) == len(longest) for one in several) == 1:
        jobs.append((f"Which of these words is the longest: {listed}?", f"The longest word is {longest}."))
    return rng.choice(jobs)
