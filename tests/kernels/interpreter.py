"""Triton's interpreter with matmuls whose sums have one order.

Its own matmuls are those of NumPy's BLAS, which on some CPUs (Zen 5) adds the products of a row in another
order where the row is alone than where it is one of many. A kernel's rows then seem to depend on each other.
"""

from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def sum_in_order() -> None:
    """Let every `tl.dot` add its products one by one, in the order of the summed dimension."""
    setattr(InterpreterBuilder, "create_dot", _dot)  # noqa: B010


def _dot(_: InterpreterBuilder, a: Any, b: Any, sums: Any, *precision: Any) -> TensorHandle:
    assert a.dtype.primitive_bitwidth > 8 or not a.dtype.is_floating(), a.dtype
    left, right = a.data.astype(sums.data.dtype), b.data.astype(sums.data.dtype)
    total = np.zeros_like(sums.data)
    for k in range(left.shape[-1]):
        total += left[..., :, k, None] * right[..., None, k, :]
    return TensorHandle(total + sums.data, sums.dtype.scalar)
