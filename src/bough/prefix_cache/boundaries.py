"""Where a prompt is split into prefill chunks, and after which chunks a snapshot is taken. Imports no torch.

Whether a chunk ends at a position depends on the text before it only. So prompts with a common prefix are
split the same way within it, and a snapshot of one is the state that another would have there.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

# After the system message and tools ("head"), the last image, the last user message ("question"), at the last
# chunk end of the prompt ("turn"), after the answer, and about every GRID tokens. The names are in files.
SnapshotKind = Literal["head", "question", "turn", "answer", "grid", "image"]

GRID = 8192  # tokens
# A chunk ends at a turn if it then has at least this fraction of the chunk size, or _ENOUGH tokens, and of
# the text so far: a chunk of a few tokens costs nearly as much as one of a hundred, and a conversation may
# have a thousand turns.
_CHUNK_FRACTION, _TEXT_FRACTION, _ENOUGH = 16, 16, 128


def chunk_ends(length: int, boundaries: Mapping[int, SnapshotKind], chunk: int) -> list[int]:
    """Return where the chunks of a prompt end; `boundaries` are the starts of its turns, of any kind."""
    ends, last = [], 0
    inside = (position for position in boundaries if 0 < position < length)
    for position in sorted({*range(chunk, length, chunk), *inside}):
        least = max(min(chunk // _CHUNK_FRACTION, _ENOUGH), position // _TEXT_FRACTION)
        # What precedes an image's end costs more than a chunk: other questions about it begin there.
        if position % chunk == 0 or position - last >= least or boundaries.get(position) == "image":
            ends.append(position)
            last = position
    return [*ends, length]


def snapshot_positions(
    ends: Sequence[int], boundaries: Mapping[int, SnapshotKind]
) -> dict[int, SnapshotKind]:
    """Return the chunk ends to snapshot, without the last; boundaries are rounded down to a chunk end."""
    inner = list(ends[:-1])
    positions: dict[int, SnapshotKind] = {
        end: "grid" for before, end in pairwise([0, *inner]) if end // GRID > before // GRID
    }
    positions |= dict.fromkeys(inner[-1:], "turn")
    for kind in ("question", "image", "head"):
        last = max((position for position, each in boundaries.items() if each == kind), default=0)
        count = bisect_right(inner, last)
        positions |= dict.fromkeys(inner[max(0, count - 1) : count], kind)
    return positions
