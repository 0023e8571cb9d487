"""TextStream: incremental detokenisation that never splits a character."""

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    def __init__(self, piece: Callable[[int], bytes]):
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Return new text; the bytes of an incomplete character are held back."""
        return self._decoder.decode(b"".join(map(self._piece, ids)))

    def flush(self) -> str:
        """Return held-back bytes as U+FFFD and reset the stream."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
