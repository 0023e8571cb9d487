"""Rows into the rotated basis of weights and back: the bits of the plain transform."""

import pytest
import torch

from bough.kernels.hadamard import BlockRotation, reference, triton_kernels
from tests.gpu.inputs import DEVICE, INTERPRETED
from tests.gpu.numerics import assert_same_bits, nan_filled_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

SIZES = (
    ((2, 6), (64, 192), (1024, 2048)) if INTERPRETED else ((2, 6), (1024, 5120), (1024, 17408), (4096, 8192))
)


@pytest.mark.interpreted
@pytest.mark.parametrize(("block", "columns"), SIZES)
@pytest.mark.parametrize("lead", [(1,), (2, 3)], ids=str)
def test_the_kernel_has_the_bits_of_the_plain_transform(
    block: int, columns: int, lead: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(*lead, columns, generator=generator).to(DEVICE)
    signs = (torch.randint(0, 2, (columns,), generator=generator) * 2.0 - 1).to(DEVICE)
    order = torch.randperm(columns, generator=generator).to(DEVICE)
    with nan_filled_memory():
        rotated = [triton_kernels.rotate(x, signs, some, block) for some in (None, order)]
        restored = triton_kernels.restore(x, signs, block)
    for found, some in zip(rotated, (None, order), strict=True):
        assert_same_bits(found, reference.rotate(x, signs, some, block))
        assert_same_bits(BlockRotation(signs, some, block)(x), found, "the package's function")
    assert_same_bits(restored, reference.restore(x, signs, block))
