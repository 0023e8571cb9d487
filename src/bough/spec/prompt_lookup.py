"""Prompt lookup: proposes what followed the last tokens earlier in the text (n-gram match)."""

from bough.spec.policy import LONGEST_MATCH, LookupAccuracy

_NGRAM = 3
_OCCURRENCES = 3  # of an n-gram that are compared, the newest


class PromptLookup:
    """One sequence's tokens, indexed by every n-gram."""

    def __init__(self, usual: LookupAccuracy | None = None):
        """`usual`: how often copies are right in all texts."""
        self._text: list[int] = []
        self._ngram: tuple[int, ...] = ()  # the last one
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram: the last position after it
        self._earlier: list[int] = []  # for each position after an n-gram the one before it; 0: none
        self._accuracy = LookupAccuracy(usual or LookupAccuracy())
        self._match = 0  # length of the match of the last proposal
        self._open: list[int] = []  # its tokens that have not been compared with the text yet

    def __len__(self) -> int:
        return len(self._text)

    @property
    def tokens(self) -> list[int]:
        return self._text

    def append(self, tokens: list[int]) -> bool:
        """Add sampled tokens or tokens of the prompt; return whether the last of them were there before."""
        if self._open:
            self._observe(tokens)
        for token in tokens:
            self._text.append(token)
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
