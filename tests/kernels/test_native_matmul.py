"""The native matmul: near the exact result, equal in every variant, the same bits in any company."""

import pytest
import torch

from tests.kernels.native_library import needs_native, opened, variants
from treeflash.gguf.quantise import quantise
from treeflash.gguf.quants import dequantise
from treeflash.gguf.types import QuantType
from treeflash.kernels.native import INT8, INT16, has_kind, packed_bytes
from treeflash.kernels.native.library import KINDS, usable_variants

pytestmark = needs_native

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ERRORS = {INT8: 2e-2, INT16: 1e-4}  # relative RMS, of activations rounded to so many bits


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weight(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Return random weights as bytes [rows, row bytes] of a type."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    if kind in FLOATS:
        return values.to(FLOATS[kind]).view(torch.uint8)
    if kind == "Q5_0":  # there is no encoder: random codes under scales of a usual size
        blocks = torch.randint(0, 256, (rows, columns // 32, 22), dtype=torch.uint8)
        blocks[..., :2] = (values[:, ::32, None] / 16).half().view(torch.uint8)
        return blocks.flatten(1)
    return quantise(values, QuantType[kind])


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_packed_matrix(kind: str) -> None:
    library, type = opened(), QuantType[kind]
    source = weight(kind, 21, 512)
    matrix = library.pack(source, type, (21, 512))
    tokens = torch.tensor([[0, 20, 7], [8, 7, 13]])
    torch.testing.assert_close(
        library.embed(matrix, tokens), dequantise(source, type)[tokens], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("mode", [INT8, INT16])
@pytest.mark.parametrize("kind", KINDS)
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
    assert packed_bytes(QuantType.Q8_0, 8, 96) == 8 * 96 + 64


def test_variants_by_cpu_flags() -> None:
    base = {"avx2", "fma", "f16c", "bmi2", "movbe"}
    wide = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
    assert usable_variants(frozenset()) == []
    assert usable_variants(frozenset(base)) == ["avx2"]
    assert usable_variants(frozenset(base | {"avx_vnni"})) == ["avxvnni", "avx2"]
    assert usable_variants(frozenset(base | wide)) == ["avx512vnni", "avx2"]
