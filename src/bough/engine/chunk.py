"""The forward pass over a prompt chunk, some layers at a time: others decode between two parts of it."""

from collections.abc import Generator

import torch
from torch import Tensor

_PART_S = 0.1  # of a part, about; it has one layer at least
_FIRST_LAYERS = 4  # of a part before anything has been timed
_FALL = 0.8  # of the time that is expected of a layer remains, at least, after a part that took less


class ChunkForward:
    """A chunk's layers as they are run; the sequence's state is whole before the first and after the last."""

    def __init__(self, layers: Generator[None, None, Tensor], *, rows: int, total: int):
        """`layers` pauses after each of `total` layers but the last and returns the last row [1, width]."""
        self._layers = layers
        self._total, self._done = total, 0
        self.rows = rows
        self.hidden: Tensor | None = None  # what `layers` has returned
        self._failed = False

    @property
    def processed(self) -> int:
        """Return the rows that the layers run so far stand for."""
        return self.rows * self._done // self._total

    def run(self, layers: int | None = None) -> int:
        """Run at most `layers` layers, or all that are left; return how many were run."""
        if self._failed:
            raise RuntimeError("a chunk of the prompt has failed before")
        before = self._done
        try:
            while self.hidden is None and (layers is None or self._done - before < layers):
                next(self._layers)
                self._done += 1
        except StopIteration as end:
            self.hidden, self._done = end.value, self._total
        except BaseException:
            self._failed = True
            raise
        return self._done - before


class Pace:
    """Runs chunks in parts of a tenth of a second on a GPU; on a CPU, where they are short, whole.

    The GPU always has a part enqueued beside the one that runs, and no more: new requests, cancellations and
    progress wait for two parts at most. What only reads ahead gives way after its chunk.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds = 0.0  # of one row of one layer; 0: not known
        self._enqueued: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None

    def run(self, chunk: ChunkForward) -> None:
        """Run the next part; on a GPU, return when the part before is over."""
        if self._device.type != "cuda":
            chunk.run()
            return
        stream = torch.cuda.current_stream(self._device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        ran = chunk.run(self.layers(chunk.rows))
        last.record(stream)
        before, self._enqueued = self._enqueued, (first, last, ran * chunk.rows)
        if before is not None:
            before[1].synchronize()
            self.note(before[0].elapsed_time(before[1]) / 1000, before[2])

    def layers(self, rows: int) -> int:
        """Return how many layers of a chunk of `rows` rows are a part."""
        return max(1, int(_PART_S / (rows * self._seconds))) if self._seconds else _FIRST_LAYERS

    def note(self, seconds: float, rows: int) -> None:
        """Note what a part took; rows: of the chunk, times the part's layers.

        Attention layers take ten times as long as others after a long text. The part after one without any
        may have them again: what is expected falls slowly.
        """
        if rows:
            self._seconds = max(seconds / rows, _FALL * self._seconds)
