"""LoopFinder: whether the last tokens repeat themselves, by their period. A function of the tokens alone."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

LONGEST = 4096  # tokens of a period
# A loop is found when this many tokens equal those a period before them: the third time round.
_REPEATED, _LEAST = 2, 32
# Grids, tables and rulers repeat few tokens, and rightly: such a period has to go on for longer.
_FEW, _LEAST_OF_FEW = 8, 256


RUN, TIMES = 12, 3  # a whole output loops once an n-gram of RUN tokens occurs TIMES times


def loop_start(tokens: Sequence[int]) -> int | None:
    """Return the number of tokens after which the output loops (an n-gram's third occurrence), or None.

    Acceptance after that point says nothing about real text.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(RUN, len(tokens) + 1):
        ngram = tuple(tokens[end - RUN : end])
        seen[ngram] += 1
        if seen[ngram] == TIMES:
            return end
    return None


class LoopFinder:
    def __init__(self, least: int = _LEAST) -> None:
        """least: tokens that a loop repeats."""
        self._least = least
        self._at_least = np.maximum(_NEEDED, least)
        self._tokens = np.zeros(1024, np.int64)
        self._count = 0
        # By period, from 1 on: how many of the last tokens equal the token a period before.
        self._matches = np.zeros(LONGEST, np.int32)
        self._before: list[np.ndarray] = []  # the matches before each token since `commit`

    @property
    def distance(self) -> int:
        """Return how many more tokens it takes until a loop can be found, at least."""
        return int((self._at_least - self._matches).min())

    @property
    def found(self) -> bool:
        return bool(self.period)

    @property
    def period(self) -> list[int]:
        """Return the tokens that repeat themselves, none unless a loop is found."""
        for length in map(int, np.flatnonzero(self._matches >= self._at_least) + 1):
            if self._matches[length - 1] >= self._needed(length):
                return self._tokens[self._count - length : self._count].tolist()
        return []

    def advance(self, token: int) -> None:
        self._before.append(self._matches)
        reach = min(self._count, LONGEST)
        matches = np.zeros_like(self._matches)
        earlier = self._tokens[self._count - reach : self._count][::-1]
        np.multiply(self._matches[:reach] + 1, earlier == token, out=matches[:reach])
        self._matches = matches
        if self._count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[self._count] = token
        self._count += 1

    def back(self) -> None:
        """Take back the last token."""
        self._matches = self._before.pop()
        self._count -= 1

    def commit(self) -> None:
        self._before.clear()

    def _needed(self, period: int) -> int:
        few = len(np.unique(self._tokens[self._count - period : self._count])) < _FEW
        return max(_REPEATED * period, _LEAST_OF_FEW if few else _LEAST, self._least)


_PERIODS = np.arange(1, LONGEST + 1, dtype=np.int32)
_NEEDED = np.maximum(_REPEATED * _PERIODS, np.where(_PERIODS < _FEW, _LEAST_OF_FEW, _LEAST))
