"""Every tensor type against the gguf package, bit for bit."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bough.errors import UnsupportedQuant
from bough.gguf import quants
from bough.gguf.quants import check_decodable, dequantise, to_q4_0
from bough.gguf.types import QuantType

# Byte offsets of the float16 fields of a block.
HALVES = {
    QuantType.Q8_0: (0,),
    QuantType.Q4_0: (0,),
    QuantType.Q4_1: (0, 2),
    QuantType.Q5_0: (0,),
    QuantType.Q5_1: (0, 2),
    QuantType.Q2_K: (80, 82),
    QuantType.Q3_K: (108,),
    QuantType.Q4_K: (0, 2),
    QuantType.Q5_K: (0, 2),
    QuantType.Q6_K: (208,),
    QuantType.IQ4_NL: (0,),
    QuantType.IQ4_XS: (0,),
    QuantType.IQ3_S: (0,),
    QuantType.IQ3_XXS: (0,),
    QuantType.IQ2_S: (0,),
    QuantType.IQ2_XS: (0,),
    QuantType.IQ2_XXS: (0,),
    QuantType.IQ1_S: (0,),
    QuantType.IQ1_M: (),
    QuantType.TQ1_0: (52,),
    QuantType.TQ2_0: (64,),
    QuantType.MXFP4: (),
    QuantType.NVFP4: (),
    QuantType.Q1_0: (0,),
    QuantType.Q2_0: (0,),
    QuantType.PQ2_0: (0,),
    QuantType.PTQ1_0: (26,),
    QuantType.F32: (),
    QuantType.F16: (0,),
    QuantType.BF16: (),
}
EXTREME_HALVES = (0.0, -0.0, 2**-24, -(2**-24), 2**-14, 1023 * 2**-24, 65504.0, -65504.0, 1.0, -3.14)
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))

WEIGHTS = [type for type in QuantType if type is not QuantType.I64]
every_type = pytest.mark.parametrize("type", WEIGHTS, ids=lambda type: type.name)


def reference(data: Tensor, type: QuantType) -> Tensor:
    # imported here because machines that only test devices do not have the package
    import numpy

    if type is QuantType.PTQ1_0:
        return ternary_reference(data)
    if type in (QuantType.Q1_0, QuantType.Q2_0, QuantType.PQ2_0):  # the package has two of their names
        blocks = data.contiguous().numpy().reshape(-1, type.block_bytes)
        scale = blocks[:, :2].copy().view(numpy.float16).astype(numpy.float32)
        bits = numpy.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(numpy.float32)
        with numpy.errstate(all="ignore"):
            if type == QuantType.Q1_0:
                values = numpy.where(bits == 1, scale, -scale)
            else:
                values = (bits[:, ::2] + 2 * bits[:, 1::2] - 1) * scale
        return torch.from_numpy(values.reshape(*data.shape[:-1], -1))
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with numpy.errstate(all="ignore"):
        return torch.from_numpy(
            numpy.array(dequantize(data.contiguous().numpy(), GGMLQuantizationType(type)))
        )


def ternary_reference(data: Tensor) -> Tensor:
    """PTQ1_0, a number at a time: 16 bytes of five digits, 8 of five, 2 of four; first digits first."""
    import numpy

    blocks = data.contiguous().numpy().reshape(-1, 28)
    values = numpy.empty((len(blocks), 128), numpy.float32)
    for block, row in zip(blocks.tolist(), values, strict=True):
        scale = numpy.array(block[26:], numpy.uint8).view(numpy.float16).astype(numpy.float32)[0]
        at = 0
        for first, count, digits in ((0, 16, 5), (16, 8, 5), (24, 2, 4)):
            for digit in range(digits):
                for byte in block[first : first + count]:
                    # of the fraction byte / 256 in base 3
                    whole = byte * 3**digit % 256
                    with numpy.errstate(all="ignore"):
                        row[at] = numpy.float32(whole * 3 // 256 - 1) * scale
                    at += 1
    return torch.from_numpy(values.reshape(*data.shape[:-1], -1))


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    nan = theirs.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.int32), theirs[~nan].view(torch.int32))


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def random_rows(type: QuantType, *lead: int, blocks: int, seed: int = 0) -> Tensor:
    """Random blocks whose float16 fields are ordinary numbers."""
    rows = random_bytes(*lead, blocks, type.block_bytes, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for offset in HALVES[type]:
        values = torch.randn(*lead, blocks, 1, generator=generator) * 0.02
        rows[..., offset : offset + 2] = values.half().view(torch.uint8)
    return rows.flatten(-2)


@every_type
@pytest.mark.parametrize("lead", [(), (5,), (3, 4)], ids=["row", "matrix", "experts"])
def test_equals_the_gguf_package(type: QuantType, lead: tuple[int, ...]) -> None:
    data = random_rows(type, *lead, blocks=7)
    before = data.clone()
    weights = dequantise(data, type)
    assert weights.shape == (*lead, 7 * type.block_elements)
    assert_same_bits(weights, reference(data, type))
    assert torch.equal(data, before)


@every_type
def test_extreme_scales(type: QuantType) -> None:
    pairs = [(first, second) for first in EXTREME_HALVES for second in EXTREME_HALVES]
    data = random_bytes(len(pairs), type.block_bytes, seed=2)
    for field, offset in enumerate(HALVES[type]):
        values = torch.tensor([pair[field] for pair in pairs]).unsqueeze(1)
        data[:, offset : offset + 2] = values.half().view(torch.uint8)
    assert_same_bits(dequantise(data, type), reference(data, type))


@every_type
def test_infinite_and_undefined_scales_spread_as_in_the_gguf_package(type: QuantType) -> None:
    data = random_bytes(3, type.block_bytes, seed=3)
    for offset in HALVES[type]:
        values = torch.tensor([torch.inf, -torch.inf, torch.nan]).unsqueeze(1)
        data[:, offset : offset + 2] = values.half().view(torch.uint8)
    assert_same_bits(dequantise(data, type), reference(data, type))


@every_type
@settings(max_examples=25, deadline=None)
@given(content=st.data())
def test_any_bytes(type: QuantType, content: st.DataObject) -> None:
    size = 3 * type.block_bytes
    data = torch.frombuffer(
        bytearray(content.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8
    )
    assert_same_bits(dequantise(data, type), reference(data, type))


def test_every_exponent_of_mxfp4() -> None:
    data = random_bytes(256, 17, seed=4)
    data[:, 0] = torch.arange(256)
    assert_same_bits(dequantise(data, QuantType.MXFP4), reference(data, QuantType.MXFP4))


@every_type
def test_layout_of_the_input_in_memory_does_not_matter(type: QuantType) -> None:
    data = random_rows(type, 6, blocks=3)
    expected = dequantise(data, type)
    odd_start = torch.zeros(data.numel() + 1, dtype=torch.uint8)[1:].view(data.shape).copy_(data)
    padded = torch.zeros(6, data.shape[1] + 5, dtype=torch.uint8)[:, 3:-2].copy_(data)
    transposed = data.t().contiguous().t()
    strided = data.repeat_interleave(2, dim=1)[:, ::2]
    for variant in (odd_start, padded, transposed, strided):
        assert_same_bits(dequantise(variant, type), expected)
    assert_same_bits(dequantise(odd_start[:1, : type.block_bytes], type), expected[:1, : type.block_elements])
    assert_same_bits(dequantise(data[::2], type), expected[::2])
    assert dequantise(data[:0], type).shape == (0, expected.shape[1])


@every_type
def test_other_dtypes_are_the_float32_result_rounded(type: QuantType) -> None:
    data = random_rows(type, 2, blocks=3)
    for dtype in (torch.bfloat16, torch.float16):
        weights = dequantise(data, type, dtype=dtype)
        assert weights.dtype == dtype
        assert torch.equal(weights.nan_to_num(), dequantise(data, type).to(dtype).nan_to_num())


@pytest.mark.parametrize("type", [QuantType.Q4_K, QuantType.Q5_0], ids=lambda type: type.name)
def test_tensors_larger_than_a_slice(type: QuantType) -> None:
    rows, blocks = 41, 16384 // type.block_elements
    data = random_rows(type, rows, blocks=blocks)
    weights = dequantise(data, type)
    assert weights.numel() > quants._SLICE_CPU and weights.numel() % quants._SLICE_CPU
    assert_same_bits(weights, reference(data, type))
    assert_same_bits(dequantise(data[33:35], type), weights[33:35])


@pytest.mark.parametrize("device", DEVICES)
@every_type
def test_result_is_on_the_device_of_the_data(
    type: QuantType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # any code book will do, and machines with other devices may lack the package with the real one
    width = 4 if type in (QuantType.IQ3_S, QuantType.IQ3_XXS) else 8
    grid = torch.arange(2048.0 * width).view(2048, width)
    monkeypatch.setattr(quants, "_grid", lambda type, device: grid.to(device))
    data = random_rows(type, 3, blocks=5)
    weights = dequantise(data.to(device), type)
    assert weights.device.type == device
    assert_same_bits(weights.cpu(), dequantise(data, type))


class FromTheHost(TorchDispatchMode):
    """Counts tensors that are created from numbers or on another device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.lift_fresh.default
        self.count += "device" in (kwargs or {}) and function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


@every_type
def test_decoding_again_copies_nothing_from_the_host(type: QuantType) -> None:
    """As a captured graph needs it."""
    data = random_rows(type, 2, blocks=3)
    dequantise(data, type)
    with FromTheHost() as taken:
        dequantise(data, type)
    assert taken.count == 0
    with FromTheHost() as taken:
        torch.tensor([1, 2])
    assert taken.count == 1


def test_floats_are_a_copy() -> None:
    data = random_rows(QuantType.F32, 2, blocks=8)
    before = data.clone()
    dequantise(data, QuantType.F32).zero_()
    assert torch.equal(data, before)


def test_iq3_s_without_the_gguf_package(monkeypatch: pytest.MonkeyPatch) -> None:
    quants._grid.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(UnsupportedQuant, match="IQ3_S") as caught:
        dequantise(random_bytes(110), QuantType.IQ3_S)
    assert caught.value.hint == "pip install gguf"
    with pytest.raises(UnsupportedQuant, match="IQ2_XS weights need"):
        check_decodable([QuantType.Q4_K, QuantType.IQ3_S, QuantType.IQ2_XS])
    check_decodable([QuantType.Q4_K, QuantType.TQ1_0])
    monkeypatch.undo()
    check_decodable(WEIGHTS)
    with pytest.raises(UnsupportedQuant, match="of type I64, which holds whole numbers"):
        check_decodable(QuantType)
    assert dequantise(random_rows(QuantType.IQ3_S, blocks=1), QuantType.IQ3_S).shape == (256,)


@pytest.mark.parametrize("type", [QuantType.Q1_0, QuantType.Q2_0, QuantType.PQ2_0, QuantType.PTQ1_0], ids=str)
def test_types_of_one_and_two_bits_as_q4_0(type: QuantType) -> None:
    """The same bits, zeros of a negative scale too; in several slices."""
    data = random_rows(type, 3, 5, blocks=3000)
    converted = to_q4_0(data, type)
    assert converted.shape == (3, 5, 3000 * type.block_elements // 32 * 18)
    assert_same_bits(dequantise(converted, QuantType.Q4_0), dequantise(data, type))
