"""The words scorer: BM25 of the question over units, and hops along identifiers. Needs no model."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache

from bough.compress.scorer import Matches, Query, never

K1, B = 1.2, 0.75  # BM25's usual constants
NAMED = 2.0  # weight of a word that is part of a name or a number in the question
HOPS = 3
HOP_WEIGHT = 0.9  # of a unit's score for those that share a rare name with it
SOURCES = 8  # units from which hops start
MIN_SOURCE = 0.5  # of the largest score
RARE = range(2, 5)  # a name in this many units links them; in more it is a common word
STEP = 256  # units whose words are read at a time: some 4 ms, less than a chunk takes on a GPU
WORDS = 1 << 15  # different ones of which it is remembered what they are

TERM = re.compile(r"[A-Z]?[a-zß-ÿ]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:[-.]\w+)*|\d{3,}")
NAME = re.compile(r"[\d_]|\B[A-Z]")  # in a name, not in a word: a digit, an underscore, a later capital
PROPER = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+\b")  # a capital that begins no sentence
_STOP = """
a about all also an and any are as at be been but by can could did do does for from had has have he her his
how i if in into is it its just may me more my no not of on one or our out should so some than that the
their them then there these they this to up us was we were what when where which who why will with would you
your
"""
STOP = frozenset(_STOP.split())


def terms(text: str) -> list[str]:
    """Return the words of a text, names taken apart, in lower case and without the commonest endings."""
    return list(filter(None, map(_term, TERM.findall(text))))


@lru_cache(WORDS)
def _term(word: str) -> str:
    """Return a word in lower case and without its ending; nothing for a common one."""
    word = word.lower()
    if word in STOP:
        return ""
    for ending in ("ing", "ies", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) > 2 and not word.endswith("ss"):
            return word[: -len(ending)] + ("y" if ending == "ies" else "")
    return word


def names(text: str, proper: Set[str] = frozenset()) -> set[str]:
    """Return what looks like an identifier, and the words among `proper`."""
    return _names(IDENTIFIER.findall(text), proper)


def _names(identifiers: Iterable[str], proper: Set[str]) -> set[str]:
    return {name for name in identifiers if _is_name(name) or name in proper}


@lru_cache(WORDS)
def _is_name(word: str) -> bool:
    return NAME.search(word) is not None


class Links:
    """Which units share a rare name: along these a question reaches what it does not mention."""

    def __init__(self, where: Mapping[str, Sequence[int]]):
        """`where`: the units of each name, in order."""
        self._linked: dict[int, list[int]] = defaultdict(list)
        for places in where.values():
            for index in places if len(places) in RARE else ():
                self._linked[index] += [other for other in places if other != index]

    def spread(self, scores: Sequence[float], starts: Sequence[float]) -> list[float]:
        """Raise units that share a rare name with the best of `starts`, and from there on."""
        total = list(scores)
        least = MIN_SOURCE * max(starts, default=0.0)
        best = sorted((-score, index) for index, score in enumerate(starts) if score >= least and score > 0)
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


class Postings:
    """Which units have a word: what BM25 asks."""

    def __init__(self) -> None:
        self._lengths: list[int] = []  # words of each unit
        self._where: dict[str, list[int]] = defaultdict(list)  # a unit as often as it has the word

    def add(self, unit: str) -> None:
        words, index = terms(unit), len(self._lengths)
        self._lengths.append(max(1, len(words)))
        for word in words:
            self._where[word].append(index)

    def bm25(self, asked: Mapping[str, float]) -> tuple[list[float], list[float]]:
        """Return how well each unit matches the question's words, 1 for the best, and its share of them."""
        lengths = self._lengths
        mean = sum(lengths) / max(1, len(lengths))
        scores, shares, all_words = [0.0] * len(lengths), [0.0] * len(lengths), 0.0
        for word in sorted(asked):
            having = Counter(self._where.get(word, ()))
            rarity = asked[word] * math.log(1 + (len(lengths) - len(having) + 0.5) / (len(having) + 0.5))
            all_words += rarity
            for index, count in having.items():
                norm = K1 * (1 - B + B * lengths[index] / mean)
                scores[index] += rarity * count * (K1 + 1) / (count + norm)
                shares[index] += rarity
        most = max(scores, default=0.0)
        if not most:
            return scores, shares
        return [score / most for score in scores], [share / all_words for share in shares]


class _Index:
    """The words of a text, which `steps` reads, some units at a time."""

    def __init__(self, units: list[str]):
        self.units = units
        self.postings, self.links = Postings(), Links({})
        self.failed = False
        self.steps = self._steps()

    def _steps(self) -> Iterator[None]:
        try:
            yield from self._read()
        except BaseException:  # whatever it was: half an index is of no use
            self.failed = True
            raise

    def _read(self) -> Iterator[None]:
        identifiers: list[set[str]] = []
        proper: set[str] = set()
        for index, unit in enumerate(self.units, 1):
            self.postings.add(unit)
            identifiers.append(set(IDENTIFIER.findall(unit)))
            proper.update(PROPER.findall(unit))
            if index % STEP == 0:
                yield
        where: dict[str, list[int]] = defaultdict(list)
        for index, identifier_set in enumerate(identifiers):
            for name in sorted(_names(identifier_set, proper)):
                where[name].append(index)
        self.links = Links(where)


class WordScorer:
    """Remembers the words of the last text: the next question about it costs only its own."""

    name = "words"
    any_thread = True

    def __init__(self) -> None:
        self._last = _Index([])

    def indexing(self, units: Sequence[str]) -> Iterator[None]:
        """Read the words of a text in small steps; what the caller leaves of them is done when needed."""
        if self._last.failed or self._last.units != units:
            self._last = _Index(list(units))
        return self._last.steps

    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        """Return a score for each unit, at most 1 for each of the queries, times its weight."""
        links = self._index(units).links
        matches = self._matches(units, queries)
        return _sums(units, [(query.weight, links.spread(scores, scores)) for query, scores, _ in matches])

    def matches(self, units: Sequence[str], queries: Sequence[Query]) -> Matches:
        """Return the same without hops, and the share of a query's words that each unit has."""
        matches = list(self._matches(units, queries))
        return Matches(
            _sums(units, [(query.weight, scores) for query, scores, _ in matches]),
            [max(shares) for shares in zip(*(shares for _, _, shares in matches), strict=True)],
        )

    def spread(self, units: Sequence[str], scores: Sequence[float], starts: Sequence[float]) -> list[float]:
        """Return any scores with hops from the best of `starts`."""
        return self._index(units).links.spread(scores, starts)

    def _index(self, units: Sequence[str]) -> _Index:
        for _ in self.indexing(units):
            pass
        return self._last

    def _matches(
        self, units: Sequence[str], queries: Sequence[Query]
    ) -> Iterator[tuple[Query, list[float], list[float]]]:
        """Yield for each query the scores of all units, and the shares of its words that they have."""
        postings = self._index(units).postings
        for query in queries:
            named = names(query.text)
            parts = {word for name in named for word in terms(name)}
            scores, shares = postings.bm25(
                {word: NAMED if word in parts else 1.0 for word in terms(query.text)}
            )
            whole = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(named)))})(?!\w)")
            for index, unit in enumerate(units) if named else ():
                if whole.search(unit):
                    shares[index] = 1.0
            yield query, scores, shares


def _sums(units: Sequence[str], weighted: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    return [sum(weight * scores[index] for weight, scores in weighted) for index in range(len(units))]
