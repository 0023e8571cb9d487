"""What the next engine step does: admit a sequence, process a prompt chunk, or decode. One at a time."""

from collections import deque
from dataclasses import dataclass

from treeflash.engine.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class Admit:
    """Give a waiting sequence a slot."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Process the prompt's tokens from `start` up to `stop`."""

    sequence: Sequence
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Verify one tree."""

    sequence: Sequence


class Scheduler:
    """First come, first served; the next sequence is admitted when the running one is removed."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()
        self._running: Sequence | None = None

    @property
    def running(self) -> Sequence | None:
        return self._running

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence is self._running:
            self._running = None
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def next(self) -> Admit | PrefillChunk | Decode | None:
        """Return the next step's work; None: no sequence can run."""
        if self._running is None:
            if not self._waiting:
                return None
            self._running = self._waiting.popleft()
            return Admit(self._running)
        sequence = self._running
        match sequence.phase:
            case Phase.PREFILL:
                stop = next(end for end in sequence.chunk_ends if end > sequence.processed)
                return PrefillChunk(sequence, sequence.processed, stop)
            case Phase.DECODE:
                return Decode(sequence)
        return None
