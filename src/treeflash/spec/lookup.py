"""Continuations copied from earlier in the text: where its last tokens stood before, what followed there."""

import math
from collections import deque

_NGRAM = 3
_PLACES = 4  # of an n-gram that are remembered
_LONGEST = 32  # tokens of agreement that are counted
# Length of agreement up to which a class reaches, and how often a copy is taken to be right at first.
_CLASSES = ((3, 0.45), (5, 0.6), (8, 0.75), (16, 0.88), (_LONGEST, 0.94))
_PRIOR = 6.0
_FADE = 0.98


class ContextLookup:
    """One conversation's tokens, indexed by every run of three."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], deque[int]] = {}
        self._right = [prior * _PRIOR for _, prior in _CLASSES]
        self._seen = [_PRIOR] * len(_CLASSES)
        self._kind = 0  # class of the last guess
        self._guess: list[int] = []  # its tokens, as far as they are still open

    def __len__(self) -> int:
        return len(self._text)

    def append(self, tokens: list[int]) -> None:
        """Tokens that have been decided; the anchor among them."""
        self._learn(tokens)
        for token in tokens:
            self._text.append(token)
            if len(self._text) >= _NGRAM:
                key = tuple(self._text[-_NGRAM:])
                self._places.setdefault(key, deque(maxlen=_PLACES)).append(len(self._text))

    def propose(self, depth: int) -> tuple[list[int], float]:
        """`depth` tokens and the log probability of each given those before it; none where nothing agrees."""
        end, best, length = len(self._text), None, 0
        for place in reversed(self._places.get(tuple(self._text[-_NGRAM:]), ())):
            agreed = self._agreement(place) if place < end else 0
            if agreed > length:
                best, length = place, agreed
        if best is None:
            self._guess = []
            return [], 0.0
        # A copy that runs into the end of the text goes on with what it has copied: repetition repeats.
        period = end - best
        tokens = [self._text[best + i % period] for i in range(depth)]
        kind = next(i for i, (longest, _) in enumerate(_CLASSES) if length <= longest)
        self._kind, self._guess = kind, tokens
        return tokens, math.log(self._right[kind] / self._seen[kind])

    def _agreement(self, place: int) -> int:
        """How many tokens before `place` equal the last ones of the text."""
        count, end = 0, len(self._text)
        while count < min(_LONGEST, place) and self._text[place - 1 - count] == self._text[end - 1 - count]:
            count += 1
        return count

    def _learn(self, tokens: list[int]) -> None:
        kind, guess, self._guess = self._kind, self._guess, self._guess[len(tokens) :]
        for guessed, token in zip(guess, tokens, strict=False):
            self._seen[kind] = _FADE * self._seen[kind] + 1
            self._right[kind] = _FADE * self._right[kind] + 0.99 * (guessed == token)
            if guessed != token:
                self._guess = []
                return
