"""Repacking into tiles loses nothing: what comes back is what the blocks say, bit for bit."""

import pytest
import torch
from torch import Tensor

from bough.gguf.quants import dequantise
from bough.gguf.types import TILE_TYPES, QuantType, tile_type
from bough.kernels.quant_matmul.layout import LAYOUTS, empty_packed, layout_of, pack, unpack

# Byte offsets of the float16 fields of a block; every other byte may hold anything.
_HALVES = {
    QuantType.Q4_0: (0,), QuantType.Q4_1: (0, 2), QuantType.Q5_0: (0,), QuantType.Q5_1: (0, 2),
    QuantType.Q8_0: (0,), QuantType.Q3_K: (108,), QuantType.Q4_K: (0, 2), QuantType.Q5_K: (0, 2),
    QuantType.Q6_K: (208,), QuantType.IQ4_NL: (0,), QuantType.IQ4_XS: (0,), QuantType.MXFP4: (),
}  # fmt: skip


def random_blocks(type: QuantType, rows: int, columns: int, *, seed: int = 0) -> Tensor:
    """Random bytes, with scales that a trained matrix could have."""
    generator = torch.Generator().manual_seed(seed)
    blocks = rows * columns // type.block_elements
    data = torch.randint(0, 256, (blocks, type.block_bytes), dtype=torch.uint8, generator=generator)
    for offset in _HALVES[type]:
        values = torch.randn(blocks, generator=generator) * 1e-3
        data[:, offset : offset + 2] = values.half().view(-1, 1).view(torch.uint8)
    if type == QuantType.MXFP4:
        data[:, 0] = torch.randint(112, 124, (blocks,), dtype=torch.uint8, generator=generator)
    return data.view(rows, -1)


@pytest.mark.parametrize("type", LAYOUTS, ids=lambda type: type.name)
@pytest.mark.parametrize("shape", [(16, 256), (130, 512), (5, 768)])
def test_tiles_hold_what_the_blocks_say(type: QuantType, shape: tuple[int, int]) -> None:
    data = random_blocks(type, *shape)
    packed = pack(data, type)
    assert packed.data.shape[2] == packed.layout.tile_bytes
    empty = empty_packed(type, *shape, packed.data.device)
    assert packed.data.shape == empty.data.shape and packed.row_scale.shape == empty.row_scale.shape
    assert torch.equal(unpack(packed), dequantise(data, type))


@pytest.mark.parametrize("columns", [32, 96, 288])
@pytest.mark.parametrize("type", [t for t in LAYOUTS if t.block_elements == 32], ids=lambda type: type.name)
def test_columns_that_fill_no_tile(type: QuantType, columns: int) -> None:
    data = random_blocks(type, 3, columns)
    assert torch.equal(unpack(pack(data, type)), dequantise(data, type))


@pytest.mark.parametrize("type", [QuantType.F16, QuantType.BF16, QuantType.F32], ids=lambda type: type.name)
def test_floats_become_halves(type: QuantType) -> None:
    values = torch.randn(17, 200, generator=torch.Generator().manual_seed(1)) * 3e-6
    values[3] = 0
    dtypes = {QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16, QuantType.F32: torch.float32}
    values = values.to(dtypes[type])
    back = unpack(pack(values.view(torch.uint8), type))
    if type == QuantType.F32:
        error = (back - values).abs().amax(1)
        assert bool((error <= values.abs().amax(1) * 2.0**-11).all())
    else:
        assert torch.equal(back, values.float())


def test_large_and_small_rows_keep_their_scales() -> None:
    data = random_blocks(QuantType.Q4_K, 32, 512).view(32, 2, 144)
    for row in range(32):
        scale = torch.tensor([2.0 ** (row / 2 - 14)]).half().view(torch.uint8)
        data[row, :, 0:2] = scale
        data[row, :, 2:4] = scale
    data = data.view(32, -1)
    assert torch.equal(unpack(pack(data, QuantType.Q4_K)), dequantise(data, QuantType.Q4_K))


def test_tiles_are_hardly_larger_than_blocks() -> None:
    bits = {type.name: layout_of(type).tile_bytes / (2 * layout_of(type).unit) for type in LAYOUTS}
    for type in LAYOUTS:
        limit = 1.35 if type == QuantType.Q3_K else 1.09
        assert bits[type.name] <= type.bits_per_weight * limit, (type.name, bits[type.name])


def test_types_with_tiles_are_named_without_torch() -> None:
    assert set(TILE_TYPES) == set(LAYOUTS)
    assert all(tile_type(type) in (*LAYOUTS, QuantType.F16) for type in QuantType)
