"""Repeats: keeps the answers of a chat from repeating themselves. A function of the tokens alone."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.compress.conversation import bodies
from bough.session.loops import LoopFinder
from bough.text.sentences import Prose
from bough.text.tokenizer import Tokenizer

# Tokens from a sentence's end to where it counts. No tree is deeper: what it must not hold is known before.
_LATER = 64
_COUNTED = 1024  # tokens that repeat but for their numbers, as where a small model counts years without end
_DIGIT, _NUMBER = re.compile(rb"\d"), -1
_STARTS = 64  # of a period, where others may have begun it
_MARKS = b" \t\n.,:;!?\"'*_-"  # around a sentence

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Written:
    """An answer so far."""

    prose: Prose
    count: int = 0  # tokens


class Repeats:
    """An answer ends with the third period in a row; no sentence stands in a chat more than `most` times.

    It is not written beyond its half. What others than the assistant have written may be repeated.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Messages, most: int, *, begun: bool):
        """most: 0 is any number. begun: the last message is the beginning of the answer."""
        self._tokenizer, self._most = tokenizer, most
        self._loops, self._counting = LoopFinder(), LoopFinder(_COUNTED)
        self._distance: float = self._loops.distance  # tokens to a loop, at least
        self._counts: Counter[bytes] = Counter()
        self._full: dict[bytes, int] = {}  # sentences that stand `most` times, and from which token on
        self.beginning = Written(Prose())
        self.avoided, self.ended = 0, False
        texts = bodies(messages)
        self._others = b"\n".join(_bytes(text.text) for text in texts if text.role != "assistant")
        for text in texts if most else ():
            if text.role == "assistant":
                prose, sentences = Prose().after(_bytes(text.text))
                if begun and text.message == len(messages) - 1:
                    self.beginning = Written(prose)
                else:
                    _, last = prose.after(b"\n")
                    sentences += last
                self._count(sentences, 0)

    def idle(self, rows: int) -> bool:
        """Return whether any tree with `rows` rows may be accepted as it is, whatever follows its rows."""
        return not self._full and self._distance >= rows

    def after(self, answer: Written, token: int) -> Written | None:
        """Return the answer with one token more, None where it may not follow."""
        if token in self.forbidden(answer):
            return None
        return Written(answer.prose.after(self._tokenizer.token_bytes(token))[0], answer.count + 1)

    def forbidden(self, answer: Written) -> list[int]:
        """Return the tokens that may not follow."""
        written = answer.prose.written
        rests = [
            sentence[len(written) :]
            for sentence, since in self._full.items()
            if answer.count >= since and not answer.prose.code and len(sentence) <= 2 * len(written)
            if sentence.startswith(written)
        ]
        # Nor the same word without the space before it.
        texts = {text for rest in rests for text in (rest, rest.lstrip())}
        return [token for text in sorted(texts) for token in self._tokenizer.beginning(text)]

    def accept(self, answer: Written, token: int) -> bool:
        """Advance by the committed token after an answer; return whether it is the last one."""
        if self._most:
            self.avoided += bool(self.forbidden(answer))
            sentences = answer.prose.after(self._tokenizer.token_bytes(token))[1]
            self._count(sentences, answer.count + _LATER)
        if self._distance == math.inf:  # what was asked for
            return False
        self._loops.advance(token)
        self._loops.commit()
        self._distance = self._loops.distance
        if self._distance <= 0 and (period := self._loops.period):
            self.ended = not self._quoted(period)
            self._distance = math.inf
        elif self._most:
            piece = self._tokenizer.token_bytes(token)
            self._counting.advance(_NUMBER if _DIGIT.search(piece) else token)
            self._counting.commit()
            self._distance = min(self._distance, self._counting.distance)
            self.ended = self._counting.found
        return self.ended

    def _count(self, sentences: Sequence[bytes], since: int) -> None:
        for sentence in sentences:
            self._counts[sentence] += 1
            if self._counts[sentence] == self._most and sentence.rstrip(_MARKS) not in self._others:
                self._full[sentence] = since

    def _quoted(self, period: Sequence[int]) -> bool:
        """Return whether others have written a loop's period, which may begin at any of its words."""
        text = b"".join(map(self._tokenizer.token_bytes, period))
        starts = [0, *(space.end() for space in re.finditer(rb"\s+", text))][:_STARTS]
        return any((text[at:] + text[:at]).strip(_MARKS) in self._others for at in starts)


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")
