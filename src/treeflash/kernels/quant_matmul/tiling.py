"""How the variants of tiles.cu are built for each number of rows, by architecture; knows no GPU and no disk.

Whatever is chosen here, sums are added in the same order: text stays the same.
"""

from dataclasses import dataclass

from treeflash.kernels.quant_matmul.rows import BUCKETS

MOST_STAGES = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """For one number of rows. A card's shared memory may allow fewer stages, and no wide warps."""

    stages: int  # of tiles of 256 columns, at most; of smaller ones one more
    wide: bool  # a warp has two row tiles
    halfway: bool  # a stage is filled again in the middle of the unit after it, not at its start

    def beside(self, other: "Tiling") -> str:
        """What it does otherwise, in words."""
        words = {
            f"{self.stages} stages": self.stages != other.stages,
            "wide warps" if self.wide else "narrow warps": self.wide != other.wide,
            "filled halfway" if self.halfway else "filled at the start": self.halfway != other.halfway,
        }
        return ", ".join(word for word, differs in words.items() if differs) or "as built in"


# A ring of 1280 columns was 5% slower than one of 1024. From 32 rows on a warp has two row tiles: x would
# otherwise take more of the shared memory's bandwidth (128 bytes a cycle) than the weights take of the GPU's.
# At 32 rows a unit of Q4_K takes 1430 cycles there and 1080 from memory; with two row tiles 920.
_H200 = {bucket: Tiling(stages=4, wide=bucket >= 32, halfway=True) for bucket in BUCKETS}
_BY_ARCHITECTURE = {"sm_90": _H200}  # those that were measured


def tiling_of(arch: str, bucket: int) -> Tiling:
    """What a card of this architecture gets unless something better was measured on it."""
    return _BY_ARCHITECTURE.get(arch, _H200)[bucket]
