"""Snapshot: a prompt's or a conversation's tokens and everything the engine has made of them; one value."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from treeflash.prefix_cache.boundaries import Kind
from treeflash.state.draft_ring import SavedRings
from treeflash.state.snapshots import SavedSequence


@dataclass(slots=True, eq=False)
class Snapshot:
    tokens: bytes  # processed, as `packed` writes them
    kind: Kind
    state: SavedSequence
    draft: SavedRings | None
    nbytes: int = field(init=False)  # outside the pool, full pages not counted
    # What the cache knows of it: when it was used, and whether a longer one of its kind has come.
    used: int = field(default=0, init=False)
    superseded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.nbytes = len(self.tokens) + self.state.nbytes + (self.draft.nbytes if self.draft else 0)

    @property
    def length(self) -> int:
        return self.state.length


def packed(ids: Sequence[int]) -> bytes:
    """Token ids in a form that is compared as fast as memory is read."""
    return array("i", ids).tobytes()
