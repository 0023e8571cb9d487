"""Rows into the rotated basis of weights, and rows of a rotated table out of it: see gguf/rotation.py."""

from dataclasses import dataclass

from torch import Tensor

from bough.kernels.hadamard import reference
from bough.kernels.runtime.op import op


@dataclass(frozen=True, slots=True)
class BlockRotation:
    """H diag(s) P for each block of columns: P reads them in another order, s are signs, H is normalised."""

    signs: Tensor  # float32 [K]
    order: Tensor | None  # int64 [K]
    block: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., K] as the rotated weights read it, float32."""
        return rotate(x, self.signs, self.order, self.block)

    def restored(self, z: Tensor) -> Tensor:
        """Return rows [..., K] of rotated weights as they were before, float32."""
        assert self.order is None, "rows of a table keep their order"
        return restore(z, self.signs, self.block)


rotate = op(reference.rotate, "rotation", triton="triton_kernels")
restore = op(reference.restore, "rotation", triton="triton_kernels")
