"""The Triton kernels of int8 matmuls against their reference, in Triton's interpreter."""

import pytest
import torch

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import int8, int8_kernels, packed, triton_kernels
from bough.kernels.quant_matmul.int8 import Int8Matrix, empty_int8
from bough.kernels.quant_matmul.layout import pack, unpack, with_int8
from tests.kernels.test_quant_matmul_layout import random_blocks

torch.set_num_threads(1)
CPU = torch.device("cpu")
# One of each kind of layout.
TYPES = (
    *(QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.IQ4_XS),
    *(QuantType.Q8_0, QuantType.Q4_0, QuantType.Q4_1, QuantType.F16),
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def poisoned(rows: int, columns: int) -> Int8Matrix:
    matrix = empty_int8(rows, columns, CPU)
    matrix.codes.fill_(-128)
    matrix.scales.fill_(float("nan"))
    return matrix


def check_equal(found: Int8Matrix, expected: Int8Matrix) -> None:
    """Scales may differ in the last bits, and a code at a tie by one."""
    rows = expected.rows
    torch.testing.assert_close(found.scales[:, :rows], expected.scales[:, :rows], rtol=1e-6, atol=0)
    off = (found.codes[:rows].int() - expected.codes[:rows].int()).abs()
    assert int(off.max()) <= 1 and float(off.float().mean()) < 2e-2, float(off.float().mean())
    assert bool((found.codes[rows:] == -128).all()) and bool(found.scales[:, rows:].isnan().all())


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_kernels, "empty_int8", lambda rows, columns, _: poisoned(rows, columns))
    x = torch.randn(67, 300) * torch.logspace(-6, 6, 67)[:, None]
    x[3, :128] = 0
    x[5] = 0
    rows = triton_kernels.pack_rows(x)
    found, whole = int8_kernels.quantise_rows(rows), rows.data.float() * rows.scale[:, None]
    check_equal(found, int8.quantise(whole, poisoned(67, 512)))
    assert not bool(found.codes[:67, 300:].any()) and not bool(found.codes[5].any())


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_weights(type: QuantType) -> None:
    columns = 512 if type.block_elements == 256 else 288
    if type is QuantType.F16:
        data = torch.randn(200, columns).half().view(torch.uint8)
    else:
        data = random_blocks(type, 200, columns)
    weight = pack(data, type)
    found, values = poisoned(128, 512), unpack(weight)[128:]
    int8_kernels.requantise(weight, 128, found)
    padded = torch.zeros(128, 512)
    padded[:72, :columns] = values
    check_equal(found, int8.quantise(padded, poisoned(128, 512)))


@pytest.mark.parametrize(("rows", "columns", "summed"), [(65, 70, 256), (129, 40, 384)])
def test_matmul(rows: int, columns: int, summed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller than on a GPU, so that there are several of them, and rows that fill none."""
    small = {"BLOCK_M": 64, "BLOCK_N": 32, "BAND": 2, "num_stages": 1, "num_warps": 4}
    monkeypatch.setattr(int8_kernels, "tiles", lambda _: small)
    x, weight = int8.quantise(torch.randn(rows, summed)), int8.quantise(torch.randn(columns, summed))
    out = torch.full((rows, columns + 8), float("nan"))
    int8_kernels.matmul(x, weight, out[:, :columns])
    expected = int8.matmul(x, weight, torch.empty(rows, columns))
    torch.testing.assert_close(out[:, :columns], expected, rtol=1e-5, atol=1e-5)
    assert bool(out[:, columns:].isnan().all())


def test_a_matrix_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first rows in int8, in slices, the others in 16 bits, as on a GPU."""
    weight = with_int8(pack(random_blocks(QuantType.Q4_K, 300, 256), QuantType.Q4_K), 290)
    assert weight.int8_rows == 256
    x = torch.randn(70, 256)
    expected = packed.packed_matmuls(x, [weight])
    monkeypatch.setattr(packed, "_INT8_SLICE", 128 * 256)
    monkeypatch.setattr(packed, "_int8", lambda _: int8_kernels)
    monkeypatch.setattr(packed, "_kernels", lambda _: triton_kernels)
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out, out_dtype: out.copy_(a.float() @ b.float()))
    out = packed.packed_matmuls(triton_kernels.pack_rows(x), [weight])
    exact = x @ unpack(weight).T
    assert float((out[:, 256:] - exact[:, 256:]).norm() / exact[:, 256:].norm()) < 1e-3
    error = (out[:, :256] - exact[:, :256]).norm() / exact[:, :256].norm()
    assert 1e-3 < float(error) < 2e-2
    assert float((out - expected).norm() / expected.norm()) < 3e-3
