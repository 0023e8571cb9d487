"""What a scorer of units is, and the mixture of two."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bough.errors import BoughError

if TYPE_CHECKING:
    from bough.compress.words import WordScorer

WORDS_WEIGHT = 0.25  # of the words score beside attention; docs/compression.md has the measurement
LEAST_START = 0.25  # of its score a unit without a word of the question starts hops


class ScoringFailed(BoughError):
    """No usable scores; the prompt is read exactly."""


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked of the text."""

    text: str
    weight: float = 1.0


def never() -> bool:
    return False


class Scorer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def any_thread(self) -> bool:
        """Return whether it may run beside the engine; else only in the engine's thread."""
        ...

    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        """Return how much each unit of a text matters to the queries; 0 or more.

        `cancelled` is asked again and again, on a GPU while that works.
        """
        ...


@dataclass(frozen=True, slots=True)
class Matches:
    """How well units match the words of the queries, and how far that can be trusted."""

    scores: list[float]  # 1 for the best unit of a query, times the query's weight
    shares: list[float]  # of a query's words, by their rarity; 1 with a name or number of it


class MixedScorer:
    """The scores of a model and, with less weight, of words; hops start from the best of both.

    Words and hops count by the share of the question that a unit has: one common word of it proves nothing.
    """

    def __init__(self, model: Scorer, words: "WordScorer"):
        self._model, self._words = model, words

    @property
    def name(self) -> str:
        return f"{self._model.name} + {self._words.name}"

    @property
    def any_thread(self) -> bool:
        return self._model.any_thread

    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        steps = self._words.indexing(units)

        def asked() -> bool:
            next(steps, None)  # the host has time while a GPU scores
            return cancelled()

        model = scaled(self._model.score(units, queries, asked))
        words = self._words.matches(units, queries)
        parts = zip(model, scaled(words.scores), words.shares, strict=True)
        both = [a + WORDS_WEIGHT * b * share for a, b, share in parts]
        starts = [score * max(share, LEAST_START) for score, share in zip(both, words.shares, strict=True)]
        return self._words.spread(units, both, starts)


def scaled(scores: Sequence[float]) -> list[float]:
    """Return the scores divided by the largest; raise for values that are no scores."""
    if not all(math.isfinite(score) and score >= 0 for score in scores):
        raise ScoringFailed("the scorer returned a number that is no score")
    most = max(scores, default=0.0)
    return [score / most for score in scores] if most else list(scores)
