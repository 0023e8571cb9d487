"""Snapshot: the tokens of a prompt or conversation and the sequence and draft state after them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.prefix_cache.boundaries import SnapshotKind
from bough.state.draft_ring import SavedRings
from bough.state.snapshots import SavedSequence


@dataclass(slots=True, eq=False)
class Snapshot:
    tokens: bytes  # as `packed` encodes them
    kind: SnapshotKind
    state: SavedSequence
    draft: SavedRings | None
    # Decoding computed some of it: it differs in the last bits from processing its tokens as a prompt.
    after_answer: bool = False
    nbytes: int = field(init=False)  # in host memory, full pages not counted
    # For eviction: the time of the last use, and whether a longer snapshot of its kind continues it.
    used: int = field(default=0, init=False)
    superseded: bool = field(default=False, init=False)
    expires: float | None = None  # monotonic time after which it is evicted first; None: once it was used

    def __post_init__(self) -> None:
        self.nbytes = len(self.tokens) + self.state.nbytes + (self.draft.nbytes if self.draft else 0)

    @property
    def length(self) -> int:
        return self.state.length


def packed(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, whose prefixes compare at memory speed."""
    return array("i", ids).tobytes()
