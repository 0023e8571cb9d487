"""Word lists of the generators, read once from templates/words.txt."""

import functools
import random
from pathlib import Path

WORDS = Path(__file__).parent / "templates" / "words.txt"


@functools.cache
def _lists() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        name, _, entries = line.partition(": ")
        if entries:
            separator = "; " if ";" in entries else None
            found[name] = (*found.get(name, ()), *entries.split(separator))
    return found


def words(name: str) -> tuple[str, ...]:
    """Return the list of that name; lines of the same name are joined."""
    return _lists()[name]


def pick(rng: random.Random, name: str) -> str:
    return rng.choice(_lists()[name])


def pick_several(rng: random.Random, name: str, count: int) -> list[str]:
    """Return distinct random entries of one list."""
    return rng.sample(_lists()[name], count)
