"""The quantisers: size of the error, exact cases, packing, and weights that a type cannot hold."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bough.errors import ModelFileError, UnsupportedQuant
from bough.gguf import quantise as quantise_module
from bough.gguf.quantise import quantise
from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType

F32, F16, BF16 = QuantType.F32, QuantType.F16, QuantType.BF16
Q8_0, Q4_0, Q4_K, Q5_K, Q6_K = QuantType.Q8_0, QuantType.Q4_0, QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K
OFFERED = (F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K)
BLOCK_TYPES = (Q8_0, Q4_0, Q4_K, Q5_K, Q6_K)
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))

# Relative RMS error of llama.cpp's quantiser on these weights, rounded up where ours gives the same bytes.
BOUNDS = {
    (Q8_0, "gaussian"): 0.00534,
    (Q8_0, "laplacian"): 0.00671,
    (Q8_0, "heavy"): 0.00733,
    (Q4_0, "gaussian"): 0.0859,
    (Q4_0, "laplacian"): 0.1065,
    (Q4_0, "heavy"): 0.1153,
    (Q4_K, "gaussian"): 0.07128,
    (Q4_K, "laplacian"): 0.08448,
    (Q4_K, "heavy"): 0.08667,
    (Q5_K, "gaussian"): 0.03601,
    (Q5_K, "laplacian"): 0.04274,
    (Q5_K, "heavy"): 0.04393,
    (Q6_K, "gaussian"): 0.01773,
    (Q6_K, "laplacian"): 0.02159,
    (Q6_K, "heavy"): 0.02295,
}


def name(value: object) -> str | None:
    return value.name if isinstance(value, QuantType) else None


def weights_like(kind: str, *, rows: int = 256, elements: int = 1024) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (rows, elements)
    gaussian = torch.randn(shape, generator=generator)
    if kind == "gaussian":
        return gaussian * 0.02
    if kind == "laplacian":
        return gaussian.sign() * torch.rand(shape, generator=generator).clamp_(min=1e-7).log_() * 0.02
    assert kind == "heavy"
    # Student's t with four degrees of freedom
    spread = torch.randn(4, *shape, generator=generator).square_().mean(0).sqrt_()
    return gaussian / spread * 0.02


def round_trip(weights: Tensor, type: QuantType) -> Tensor:
    return dequantise(quantise(weights, type), type)


def relative_error(weights: Tensor, restored: Tensor) -> float:
    difference = (restored.double() - weights.double()).square().sum()
    return (difference / weights.double().square().sum()).sqrt().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("type", "kind"), BOUNDS, ids=name)
def test_error_is_no_larger_than_that_of_llama_cpp(type: QuantType, kind: str, device: str) -> None:
    weights = weights_like(kind).to(device)
    restored = round_trip(weights, type)
    assert restored.device == weights.device
    assert relative_error(weights, restored) <= BOUNDS[type, kind]


@pytest.mark.parametrize("type", [Q8_0, Q4_0, BF16, F16, F32], ids=name)
@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_same_bytes_as_the_gguf_package(type: QuantType, kind: str) -> None:
    weights = weights_like(kind, rows=16)
    assert torch.equal(quantise(weights, type), gguf_bytes(weights, type))


# magnitudes whose inverse float32 still holds
ORDINARY = st.floats(-1e5, 1e5, width=32, allow_nan=False).map(
    lambda value: value if abs(value) > 1e-30 else 0.0
)


@pytest.mark.parametrize("type", [Q8_0, Q4_0], ids=name)
@settings(max_examples=60, deadline=None)
@given(block=st.lists(ORDINARY, min_size=32, max_size=32))
def test_any_block_has_the_bytes_of_the_gguf_package(type: QuantType, block: list[float]) -> None:
    weights = torch.tensor(block, dtype=torch.float32)
    assert torch.equal(quantise(weights, type), gguf_bytes(weights, type))


def gguf_bytes(weights: Tensor, type: QuantType) -> Tensor:
    # imported here because machines that only test devices do not have the package
    import numpy
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    with numpy.errstate(all="ignore"):
        encoded = quantize(weights.numpy(), GGMLQuantizationType(type))
    return torch.from_numpy(numpy.array(encoded).view(numpy.uint8))


def test_equal_magnitudes_of_both_signs_take_the_first() -> None:
    weights = torch.zeros(2, 32)
    weights[0, 3], weights[0, 9] = 2.0, -2.0
    weights[1, 3], weights[1, 9] = -2.0, 2.0
    assert round_trip(weights, Q4_0)[:, [3, 9]].tolist() == [[2.0, -1.75], [-2.0, 1.75]]


def test_ties_of_16_bit_floats_go_to_the_even_neighbour() -> None:
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11)])
    assert round_trip(ties, F16).tolist() == [1.0, 1 + 2**-9, -1.0]
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])
    assert round_trip(ties, BF16).tolist() == [1.0, 1 + 2**-6, -1.0]


@pytest.mark.parametrize("type", [F32, F16, BF16, Q8_0, Q4_0], ids=name)
def test_a_second_round_trip_changes_no_byte(type: QuantType) -> None:
    encoded = quantise(weights_like("heavy", rows=32), type)
    assert torch.equal(quantise(dequantise(encoded, type), type), encoded)


@pytest.mark.parametrize("type", [Q4_K, Q5_K, Q6_K], ids=name)
def test_weights_on_the_grid_come_back_exactly(type: QuantType) -> None:
    """Every field takes all its values, so a misplaced bit shows."""
    generator = torch.Generator().manual_seed(3)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).float()

    blocks = 200
    scale = (torch.rand(blocks, 1, 1, generator=generator) + 0.1).half().float()
    if type is Q6_K:
        codes, q = integers(-128, 127, blocks, 16, 1), integers(-32, 31, blocks, 16, 16)
        codes[:, 5], q[..., 7] = -128, -32
        weights = scale * codes * q
    else:
        minimum = (torch.rand(blocks, 1, 1, generator=generator) + 0.1).half().float()
        top = 15 if type is Q4_K else 31
        codes, minima, q = (
            integers(1, 63, blocks, 8, 1),
            integers(1, 63, blocks, 8, 1),
            integers(0, top, blocks, 8, 32),
        )
        codes[:, 6], minima[:, 2], q[..., 0], q[..., 31] = 63, 63, 0, top
        weights = scale * codes * q - minimum * minima
    weights = weights.view(blocks, 256)
    assert torch.equal(round_trip(weights, type), weights)


@pytest.mark.parametrize("type", OFFERED, ids=name)
def test_zeros_stay_zero(type: QuantType) -> None:
    weights = torch.zeros(3, 512)
    assert torch.equal(round_trip(weights, type), weights)
    weights[1, 300] = 1.0
    restored = round_trip(weights, type)
    assert torch.equal(restored != 0, weights != 0)
    assert restored[1, 300].item() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("value", [1.0, -1.0, 1e4, -1e4, 3e-3, -3e-3])
@pytest.mark.parametrize("type", OFFERED, ids=name)
def test_constant_blocks(type: QuantType, value: float) -> None:
    weights = torch.full((2, 256), value)
    assert relative_error(weights, round_trip(weights, type)) < 5e-3


@pytest.mark.parametrize("noise", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("type", [Q4_K, Q5_K, Q6_K], ids=name)
@pytest.mark.parametrize("sign", [1, -1])
def test_nearly_constant_blocks(type: QuantType, noise: float, sign: int) -> None:
    generator = torch.Generator().manual_seed(8)
    weights = sign * (1 + noise * torch.randn(64, 256, generator=generator))
    assert relative_error(weights, round_trip(weights, type)) < 2e-3 + noise


@pytest.mark.parametrize("size", [1e2, 1e5])
@pytest.mark.parametrize("type", OFFERED, ids=name)
def test_error_does_not_depend_on_the_unit(type: QuantType, size: float) -> None:
    ordinary = weights_like("gaussian", rows=16)
    expected = relative_error(ordinary, round_trip(ordinary, type))
    assert relative_error(ordinary * size, round_trip(ordinary * size, type)) < 1.02 * expected + 1e-6


@pytest.mark.parametrize("type", [Q4_K, Q5_K, Q6_K], ids=name)
@pytest.mark.parametrize("size", [1e-4, 1e-5, 1e-6])
def test_super_block_scales_near_the_smallest_float16(type: QuantType, size: float) -> None:
    weights = torch.randn(16, 256, generator=torch.Generator().manual_seed(5)) * size
    # half a step of the smallest scale is the best the format can do
    assert (round_trip(weights, type) - weights).square().mean().sqrt().item() < 0.15 * size + 2**-25


@pytest.mark.parametrize("size", [1e-8, 1e-20, 1e-30, 1e-42])
@pytest.mark.parametrize("type", BLOCK_TYPES, ids=name)
def test_weights_too_small_for_any_scale_are_no_worse_than_zeros(type: QuantType, size: float) -> None:
    weights = torch.randn(4, 256, generator=torch.Generator().manual_seed(6)) * size
    assert relative_error(weights, round_trip(weights, type)) <= 1


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=name)
@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-5e5, 5e5, width=32, allow_nan=False), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
@example(values=[1e-7], seed=0)
@example(values=[3e-6], seed=0)
def test_any_mixture_of_magnitudes_stays_within_the_block(
    type: QuantType, values: list[float], seed: int
) -> None:
    choice = torch.randint(len(values), (512,), generator=torch.Generator().manual_seed(seed))
    blocks = torch.tensor(values)[choice].view(-1, type.block_elements)
    worst = (round_trip(blocks, type) - blocks).abs().amax(1)
    # A scale is off by half of the smallest float16 at most; types with super-blocks choose theirs better.
    steps = {Q8_0: 127, Q4_0: 8}.get(type, 1)
    assert torch.all(worst <= 0.2 * blocks.abs().amax(1) + steps * 2**-25)


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=name)
def test_rows_are_independent_of_each_other_and_of_slices(
    type: QuantType, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_like("heavy", rows=10)
    encoded = quantise(weights, type)
    for row in (0, 8):
        assert torch.equal(encoded[row], quantise(weights[row], type))
    monkeypatch.setattr(quantise_module, "_SLICE_CPU", 3 * 256)
    assert torch.equal(encoded, quantise(weights, type))


@pytest.mark.parametrize("type", OFFERED, ids=name)
def test_shapes_and_memory_layouts(type: QuantType) -> None:
    weights = weights_like("gaussian", rows=12)
    before = weights.clone()
    encoded = quantise(weights, type)
    assert encoded.dtype == torch.uint8 and encoded.shape == (12, type.row_bytes(1024))
    assert torch.equal(quantise(weights.view(3, 4, 1024), type), encoded.view(3, 4, -1))
    assert torch.equal(quantise(weights.t().contiguous().t(), type), encoded)
    assert torch.equal(quantise(weights[::3], type), encoded[::3])
    assert torch.equal(quantise(weights.repeat_interleave(2, dim=1)[:, ::2], type), encoded)
    assert torch.equal(quantise(weights[5].repeat_interleave(2)[::2], type), encoded[5])
    if type.block_elements == 1:
        assert torch.equal(quantise(weights[5, :2][::2], type), encoded[5, : type.block_bytes])
    assert torch.equal(quantise(weights.double(), type), encoded)
    assert quantise(weights[:0], type).shape == (0, encoded.shape[1])
    assert torch.equal(weights, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("type", OFFERED, ids=name)
def test_undefined_weights_are_refused_by_position(type: QuantType, bad: float) -> None:
    weights = torch.zeros(2, 3, 256)
    weights[1, 2, 77] = bad
    with pytest.raises(ModelFileError) as caught:
        quantise(weights, type)
    assert (
        caught.value.message == f"weight [1, 2, 77] of [2, 3, 256] is {bad}, {type.name} needs finite weights"
    )


LIMITS = {
    F16: 65504,
    Q8_0: 127 * 65504,
    Q4_0: 8 * 65504,
    Q4_K: 63 * 65504,
    Q5_K: 63 * 65504,
    Q6_K: 31 * 127 * 65504,
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("type", LIMITS, ids=name)
def test_weights_beyond_the_largest_scale_are_refused(type: QuantType, sign: int) -> None:
    weights = torch.ones(2, 256)
    weights[1, 40] = sign * LIMITS[type]
    assert round_trip(weights, type)[1, 40].item() == pytest.approx(sign * LIMITS[type], rel=0.01)
    everywhere = LIMITS[type] * torch.linspace(-1, 1, 512).view(2, 256)
    assert relative_error(everywhere, round_trip(everywhere, type)) < 0.1
    weights[1, 40] *= 1.01
    with pytest.raises(
        UnsupportedQuant, match=rf"weight \[1, 40\] .* magnitude .*{type.name} holds at most"
    ) as caught:
        quantise(weights, type)
    assert caught.value.hint


def test_types_without_a_quantiser_name_those_with_one() -> None:
    with pytest.raises(
        UnsupportedQuant, match="Q3_K; offered are F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K"
    ):
        quantise(torch.zeros(256), QuantType.Q3_K)


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedQuant, match="rows of 288 weights cannot be Q4_K: 256 must divide them"):
        quantise(torch.zeros(2, 288), Q4_K)
