"""Prompt lookup: proposes what followed the last tokens earlier in the text (n-gram match)."""

import math
from itertools import takewhile

from bough.spec.calibration import CALIBRATION_DECAY

LONGEST_MATCH = 32  # tokens of agreement that are counted
# Length of the match up to which a class reaches, and how often a copied token is right before any outcome.
MATCH_CLASSES = ((3, 0.45), (5, 0.6), (8, 0.75), (16, 0.88), (LONGEST_MATCH, 0.94))
LOOKUP_PRIOR = 12.0
LEAST_ACCURACY = 0.05
LOOKUP_DECAY = 0.98


class LookupAccuracy:
    """How often a token copied by prompt lookup is right, by the length of the match."""

    def __init__(self, usual: "LookupAccuracy | None" = None):
        """`usual`: that of all texts, from which a new text begins, and which learns from it."""
        self._usual = usual
        classes = range(len(MATCH_CLASSES))
        priors = [usual._rate(index) if usual else MATCH_CLASSES[index][1] for index in classes]
        self._right = [prior * LOOKUP_PRIOR for prior in priors]
        self._seen = [LOOKUP_PRIOR] * len(MATCH_CLASSES)

    def log_probability(self, match: int) -> float:
        return math.log(self._rate(_match_class(match)))

    def observe(self, match: int, right: bool) -> None:
        index = _match_class(match)
        decay = LOOKUP_DECAY if self._usual is not None else CALIBRATION_DECAY
        self._seen[index] = decay * self._seen[index] + 1
        self._right[index] = decay * self._right[index] + 0.99 * right
        if self._usual is not None:
            self._usual.observe(match, right)

    def _rate(self, index: int) -> float:
        # A class that was never right is still tried where rows cost nothing.
        return max(self._right[index] / self._seen[index], LEAST_ACCURACY)


def _match_class(match: int) -> int:
    return next(i for i, (longest, _) in enumerate(MATCH_CLASSES) if match <= longest)


_NGRAM = 3
_OCCURRENCES = 3  # of an n-gram that are compared, the newest


class PromptLookup:
    """One sequence's tokens, indexed by every n-gram."""

    def __init__(self, usual: LookupAccuracy | None = None):
        """`usual`: how often copies are right in all texts."""
        self._text: list[int] = []
        self._seen = 0  # of them, up to the end of the last image: ids below 0
        self._ngram: tuple[int, ...] = ()  # the last one
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram: the last position after it
        self._earlier: list[int] = []  # for each position after an n-gram the one before it; 0: none
        self._accuracy = LookupAccuracy(usual or LookupAccuracy())
        self._match = 0  # length of the match of the last proposal
        self._open: list[int] = []  # its tokens that have not been compared with the text yet

    def __len__(self) -> int:
        return len(self._text)

    @property
    def text(self) -> list[int]:
        """Return all tokens, of images ids below 0; not to be changed."""
        return self._text

    @property
    def tokens(self) -> list[int]:
        """Return the text, of one with images what follows the last."""
        return self._text[self._seen :]

    def append(self, tokens: list[int]) -> bool:
        """Add sampled tokens or tokens of the prompt; return whether the last of them were there before."""
        if self._open:
            self._observe(tokens)
        for token in tokens:
            self._text.append(token)
            if token < 0:
                self._seen = len(self._text)
            ngram = self._ngram = (*self._ngram[1 - _NGRAM :], token)
            self._earlier.append(self._newest.get(ngram, 0))
            self._newest[ngram] = len(self._text)
        return bool(self._earlier) and self._earlier[-1] > 0

    def propose(self, depth: int) -> tuple[list[int], float]:
        """Return `depth` tokens and the log probability of each given those before it; [] without a match."""
        end, best, length = len(self._text), 0, 0
        position = self._earlier[-1] if self._text else 0
        for _ in range(_OCCURRENCES):
            if not position:
                break
            if (match := self._match_length(position)) > length:
                best, length = position, match
            position = self._earlier[position - 1]
        if not best:
            self._open = []
            return [], 0.0
        # A copy that reaches the end of the text continues with what it has copied: repetition repeats.
        period = end - best
        tokens = [self._text[best + i % period] for i in range(depth)]
        if best < self._seen:
            tokens = list(takewhile(lambda token: token >= 0, tokens))  # an image is not sampled
        self._match, self._open = length, tokens
        return tokens, self._accuracy.log_probability(length)

    def _match_length(self, position: int) -> int:
        """Return how many tokens before `position` equal the last ones of the text."""
        count, end = 0, len(self._text)
        longest = min(LONGEST_MATCH, position)
        while count < longest and self._text[position - 1 - count] == self._text[end - 1 - count]:
            count += 1
        return count

    def _observe(self, tokens: list[int]) -> None:
        proposed, self._open = self._open, self._open[len(tokens) :]
        for guess, token in zip(proposed, tokens, strict=False):
            self._accuracy.observe(self._match, guess == token)
            if guess != token:
                self._open = []
                return
