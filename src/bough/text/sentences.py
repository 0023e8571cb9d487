"""Sentences of prose in text that comes in pieces; code between fences has none."""

import re
from dataclasses import dataclass
from typing import Self

_FENCE = b"```"
_END = re.compile(rb"(?<=[.!?])\s+|\n+|```")
_WORDS = 4  # of the shortest: fewer may stand again and again
_LONGEST = 2000  # bytes


@dataclass(frozen=True, slots=True)
class Prose:
    """What is written of the sentence at the end of a text; in code, of the fence that ends it."""

    written: bytes = b""
    code: bool = False

    def after(self, piece: bytes) -> tuple[Self, list[bytes]]:
        """Return the end of the text with one piece more, and the sentences that end in it."""
        text, code, sentences, start = self.written + piece, self.code, list[bytes](), 0
        while True:
            if code:
                fence = text.find(_FENCE, start)
                if fence < 0:
                    return type(self)(text[start:][-2:], True), sentences
                start = fence + len(_FENCE)
            end = _END.search(text, start)
            if end is None:
                return type(self)(text[start:].lstrip()[:_LONGEST]), sentences
            sentence, code, start = text[start : end.start()].strip(), end[0] == _FENCE, end.end()
            if len(sentence.split()) >= _WORDS and not sentence.startswith(b"|"):  # a table's row
                sentences.append(sentence)
