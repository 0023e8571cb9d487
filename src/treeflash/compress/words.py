"""The words scorer: BM25 of the question over units, and hops along identifiers. Needs no model."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from treeflash.compress.scorer import Query, never

K1, B = 1.2, 0.75  # BM25's usual constants
HOPS = 3
HOP_WEIGHT = 0.9  # of a unit's score for those that share a rare identifier with it
SOURCES = 8  # units with the question's words from which hops start
MIN_SOURCE = 0.5  # of the largest score
RARE = range(2, 5)  # an identifier in this many units links them; in more it is a common word

TERM = re.compile(r"[A-Z]?[a-zß-ÿ]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:[-.]\w+)*|\d{3,}")
NAME = re.compile(r"[\d_]|\B[A-Z]")  # in a name, not in a word: a digit, an underscore, a later capital
STOP = frozenset(
    [
        "a",
        "about",
        "all",
        "also",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "been",
        "but",
        "by",
        "can",
        "could",
        "did",
        "do",
        "does",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "his",
        "how",
        "i",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "just",
        "may",
        "me",
        "more",
        "my",
        "no",
        "not",
        "of",
        "on",
        "one",
        "or",
        "our",
        "out",
        "should",
        "so",
        "some",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "up",
        "us",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "who",
        "why",
        "will",
        "with",
        "would",
        "you",
        "your",
    ]
)


def terms(text: str) -> list[str]:
    """Return the words of a text, names taken apart, in lower case and without the commonest endings."""
    return [_stem(word) for word in map(str.lower, TERM.findall(text)) if word not in STOP]


def _stem(word: str) -> str:
    for ending in ("ing", "ies", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) > 2 and not word.endswith("ss"):
            return word[: -len(ending)] + ("y" if ending == "ies" else "")
    return word


def names(text: str) -> set[str]:
    """Return what looks like an identifier."""
    return {found for found in IDENTIFIER.findall(text) if NAME.search(found)}


class WordScorer:
    name = "words"
    any_thread = True

    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        """Return a score for each unit, at most 1 for each of the queries, times its weight."""
        counts = [Counter(terms(unit)) for unit in units]
        where: dict[str, list[int]] = defaultdict(list)
        for index, unit in enumerate(units):
            for name in names(unit):
                where[name].append(index)
        links = {name: found for name, found in where.items() if len(found) in RARE}
        linked: dict[int, list[str]] = defaultdict(list)
        for name, found in links.items():
            for index in found:
                linked[index].append(name)
        total = [0.0] * len(units)
        for query in queries:
            found = _bm25(counts, set(terms(query.text)))
            for index, score in _with_hops(found, linked, links).items():
                total[index] += query.weight * score
        return total


def _bm25(counts: Sequence[Counter[str]], asked: set[str]) -> dict[int, float]:
    """Return the scores of units that have a word of the question, the largest being 1."""
    lengths = [max(1, each.total()) for each in counts]
    mean = sum(lengths) / max(1, len(lengths))
    scores: dict[int, float] = defaultdict(float)
    for word in sorted(asked):
        having = [index for index, each in enumerate(counts) if word in each]
        rarity = math.log(1 + (len(counts) - len(having) + 0.5) / (len(having) + 0.5))
        for index in having:
            count = counts[index][word]
            norm = K1 * (1 - B + B * lengths[index] / mean)
            scores[index] += rarity * count * (K1 + 1) / (count + norm)
    most = max(scores.values(), default=0.0)
    return {index: score / most for index, score in sorted(scores.items())} if most else {}


def _with_hops(
    scores: dict[int, float], linked: dict[int, list[str]], links: dict[str, list[int]]
) -> dict[int, float]:
    """Add units that share a rare identifier with the best ones, and those that share one with them."""
    best = sorted(scores, key=lambda index: (-scores[index], index))[:SOURCES]
    frontier = {index: scores[index] for index in best if scores[index] >= MIN_SOURCE}
    total = dict(scores)
    for _ in range(HOPS):
        reached: dict[int, float] = {}
        for index, score in frontier.items():
            for name in linked.get(index, ()):
                for other in links[name]:
                    if HOP_WEIGHT * score > max(total.get(other, 0.0), reached.get(other, 0.0)):
                        reached[other] = HOP_WEIGHT * score
        total |= reached
        frontier = dict(sorted(reached.items()))
    return total
