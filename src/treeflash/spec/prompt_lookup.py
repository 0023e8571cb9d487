"""Prompt lookup: proposes what followed the last tokens earlier in the text (n-gram match)."""

from collections import deque

from treeflash.spec.policy import LONGEST_MATCH, LookupAccuracy

_NGRAM = 3
_OCCURRENCES = 4  # of an n-gram that are indexed, the newest


class PromptLookup:
    """One sequence's tokens, indexed by every n-gram."""

    def __init__(self, usual: LookupAccuracy | None = None):
        """`usual`: how often copies are right in all texts."""
        self._text: list[int] = []
        self._index: dict[tuple[int, ...], deque[int]] = {}  # n-gram: positions after it
        self._accuracy = LookupAccuracy(usual or LookupAccuracy())
        self._match = 0  # length of the match of the last proposal
        self._open: list[int] = []  # its tokens that have not been compared with the text yet

    def __len__(self) -> int:
        return len(self._text)

    def append(self, tokens: list[int]) -> None:
        """Add sampled tokens or tokens of the prompt."""
        self._observe(tokens)
        for token in tokens:
            self._text.append(token)
            if len(self._text) >= _NGRAM:
                key = tuple(self._text[-_NGRAM:])
                self._index.setdefault(key, deque(maxlen=_OCCURRENCES)).append(len(self._text))

    def propose(self, depth: int) -> tuple[list[int], float]:
        """Return `depth` tokens and the log probability of each given those before it; [] without a match."""
        end, best, length = len(self._text), None, 0
        for position in reversed(self._index.get(tuple(self._text[-_NGRAM:]), ())):
            match = self._match_length(position) if position < end else 0
            if match > length:
                best, length = position, match
        if best is None:
            self._open = []
            return [], 0.0
        # A copy that reaches the end of the text continues with what it has copied: repetition repeats.
        period = end - best
        tokens = [self._text[best + i % period] for i in range(depth)]
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
