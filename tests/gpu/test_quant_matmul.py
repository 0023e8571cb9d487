"""Quantised matmuls against float64, in the CUDA kernels and in Triton's."""

import pytest
import torch
from torch import Tensor

from bough.bench.tuning import LAYERS_27B, Stack, tune
from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels.check.inputs import random_rows
from bough.kernels.norm_rope import add_rms_norm
from bough.kernels.quant_matmul import (
    BUCKETS,
    PackedWeight,
    cuda,
    layout_of,
    pack,
    packed_matmul,
    packed_matmuls,
    prepare,
    triton_kernels,
    unpack,
)
from bough.kernels.quant_matmul.layout import DENSE, LAYOUTS
from bough.kernels.runtime.device import card_of
from tests.gpu.card import needs_cuda_kernels
from tests.gpu.inputs import DEVICE, INTERPRETED, TUNED_TYPES, spread_rows
from tests.gpu.numerics import assert_same_bits, worst_row_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

Q = QuantType
DENSE_TYPES = (Q.F16, Q.BF16, Q.F32)
SHAPES = ((37, "narrow"), (300, 1280), (1000, 5120), (5120, 1536), (128, 512))
COUNTS = (1, 3, 8, 13, 16, 20, 24, 32, 41, 48, 64)
MANY = (65, 200)  # rows that no tile holds: the weights are expanded


def tolerance(type: QuantType) -> float:
    """Return what rounding to float16 explains in the worst of many rows with a few outliers.

    Where a minimum is subtracted, it and the scale are each rounded first: torch arithmetic with the same
    rounding gives 1.0e-3 for Q4_K and 1.3e-3 for Q5_K in 37x256, 4e-4 in 1000x5120; in 200 rows of 37x96,
    over 150 seeds, up to 1.4e-3 for Q4_1 and 1.7e-3 for Q5_1, 0.8e-3 for Q4_0 and Q8_0.
    """
    return 2e-3 if layout_of(type).scales in ("six", "affine") else 1e-3


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def columns_of(type: QuantType, columns: int | str) -> int:
    """Return the smallest odd number of blocks for "narrow"."""
    if isinstance(columns, int):
        return columns
    return 256 if type.block_elements == 256 else 96


every_type = pytest.mark.parametrize("type", [*LAYOUTS, *DENSE_TYPES], ids=lambda type: type.name)
every_shape = pytest.mark.parametrize(("rows", "columns"), SHAPES)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile every layout and bucket at once, in parallel."""
    if not INTERPRETED and torch.cuda.is_available():
        prepare([*LAYOUTS.values(), DENSE], DEVICE)


@needs_cuda_kernels
@pytest.mark.parametrize("type", [*TUNED_TYPES, Q.F16], ids=lambda type: type.name)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_bucket_has_a_kernel_that_fits(type: QuantType, bucket: int) -> None:
    layout, tiling, card = layout_of(type), cuda.tilings_of(DEVICE)[bucket], card_of(DEVICE)
    if not cuda.stages(card, layout, bucket, tiling):
        pytest.skip("more shared memory than this card has")
    variant = cuda.variant(layout, bucket, tiling, DEVICE, grouped=cuda.grouped(card, bucket)).matmul
    assert variant.attributes.registers > 0 and variant.attributes.blocks >= 1


@pytest.mark.parametrize(
    "type", [type for type in (*LAYOUTS, *DENSE_TYPES) if type not in (Q.F32, Q.BF16)], ids=lambda t: t.name
)
@every_shape
def test_repacked_weights_keep_their_values(type: QuantType, rows: int, columns: int | str) -> None:
    data = random_rows(type, rows, columns_of(type, columns), generator(rows))
    assert_same_bits(unpack(pack(data, type)), dequantise(data, type))


@every_type
@every_shape
def test_matmul_matches_float64_in_every_row_count(type: QuantType, rows: int, columns: int | str) -> None:
    """A row's result has the same bits in repeated calls, in every row count and at every index."""
    random = generator(rows + type)
    columns = columns_of(type, columns)
    weight = pack(random_rows(type, rows, columns, random), type)
    values = unpack(weight).double()
    x = spread_rows(64, columns, random)
    expected = x.double() @ values.T
    first = packed_matmul(x[:1], weight)[0]
    for count in COUNTS:
        out = torch.full((count, rows + 3), torch.nan, device=DEVICE)
        packed_matmul(x[:count], weight, out[:, :rows])
        assert worst_row_error(out[:, :rows], expected[:count]) < tolerance(type), f"{count} rows"
        assert bool(out[:, rows:].isnan().all()), f"{count} rows: written beyond the output"
        assert_same_bits(packed_matmul(x[:count], weight), out[:, :rows], f"{count} rows, repeated")
        assert_same_bits(out[0, :rows], first, f"row 0 of {count}")
    moved = packed_matmul(torch.cat([x[40:41], x[:9], x[:1]]), weight)
    assert_same_bits(moved[10], first, "row 0 at index 10")


@every_type
@every_shape
@pytest.mark.parametrize("count", MANY)
def test_many_rows_match_float64(type: QuantType, rows: int, columns: int | str, count: int) -> None:
    random = generator(count)
    columns = columns_of(type, columns)
    weight = pack(random_rows(type, rows, columns, random), type)
    x = spread_rows(count, columns, random)
    out = torch.full((count, rows), torch.nan, device=DEVICE)
    packed_matmul(x, weight, out)
    assert worst_row_error(out, x.double() @ unpack(weight).double().T) < tolerance(type)


@needs_cuda_kernels
@pytest.mark.parametrize("type", TUNED_TYPES, ids=lambda type: type.name)
def test_normed_rows_have_the_bits_of_rows_alone(type: QuantType) -> None:
    """Also where a card multiplies more than 48 of them in parts."""
    weight = pack(random_rows(type, 300, 1280, generator(5)), type)
    x, norm = torch.randn(1, 61, 1280, device=DEVICE), torch.randn(1280, device=DEVICE)

    def normed(rows: Tensor) -> Tensor:
        _, packed = add_rms_norm(rows, None, norm, 1e-6, pack=True)
        return packed_matmul(packed, weight)

    together = normed(x)
    for row in (0, 20, 47, 48, 60):
        assert_same_bits(normed(x[:, row : row + 1])[0], together[row], f"row {row}")


def test_zero_rows_give_zeros() -> None:
    weight = pack(random_rows(Q.Q4_K, 200, 1024, generator(1)), Q.Q4_K)
    assert not bool(packed_matmul(torch.zeros(3, 1024, device=DEVICE), weight).any())


@pytest.mark.parametrize("count", [1, 24, 33, 64])
def test_overlapping_launches_give_the_bits_of_single_ones(count: int) -> None:
    """Capture them after a slow kernel that makes x and before one that reads all of y at once."""
    random = generator(count)
    mix = ((Q.Q5_K, 10240), (Q.Q4_K, 6144), (Q.Q8_0, 96), (Q.Q6_K, 1024), (Q.F16, 300))
    weights = [pack(random_rows(type, rows, 5120, random), type) for type, rows in mix]
    x = spread_rows(count, 5120, random)
    expected = torch.cat([packed_matmul(x, weight) for weight in weights], 1)
    hidden, identity = torch.zeros_like(x), torch.eye(5120, device=DEVICE)

    def step() -> Tensor:
        return packed_matmuls(hidden @ identity + 0 * hidden, weights) * 1.0

    graph, outputs = captured_on_a_side_stream(lambda: [step() for _ in range(3)])
    hidden.copy_(x)
    torch.cuda.synchronize()
    for replay in range(10):
        for out in outputs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for out in outputs:
            assert_same_bits(out, expected, f"replay {replay}")
    for repeat in range(10):
        assert_same_bits(packed_matmuls(x, weights), expected, f"eager, repeat {repeat}")


def test_a_captured_step_gives_the_bits_of_an_eager_one() -> None:
    """The graph begins with a memset and has torch's kernels between ours."""
    random = generator(2)
    mix = ((Q.Q4_K, 200), (Q.Q6_K, 77), (Q.Q8_0, 96))
    weights = [pack(random_rows(type, rows, 1024, random), type) for type, rows in mix]
    x = spread_rows(5, 1024, random)
    hidden = torch.zeros_like(x)

    def step() -> Tensor:
        zeros = torch.zeros(1 << 20, device=DEVICE)
        wide = packed_matmuls(hidden, weights)[:, :96].repeat(1, 11)[:, :1024]
        return packed_matmul(wide.contiguous().tanh() + zeros[:1024], weights[1])

    graph, out = captured_on_a_side_stream(step)
    hidden.copy_(x)
    torch.cuda.synchronize()
    expected = step()
    for replay in range(20):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(out, expected, f"replay {replay}")


def captured_on_a_side_stream(step):
    """Capture with explicit begin and end, so that nothing synchronises between the launches."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = step()
        graph.capture_end()
    return graph, out


TRITON_TYPES = (*LAYOUTS, Q.F16) if INTERPRETED else (*TUNED_TYPES, Q.Q3_K, Q.IQ4_XS, Q.Q5_1, Q.F16)


def triton_weight(type: QuantType, random: torch.Generator) -> PackedWeight:
    rows, columns = (37, 256 if type.block_elements == 256 else 160) if INTERPRETED else (300, 512)
    return pack(random_rows(type, rows, columns, random), type)


@pytest.mark.interpreted
@pytest.mark.parametrize("type", TRITON_TYPES, ids=lambda type: type.name)
def test_triton_matmul_matches_float64(type: QuantType) -> None:
    """Cards without the CUDA kernels use these."""
    random = generator(4)
    weight = triton_weight(type, random)
    values, x, first = unpack(weight).double(), spread_rows(64, weight.columns, random), None
    counts = (1, 24, 64) if type in TUNED_TYPES else (13, 64)
    for count in ((1, 9, 23)[type % 3],) if INTERPRETED else counts:
        out = torch.full((count, weight.rows + 3), torch.nan, device=DEVICE)
        packed = triton_kernels.pack_rows(x[:count])
        packed.data.transpose(0, 1)[count:] = torch.nan  # rows of a bucket that nobody writes
        triton_kernels.matmul(packed, weight, out[:, : weight.rows])
        assert bool(out[:, weight.rows :].isnan().all()), f"{count} rows: written beyond the output"
        out = out[:, : weight.rows]
        assert worst_row_error(out, x[:count].double() @ values.T) < tolerance(type), f"{count} rows"
        first = out[0].clone() if first is None else first
        assert_same_bits(out[0], first, f"row 0 of {count}")


@pytest.mark.interpreted
@pytest.mark.parametrize("type", TRITON_TYPES, ids=lambda type: type.name)
def test_triton_expands_weights(type: QuantType) -> None:
    weight = triton_weight(type, generator(5))
    shape = (weight.padded_rows, weight.padded_columns)
    space = torch.full(shape, torch.nan, dtype=torch.float16, device=DEVICE)
    triton_kernels.expand(weight, 0, space)
    found = space[: weight.rows, : weight.columns].double() * weight.expand_scale.double()
    assert worst_row_error(found, unpack(weight).double()) < 1e-3
    assert not bool(space[weight.rows :].any()) and not bool(space[:, weight.columns :].any())


@pytest.mark.interpreted
def test_triton_packs_many_rows() -> None:
    x = torch.randn(65, 40, device=DEVICE) * 1e9
    packed = triton_kernels.pack_rows(x)
    assert packed.data.shape == (65, 256) and not bool(packed.data[:, 40:].any())
    assert worst_row_error(packed.data[:, :40].double() * packed.scale[:, None].double(), x.double()) < 1e-3


@needs_cuda_kernels
@pytest.mark.slow
def test_every_tiling_gives_the_same_sums() -> None:
    """All tilings that `bough tune` tries, at the shapes of a 27B model's layers."""
    stack = Stack(LAYERS_27B, DEVICE)
    for found in tune(card_of(DEVICE), stack.layouts, stack.measure):
        differing = [tiling.compare(found.built_in) for tiling in found.differing]
        assert not differing, f"{found.rows} rows: {differing}"
