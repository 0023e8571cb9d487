"""Drawing tokens from logits."""

from treeflash.kernels.sampling.penalties import penalised
from treeflash.kernels.sampling.reference import draw, filtered, gumbel, philox

__all__ = ["draw", "filtered", "gumbel", "penalised", "philox"]
