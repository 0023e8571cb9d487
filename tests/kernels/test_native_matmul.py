"""The native matmul: near the exact result, equal in every variant, the same bits in any company."""

from itertools import pairwise

import pytest
import torch

from bough.gguf.quantise import quantise
from bough.gguf.quants import dequantise
from bough.gguf.types import NATIVE_TYPES, QuantType
from bough.kernels.hadamard import BlockRotation
from bough.kernels.native import INT8, INT16, WeightMemory, argmax_rows, has_kind, packed_bytes, rank_rows
from bough.kernels.native.library import parsed_flags, usable_variants
from bough.kernels.sampling import SamplingState, rank
from bough.kernels.sampling import rank_rows as rank_state_rows
from bough.kernels.sampling.state import NoiseCache, RowOwners, SampledRows
from tests.kernels.native_library import needs_native, opened, variants

pytestmark = needs_native

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TWO_BITS = ("Q2_0", "PQ2_0", "PTQ1_0", "Q1_0")
WITHOUT_ENCODER = ("Q5_0", "IQ4_NL", "IQ4_XS", *TWO_BITS)
ERRORS = {INT8: 2e-2, INT16: 1e-4}  # relative RMS, of activations rounded to so many bits


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weight(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Return random weights as bytes [rows, row bytes] of a type."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    if kind in FLOATS:
        return values.to(FLOATS[kind]).view(torch.uint8)
    if kind in WITHOUT_ENCODER:  # random codes under scales of a usual size
        type = QuantType[kind]
        shape = (rows, columns // type.block_elements, type.block_bytes)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
        at = 26 if kind == "PTQ1_0" else 0
        scales = (values[:, :: type.block_elements, None] / 16).half()
        blocks[..., at : at + 2] = scales.view(torch.uint8)
        return blocks.flatten(1)
    return quantise(values, QuantType[kind])


@pytest.mark.parametrize("kind", NATIVE_TYPES)
@pytest.mark.parametrize(("rows", "columns"), [(8, 256), (37, 512), (1, 768)])
def test_near_the_exact_result(kind: str, rows: int, columns: int) -> None:
    library, type = opened(), QuantType[kind]
    source = weight(kind, rows, columns)
    bias = torch.randn(rows)
    matrix = library.pack(source, type, (rows, columns), bias)
    x = torch.randn(11, columns)
    exact = x.double() @ dequantise(source, type).double().T + bias
    for mode, error in ERRORS.items():
        found = library.matmul(matrix, x, mode=mode)
        assert (found - exact).norm() <= (1e-6 if kind in FLOATS else error) * exact.norm()


@pytest.mark.parametrize("kind", NATIVE_TYPES)
def test_rows_of_a_packed_matrix(kind: str) -> None:
    library, type = opened(), QuantType[kind]
    source = weight(kind, 21, 512)
    matrix = library.pack(source, type, (21, 512))
    tokens = torch.tensor([[0, 20, 7], [8, 7, 13]])
    torch.testing.assert_close(
        library.embed(matrix, tokens), dequantise(source, type)[tokens], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("mode", [INT8, INT16])
@pytest.mark.parametrize("kind", NATIVE_TYPES)
def test_same_bits_in_any_company(kind: str, mode: int) -> None:
    """Each row alone, among 1 to 9 others, with one thread and three, in every variant for this CPU."""
    source, x = weight(kind, 61, 512), torch.randn(70, 512)
    found = []
    for variant in variants():
        for threads in (1, 3):
            library = opened(threads, variant)
            matrix = library.pack(source, QuantType[kind], (61, 512))
            found.append(library.matmul(matrix, x, mode=mode))
            for count in (1, 2, 3, 4, 5, 9):
                found.append(torch.cat([library.matmul(matrix, part, mode=mode) for part in x.split(count)]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("kind", TWO_BITS)
def test_two_bits_are_packed_in_two(kind: str) -> None:
    """And 16 for each 32 as their scale, with the same values to the bit: zeros may have the other sign."""
    library, type = opened(), QuantType[kind]
    source = weight(kind, 16, 4096)
    matrix = library.pack(source, type, (16, 4096))
    assert packed_bytes(type, 16, 4096) == matrix.nbytes == 16 * 4096 * 2.5 / 8
    assert torch.equal(library.embed(matrix, torch.arange(16)), dequantise(source, type))


@pytest.mark.parametrize("kind", ["PQ2_0", "Q8_0", "F32"])
def test_a_matrix_in_another_basis(kind: str) -> None:
    """Multiplied with rows in its basis; its rows out of it. The same bits in any company and variant."""
    source, x, type = weight(kind, 61, 512), torch.randn(70, 512), QuantType[kind]
    signs, order = torch.randint(0, 2, (512,)) * 2.0 - 1, torch.randperm(512)
    plain = opened().pack(source, type, (61, 512))
    for order_read in (None, order):
        basis, found = BlockRotation(signs, order_read, 128), []
        expected = opened().matmul(plain, basis(x))
        for variant in variants():
            matrix = opened(3, variant).pack(source, type, (61, 512), rotation=basis)
            found += [
                torch.cat([opened(3, variant).matmul(matrix, part) for part in x.split(count)])
                for count in (1, 9, 70)
            ]
        assert all(torch.equal(expected, other) for other in found)
    in_order = BlockRotation(signs, None, 128)
    matrix = opened().pack(source, type, (61, 512), rotation=in_order)
    rows = opened().embed(plain, torch.arange(61))
    assert torch.equal(opened().embed(matrix, torch.arange(61)), in_order.restored(rows))


def test_numbers_that_are_none_stay_visible() -> None:
    library = opened()
    matrix = library.pack(weight("Q4_K", 16, 256), QuantType.Q4_K, (16, 256))
    for bad in (torch.nan, torch.inf):
        x = torch.randn(2, 256)
        x[1, 77] = bad
        out = library.matmul(matrix, x)
        assert out[0].isfinite().all() and not out[1].isfinite().any()


def test_zero_and_tiny_rows() -> None:
    library = opened()
    matrix = library.pack(weight("Q6_K", 16, 256), QuantType.Q6_K, (16, 256))
    assert not library.matmul(matrix, torch.zeros(3, 256)).any()
    assert library.matmul(matrix, torch.full((1, 256), 1e-44)).abs().max() < 1e-38


def test_types_and_shapes_that_cannot_be_packed() -> None:
    assert not has_kind(QuantType.Q2_K) and not packed_bytes(QuantType.Q2_K, 8, 256)
    assert not packed_bytes(QuantType.Q4_K, 8, 96)
    assert packed_bytes(QuantType.Q8_0, 16, 96) == 16 * 96 + 128  # whole tiles, of 8 or 16 rows


def test_memory_of_weights_is_zero_aligned_and_kept() -> None:
    memory = WeightMemory()
    taken = [memory.take(size) for size in (1, 100, 65 << 20, 64, 33)]
    assert all(not part[:1000].any() and part.data_ptr() % 64 == 0 for part in taken)
    spans = sorted((part.data_ptr(), part.data_ptr() + part.numel()) for part in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    del memory
    taken[0][0] = 1  # still there


def test_variants_by_cpu_flags() -> None:
    base = {"avx2", "fma", "f16c", "bmi2", "movbe"}
    wide = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
    assert usable_variants(frozenset()) == []
    assert usable_variants(frozenset(base)) == ["avx2"]
    assert usable_variants(frozenset(base | {"avx_vnni"})) == ["avxvnni", "avx2"]
    assert usable_variants(frozenset(base | wide)) == ["avx512vnni", "avx2"]
    x86 = "processor\t: 0\nflags\t\t: avx2 fma f16c bmi2 movbe sse\nprocessor\t: 1\nflags\t\t: none\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp\nCPU implementer\t: 0x41\n"
    assert usable_variants(parsed_flags(x86)) == ["avx2"]
    assert usable_variants(parsed_flags(arm)) == ["neon"]
    assert (
        usable_variants(parsed_flags(arm.replace("asimddp", ""))) == [] == usable_variants(parsed_flags(""))
    )


@pytest.mark.parametrize("columns", [1, 7, 16, 511, 512, 513, 2051])
def test_argmax_is_torch_argmax(columns: int) -> None:
    """The first of equal values, and of NaN; nothing but -inf has its largest value first."""
    x = torch.randn(12, columns).mul(2).round()  # many equal values
    x[1], x[2], x[3] = -torch.inf, 0.0, torch.inf
    for row, at in ((4, 0), (5, columns // 2), (6, columns - 1)):
        x[row, at:] = torch.nan
    x[7] = -torch.arange(columns)
    x[8] = torch.arange(columns)
    assert argmax_rows(x).tolist() == x.argmax(-1).tolist()


@pytest.mark.parametrize("columns", [5, 64, 1003, 16384])
def test_ranks_are_those_of_the_reference(columns: int) -> None:
    """Best first, of equal logits the lower id; tokens that cannot be are id 0 with -inf."""
    x = torch.randn(9, columns).mul(4).round().div(4)  # many equal values
    x[2, 2:] = -torch.inf
    greedy = {"seed": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    count = min(24, columns)
    ids, scores = rank(x, torch.arange(9), count=count, **greedy)
    found = rank_rows(x, count)
    assert found is not None
    possible = scores > -torch.inf
    assert torch.equal(found[0], ids.masked_fill(~possible, 0))
    torch.testing.assert_close(found[1], scores, rtol=1e-5, atol=1e-5)
    state = SamplingState.empty(9, columns, "cpu")
    anchor, owners = torch.zeros(1, dtype=torch.int64), RowOwners.one(0, 9, "cpu")
    rows = SampledRows(x, torch.arange(9), anchor, owners)
    through = rank_state_rows(rows, count, state, NoiseCache())
    assert torch.equal(through[0], found[0]) and torch.equal(through[1], found[1])
    x[3, 1] = torch.nan
    assert rank_rows(x, count) is None and rank_rows(x, columns + 1) is None
