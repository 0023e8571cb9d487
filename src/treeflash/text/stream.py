"""Text of a growing token sequence without ever splitting a character; knows no vocabulary."""

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """Incremental detokeniser: the pieces it returns join to the text of all ids pushed."""

    def __init__(self, piece: Callable[[int], bytes]):
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """New complete text; the bytes of an unfinished character are held back."""
        return self._decoder.decode(b"".join(map(self._piece, ids)))

    def flush(self) -> str:
        """What was held back, as U+FFFD; the stream is empty afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
