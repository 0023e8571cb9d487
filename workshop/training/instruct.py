"""Requests of the kinds that assistants get: writing, roles, knowledge, plans, code, given texts."""

import functools
import random
import re
from collections.abc import Sequence
from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates" / "instruct.txt"
SLOT = re.compile(r"\{(\w+)\}")
# Percent of the requests.
SHARES = {"writing": 18, "roleplay": 8, "knowledge": 22, "planning": 12, "coding": 26, "reading": 14}
PASSAGE_WORDS = (40, 110)


@functools.cache
def _templates() -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the lists of words and the templates of each kind."""
    lists: dict[str, tuple[str, ...]] = {}
    kinds: dict[str, tuple[str, ...]] = {}
    for section in TEMPLATES.read_text(encoding="utf-8").split("# ")[1:]:
        title, *lines = section.strip().splitlines()
        if title == "lists":
            for line in lines:
                name, _, entries = line.partition(": ")
                lists[name] = tuple(entries.split("; "))
        else:
            kinds[title] = tuple(line.replace("\\n", "\n") for line in lines)
    return lists, kinds


def passage(text: str, rng: random.Random) -> str:
    """Return whole sentences from the middle of a text."""
    sentences = re.split(r"(?<=[.!?]) +", " ".join(text.split()))
    least, most = PASSAGE_WORDS
    start = rng.randrange(max(1, len(sentences) - 3))
    chosen: list[str] = []
    for sentence in sentences[start:]:
        if sum(len(each.split()) for each in (*chosen, sentence)) > most:
            break
        chosen.append(sentence)
    found = " ".join(chosen)
    return found if len(found.split()) >= least else " ".join(text.split()[:most])


def request(rng: random.Random, texts: Sequence[str]) -> tuple[str, str]:
    """Return a kind and a request; texts: what passages are taken from."""
    lists, kinds = _templates()
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))

    def filled(slot: re.Match[str]) -> str:
        if slot[1] == "passage":
            return passage(rng.choice(texts), rng)
        return str(rng.choice((10, 15, 20, 30, 50, 100, 200, 500))) if slot[1] == "number" else own(slot[1])

    def own(name: str) -> str:
        left = [each for each in lists[name] if each not in used]
        used.append(rng.choice(left))
        return used[-1]

    used: list[str] = []
    return kind, SLOT.sub(filled, rng.choice(kinds[kind]))
