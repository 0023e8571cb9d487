"""What the next engine step does: admit a sequence, process a chunk of one prompt, or decode all that can.

A short chunk needs no step of its own while others decode: its tokens are rows of their steps.

First come, first served. A sequence is admitted when a slot and pages for its prompt are free. A prompt
that is much shorter than what is left of the oldest gets every second chunk: it is not stuck after a long
one, which loses half of its time at most. While some sequences decode and others have prompts to process,
chunks get a share of the time: after some layers of a chunk, decode steps run until they have had their
part. A chunk's size never depends on load, only when it runs does. When pages run out, the youngest
sequence is parked, its state whole; it comes back before any other is admitted.
Requests for prefill alone run only while there are no others, one at a time, and give way to any that comes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bough.engine.sequence import Phase, Sequence

PREFILL_SHARE = 0.5  # of the time, while others decode
# Chunks of 6,000 and 5,000 tokens in turn both end late, at 8.7 and 7.5 s on a CPU (one after the other 4.7
# and 8.3). Beside 6,000 tokens a prompt of 100 takes 0.4 s instead of 5.2, and the long one no longer.
MUCH_SHORTER = 0.25  # of what is left of the oldest prompt


@dataclass(frozen=True, slots=True)
class Admit:
    """Give a waiting or parked sequence a slot."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Process the prompt's tokens from `start` up to `stop`, or go on with them for some layers."""

    sequence: Sequence
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Verify one tree of each sequence, all in one forward pass."""

    sequences: list[Sequence]
    readers: list[Sequence] = field(default_factory=list)  # prompts that the same pass reads on, oldest first


Work = Admit | PrefillChunk | Decode


class Scheduler:
    def __init__(self, slots: int, *, prefill_share: float = PREFILL_SHARE):
        assert slots >= 1 and 0 < prefill_share < 1
        self._slots = slots
        self._decode_per_prefill = (1 - prefill_share) / prefill_share
        self._owed_s = 0.0  # decode time that chunks have taken from sequences that could have decoded
        self._oldest_is_due = True  # the next chunk is one of the oldest prompt, not of the shortest
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # with a slot, in the order of arrival
        self.parked: list[Sequence] = []  # in the order of arrival
        self.prefills: deque[Sequence] = deque()  # for prefill alone
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.parked or self.prefills)

    @property
    def contended(self) -> bool:
        """Whether there may be other work than the next step of one decoding sequence."""
        others = self.waiting or self.parked
        return len(self.running) > 1 or (len(self.running) < self._slots and bool(others))

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals
        (self.prefills if sequence.request.prefill_only else self.waiting).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        for sequences in (self.waiting, self.running, self.parked, self.prefills):
            if sequence in sequences:
                sequences.remove(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence's slot."""
        self.running.remove(sequence)
        self.parked = sorted([*self.parked, sequence], key=lambda each: each.arrival)

    @property
    def preempted(self) -> list[Sequence]:
        """Return the running sequences for prefill alone that have to give way."""
        others = self.waiting or self.parked
        return [each for each in self.running if others and each.request.prefill_only and not each.finished]

    def put_back(self, sequence: Sequence) -> None:
        """Take the slot of a sequence for prefill alone; it is the next of its kind."""
        self.running.remove(sequence)
        self.prefills.appendleft(sequence)

    def youngest(self) -> Sequence:
        """Return the running sequence that is parked first."""
        return max(self.running, key=lambda each: each.arrival)

    def next(self, fits: Callable[[Sequence], bool], *, short: int = 0) -> Work | None:
        """Return the next step's work, if any can run; `fits`: whether pages for a sequence are free.

        short: tokens of a chunk that decode steps may read, at most.
        """
        if (sequence := self._admissible(fits)) is not None:
            self.remove(sequence)
            self.running.append(sequence)
            return Admit(sequence)
        return self._of_the_running(short)

    def decode_next(self, fits: Callable[[Sequence], bool], *, short: int = 0) -> Decode | None:
        """Return the next step's work if it is sure to be decoding, whatever the events of this one bring."""
        ended = any(sequence.finished for sequence in self.running)
        if (ended and (self.waiting or self.parked)) or self._admissible(fits) is not None:
            return None
        work = self._of_the_running(short)
        return work if isinstance(work, Decode) else None

    def _of_the_running(self, short: int) -> PrefillChunk | Decode | None:
        decoding = [each for each in self.running if each.phase is Phase.DECODE]
        prefilling = sorted(
            (each for each in self.running if each.phase is Phase.PREFILL), key=lambda each: each.arrival
        )
        readers = [
            each
            for each in prefilling
            if decoding and each.chunk_end - each.processed <= short and not each.sees
        ]
        chunked = self._next_prompt([each for each in prefilling if each not in readers])
        if chunked is not None and not (decoding and self._owed_s > 0):
            return PrefillChunk(chunked, chunked.processed, chunked.chunk_end)
        return Decode(decoding, readers) if decoding else None

    def _next_prompt(self, prompts: list[Sequence]) -> Sequence | None:
        """Return the one whose chunk is next, of prompts in the order of arrival."""
        begun = next(
            (each for each in prompts if each.chunk is not None), None
        )  # one at a time: it holds memory
        if begun is not None or not prompts:
            return begun
        left = [len(each.request.prompt) - each.processed for each in prompts]
        oldest_first = self._oldest_is_due or min(left) > MUCH_SHORTER * left[0]
        return prompts[0] if oldest_first else prompts[left.index(min(left))]

    def took(self, work: Work, seconds: float) -> None:
        """Account for the measured time of a step's work."""
        if isinstance(work, PrefillChunk):
            older = (each for each in self.running if each.arrival < work.sequence.arrival)
            self._oldest_is_due = any(each.phase is Phase.PREFILL for each in older)
        if isinstance(work, Decode):
            self._owed_s = max(0.0, self._owed_s - seconds)
        elif any(each.phase is Phase.DECODE and each is not work.sequence for each in self.running):
            self._owed_s += seconds * self._decode_per_prefill

    def _admissible(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        if not (self.running or self.parked or self.waiting):
            return self.prefills[0] if self.prefills else None
        if len(self.running) >= self._slots or not (self.parked or self.waiting):
            return None
        first = self.parked[0] if self.parked else self.waiting[0]
        return first if first.ready and fits(first) else None
