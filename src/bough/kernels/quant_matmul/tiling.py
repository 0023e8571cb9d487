"""How the variants of tiles.cu are built for each number of rows, by architecture. Does no I/O.

A tiling does not change the order in which sums are added, so generated text does not depend on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bough.kernels.quant_matmul.rows import BUCKETS

MAX_STAGES = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiling of one bucket. A card's shared memory may allow fewer stages."""

    stages: int  # of tiles of 256 columns, at most; one more of smaller tiles
    halfway: bool  # a stage is refilled in the middle of the next unit, not at its start

    def compare(self, other: "Tiling") -> str:
        """Return how it differs from another tiling, in words."""
        words = {
            f"{self.stages} stages": self.stages != other.stages,
            "filled halfway" if self.halfway else "filled at the start": self.halfway != other.halfway,
        }
        return ", ".join(word for word, differs in words.items() if differs) or "as built in"


# A ring of 1280 columns was 5% slower than one of 1024.
_USUAL = {bucket: Tiling(stages=4, halfway=True) for bucket in BUCKETS}
# Measured by `bough tune` for the shapes of a 27B: 16 rows take 4.6% less than by the rule, 24 3.5%.
_H200 = _USUAL | {bucket: Tiling(stages=2, halfway=True) for bucket in (16, 24)}
_BY_ARCHITECTURE = {"sm_90": _H200}  # the measured ones


def built_in_tilings(arch: str) -> Mapping[int, Tiling]:
    """Return the tiling of each bucket for cards of this architecture that were not tuned."""
    return _BY_ARCHITECTURE.get(arch, _USUAL)
