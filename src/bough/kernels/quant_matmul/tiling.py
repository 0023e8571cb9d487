"""How the variants of tiles.cu are built for each number of rows, by architecture. Does no I/O.

A tiling does not change the order in which sums are added, so generated text does not depend on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bough.kernels.quant_matmul.rows import BUCKETS

MAX_STAGES = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiling of one bucket. A card's shared memory may allow fewer stages and rule out wide warps."""

    stages: int  # of tiles of 256 columns, at most; one more of smaller tiles
    wide: bool  # a warp has two row tiles
    halfway: bool  # a stage is refilled in the middle of the next unit, not at its start

    def compare(self, other: "Tiling") -> str:
        """Return how it differs from another tiling, in words."""
        words = {
            f"{self.stages} stages": self.stages != other.stages,
            "wide warps" if self.wide else "narrow warps": self.wide != other.wide,
            "filled halfway" if self.halfway else "filled at the start": self.halfway != other.halfway,
        }
        return ", ".join(word for word, differs in words.items() if differs) or "as built in"


# A ring of 1280 columns was 5% slower than one of 1024. From 32 rows on a warp has two row tiles: x would
# otherwise take more of the shared memory's bandwidth (128 bytes a cycle) than the weights take of the GPU's.
# At 32 rows a unit of Q4_K takes 1430 cycles there and 1080 from memory; with two row tiles 920.
_USUAL = {bucket: Tiling(stages=4, wide=bucket >= 32, halfway=True) for bucket in BUCKETS}
# Measured by `bough tune` for the shapes of a 27B: 16 rows take 4.6% less than by the rule, 24 3.5%,
# 32 2.3% and 48 6.9%.
_H200 = {
    **_USUAL,
    **{bucket: Tiling(stages=2, wide=False, halfway=True) for bucket in (16, 24)},
    **{bucket: Tiling(stages=4, wide=False, halfway=True) for bucket in (32, 48)},
}
_BY_ARCHITECTURE = {"sm_90": _H200}  # the measured ones


def built_in_tilings(arch: str) -> Mapping[int, Tiling]:
    """Return the tiling of each bucket for cards of this architecture that were not tuned."""
    return _BY_ARCHITECTURE.get(arch, _USUAL)
