"""Where a prompt is cut into chunks, and behind which cuts its state is worth keeping; numbers only.

Whether there is a cut depends on what stands before it alone. So prompts that begin alike are cut alike as
far as they do, and a state that one of them left at a cut is the state that another would have had there.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

# Where a prompt may be picked up again: behind the system message and tools, behind the last question, as
# near to its end as it was cut, behind the answer, and now and then in between.
Kind = Literal["head", "question", "turn", "answer", "grid"]

GRID = 8192  # tokens
# A turn is a cut if it is this part of a chunk away from the cut before, and this part of the text: a chunk
# of a few tokens costs nearly what one of a hundred does, and there are conversations of a thousand turns.
_OF_CHUNK, _OF_TEXT = 16, 16


def cuts(length: int, boundaries: Mapping[int, Kind], chunk: int) -> list[int]:
    """Ends of a prompt's chunks; `boundaries` are the starts of its turns, whatever their kinds."""
    found, last = [], 0
    for place in sorted({*range(chunk, length, chunk), *(each for each in boundaries if 0 < each < length)}):
        if place % chunk == 0 or place - last >= max(chunk // _OF_CHUNK, place // _OF_TEXT):
            found.append(place)
            last = place
    return [*found, length]


def worth_keeping(cuts: Sequence[int], boundaries: Mapping[int, Kind]) -> dict[int, Kind]:
    """Of the cuts before the last: a boundary that is not one is rounded down to the cut before it."""
    inner = list(cuts[:-1])
    wanted: dict[int, Kind] = {
        cut: "grid" for before, cut in pairwise([0, *inner]) if cut // GRID > before // GRID
    }
    wanted |= dict.fromkeys(inner[-1:], "turn")
    for kind in ("question", "head"):
        places = [place for place, each in boundaries.items() if each == kind]
        count = bisect_right(inner, max(places, default=0))
        wanted |= dict.fromkeys(inner[max(0, count - 1) : count], kind)
    return wanted
