"""Paging: which sequences have KV pages; when pages run out, the youngest is parked in host memory."""

from dataclasses import dataclass

from bough.engine.images import PictureEncoder
from bough.engine.runner import StepRunner
from bough.engine.scheduler import Scheduler
from bough.engine.sequence import Parked, Sequence
from bough.models.decoder import Target
from bough.prefix_cache.cache import PrefixCache
from bough.spec.drafter import Drafter
from bough.state.sequences import PAGE, SequenceStates

_PARKED_PAGES = 4  # free for each that runs before a parked sequence comes back, so that it stays


@dataclass(frozen=True, slots=True)
class Parts:
    """What the parts of an engine share."""

    target: Target
    drafter: Drafter
    states: SequenceStates
    runner: StepRunner
    prefixes: PrefixCache
    scheduler: Scheduler
    max_rows: int  # of a tree
    encoder: PictureEncoder | None  # None: the model is loaded without its vision tower
    working: list[Sequence]  # that the current step works for: if it raises, they have failed, and no others


class Paging:
    def __init__(self, parts: Parts, *, pool: int):
        """`pool`: pages of all slots."""
        self._states, self._prefixes, self._drafter = parts.states, parts.prefixes, parts.drafter
        self._scheduler, self._working, self._pool = parts.scheduler, parts.working, pool
        self._most_rows = parts.runner.step_rows(parts.max_rows)

    def fits(self, sequence: Sequence) -> bool:
        """Return whether pages for a sequence that has no slot are free, and some for each that runs."""
        running = len(self._scheduler.running) - (sequence in self._scheduler.running)
        if not running:
            return True
        length = sequence.parked.state.length if sequence.parked is not None else len(sequence.request.prompt)
        ahead = _PARKED_PAGES if sequence.parked is not None else 1
        needed = -(-(length + self._most_rows) // PAGE) + ahead * running
        owned = self._states.pages.owned
        # Pages that slots share are counted once only where that decides.
        if needed <= self._pool - sum(map(len, owned)):
            return True
        return needed <= self._pool - len(set().union(*owned))

    def provide(self, sequence: Sequence, rows: int) -> bool:
        """Allocate pages for a sequence's next rows, at the expense of cached prefixes and younger sequences.

        Return whether it still runs: the youngest is parked, which may be itself.
        """
        if sequence.parked is not None:
            return False
        if self._states.has_pages(sequence.slot, rows):
            return True
        self._prefixes.reserve(sequence.slot, rows)
        while self._states.shortage(sequence.slot, rows) and len(self._scheduler.running) > 1:
            youngest = self._scheduler.youngest()
            self.park(youngest)
            if youngest is sequence:
                return False
        self._states.reserve(sequence.slot, rows)
        return True

    def reserve(self, slot: int, rows: int) -> None:
        """Allocate pages for the rows, if need be at the expense of cached prefixes."""
        self._prefixes.reserve(slot, rows)
        self._states.reserve(slot, rows)

    def park(self, sequence: Sequence) -> None:
        """Move a sequence's state to host memory, whole, until there are pages for it again."""
        assert not sequence.in_flight
        if sequence.chunk is not None:
            working, self._working[:] = self._working[:], [sequence]
            sequence.chunk.run()  # what it returns is read when the sequence is back
            self._working[:] = working
        self._scheduler.park(sequence)
        slot, sequence.slot = sequence.slot, -1
        draft = self._drafter.save(slot)
        sequence.parked = Parked(self._prefixes.store.park(slot), draft)

    def unpark(self, sequence: Sequence, parked: Parked) -> None:
        """Give a sequence with a fresh slot its state back."""
        self._prefixes.reserve_for(sequence.slot, parked.state)
        self._prefixes.store.unpark(sequence.slot, parked.state)
        sequence.parked = None
        self._drafter.open(sequence.slot, sequence.tokens[: parked.state.length], parked.draft)

    def drop(self, sequence: Sequence) -> None:
        """Free what a parked sequence has in host memory."""
        if sequence.parked is not None:
            self._prefixes.store.release(sequence.parked.state)
            sequence.parked = None
