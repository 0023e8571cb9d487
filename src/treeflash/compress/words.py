"""The words scorer: BM25 of the question over units, and hops along identifiers. Needs no model."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from treeflash.compress.scorer import Query, never

K1, B = 1.2, 0.75  # BM25's usual constants
NAMED = 2.0  # weight of a word that is part of a name or a number in the question
HOPS = 3
HOP_WEIGHT = 0.9  # of a unit's score for those that share a rare name with it
SOURCES = 8  # units from which hops start
MIN_SOURCE = 0.5  # of the largest score
RARE = range(2, 5)  # a name in this many units links them; in more it is a common word

TERM = re.compile(r"[A-Z]?[a-zß-ÿ]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:[-.]\w+)*|\d{3,}")
NAME = re.compile(r"[\d_]|\B[A-Z]")  # in a name, not in a word: a digit, an underscore, a later capital
PROPER = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+\b")  # a capital that begins no sentence
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


def names(text: str, proper: Set[str] = frozenset()) -> set[str]:
    """Return what looks like an identifier, and the words among `proper`."""
    return {found for found in IDENTIFIER.findall(text) if NAME.search(found) or found in proper}


class Links:
    """Which units share a rare name: along these a question reaches what it does not mention."""

    def __init__(self, units: Sequence[str]):
        proper = {found for unit in units for found in PROPER.findall(unit)}
        where: dict[str, list[int]] = defaultdict(list)
        for index, unit in enumerate(units):
            for name in sorted(names(unit, proper)):
                where[name].append(index)
        self._linked: dict[int, list[int]] = defaultdict(list)
        for found in where.values():
            for index in found if len(found) in RARE else ():
                self._linked[index] += [other for other in found if other != index]

    def spread(self, scores: Sequence[float]) -> list[float]:
        """Raise units that share a rare name with the best ones, and those that share one with them."""
        total = list(scores)
        least = MIN_SOURCE * max(scores, default=0.0)
        best = sorted((-score, index) for index, score in enumerate(scores) if score >= least and score > 0)
        frontier = {index: -score for score, index in best[:SOURCES]}
        for _ in range(HOPS):
            reached: dict[int, float] = {}
            for index, score in frontier.items():
                for other in self._linked.get(index, ()):
                    if HOP_WEIGHT * score > max(total[other], reached.get(other, 0.0)):
                        reached[other] = HOP_WEIGHT * score
            for index, score in reached.items():
                total[index] = score
            frontier = dict(sorted(reached.items()))
        return total


class WordScorer:
    """Remembers the words of the last text: the next question about it costs only its own."""

    name = "words"
    any_thread = True

    def __init__(self) -> None:
        self._last: tuple[list[str], list[Counter[str]], Links] | None = None

    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        """Return a score for each unit, at most 1 for each of the queries, times its weight."""
        _, links = self._index(units)
        return _sums(
            units, [(query.weight, links.spread(found)) for query, found in self._matches(units, queries)]
        )

    def matches(self, units: Sequence[str], queries: Sequence[Query]) -> list[float]:
        """Return the same without hops."""
        return _sums(units, [(query.weight, found) for query, found in self._matches(units, queries)])

    def spread(self, units: Sequence[str], scores: Sequence[float]) -> list[float]:
        """Return any scores with hops."""
        return self._index(units)[1].spread(scores)

    def _index(self, units: Sequence[str]) -> tuple[list[Counter[str]], Links]:
        units = list(units)
        if self._last is None or self._last[0] != units:
            self._last = units, [Counter(terms(unit)) for unit in units], Links(units)
        return self._last[1:]

    def _matches(self, units: Sequence[str], queries: Sequence[Query]) -> Iterator[tuple[Query, list[float]]]:
        counts, _ = self._index(units)
        for query in queries:
            named = {word for name in names(query.text) for word in terms(name)}
            yield query, _bm25(counts, {word: NAMED if word in named else 1.0 for word in terms(query.text)})


def _sums(units: Sequence[str], weighted: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    return [sum(weight * scores[index] for weight, scores in weighted) for index in range(len(units))]


def _bm25(counts: Sequence[Counter[str]], asked: Mapping[str, float]) -> list[float]:
    """Return how well each unit matches the words of the question, 1 for the best."""
    lengths = [max(1, each.total()) for each in counts]
    mean = sum(lengths) / max(1, len(lengths))
    scores = [0.0] * len(counts)
    for word in sorted(asked):
        having = [index for index, each in enumerate(counts) if word in each]
        rarity = asked[word] * math.log(1 + (len(counts) - len(having) + 0.5) / (len(having) + 0.5))
        for index in having:
            count = counts[index][word]
            norm = K1 * (1 - B + B * lengths[index] / mean)
            scores[index] += rarity * count * (K1 + 1) / (count + norm)
    most = max(scores, default=0.0)
    return [score / most for score in scores] if most else scores
