"""Snapshot: the tokens of a prompt or conversation and the sequence and draft state after them."""

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bough.prefix_cache.boundaries import SnapshotKind
from bough.state.draft_ring import SavedRings
from bough.state.snapshots import SavedPage, SavedSequence, SnapshotStore


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


class SnapshotList(list[Snapshot]):
    """The snapshots in memory, and which of them is evicted first."""

    def __init__(self, store: SnapshotStore) -> None:
        super().__init__()
        self._store, self._time = store, 0

    def add(self, snapshot: Snapshot) -> None:
        self.append(snapshot)
        self._stamp(snapshot)

    def touch(self, snapshot: Snapshot) -> None:
        """Mark a snapshot and all snapshots of its prefixes as used."""
        snapshot.superseded, snapshot.expires = False, None
        prefixes = [prefix for prefix in self if snapshot.tokens.startswith(prefix.tokens)]
        for prefix in sorted(prefixes, key=lambda prefix: prefix.length):
            self._stamp(prefix)

    @property
    def pinned_bytes(self) -> int:
        """What they take of the memory that is pinned ahead; pages have memory of their own."""
        tails = sum(each.state.tail is not None for each in self) * self._store.page_bytes
        return sum(each.nbytes for each in self) - tails

    def eviction_order(self) -> list[Snapshot]:
        """Return superseded and expired snapshots, then the others, each least recently used first."""
        now = time.monotonic()

        def useful(snapshot: Snapshot) -> bool:
            return not snapshot.superseded and (snapshot.expires is None or now < snapshot.expires)

        return sorted(self, key=lambda each: (useful(each), each.used))

    def lru_pages(self, keep: Snapshot | None) -> Iterator[SavedPage]:
        """Yield evictable pages in the eviction order of the last snapshot that uses each."""
        seen = {id(page) for page in keep.state.pages} if keep else set()
        groups = []
        for snapshot in reversed(self.eviction_order()):
            pages = [page for page in snapshot.state.pages if id(page) not in seen]
            seen |= {id(page) for page in pages}
            groups.append([page for page in pages if self._store.is_evictable(page)])
        for group in reversed(groups):
            yield from reversed(group)

    def _stamp(self, snapshot: Snapshot) -> None:
        self._time += 1
        snapshot.used = self._time


def packed(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, whose prefixes compare at memory speed."""
    return array("i", ids).tobytes()
