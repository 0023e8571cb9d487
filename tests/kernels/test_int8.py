"""Matmuls of prompts in int8: their error, and which rows they are used for."""

import torch
from torch import Tensor

from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import int8, pack, packed_matmuls, unpack, with_int8


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def fp8(x: Tensor) -> Tensor:
    """Return x with e4m3 codes and a scale for each group of 128."""
    groups = x.unflatten(1, (-1, int8.GROUP))
    scale = groups.abs().amax(2, keepdim=True) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


def test_int8_is_nearer_to_exact_than_fp8() -> None:
    """Of random weights as a file has them: four times nearer in a matmul."""
    torch.manual_seed(0)
    weight = pack(quantise(torch.randn(512, 1024), QuantType.Q4_K), QuantType.Q4_K)
    x, values = torch.randn(128, 1024), unpack(weight)
    exact = x @ values.T
    found = relative(packed_matmuls(x, [with_int8(weight, 512)]), exact)
    assert 0.006 < found < 0.012 and 3 * found < relative(fp8(x) @ fp8(values).T, exact)


def test_groups_of_zeros_and_outliers() -> None:
    x = torch.randn(3, 384)
    x[0], x[1, 128:256], x[2, 5] = 0, 0, 1e6
    back = int8.dequantise(int8.quantise(x))
    assert not bool(back[0].any()) and not bool(back[1, 128:256].any())
    assert relative(back[2, 128:], x[2, 128:]) < 0.02, "an outlier spoils its own group alone"
    assert relative(back[2, :128], x[2, :128]) < 1e-3


def test_few_rows_and_small_matrices_stay_exact() -> None:
    """Steps have up to 64 rows; of joined matrices only the first rows are in int8."""
    torch.manual_seed(1)
    plain = pack(quantise(torch.randn(300, 256), QuantType.Q8_0), QuantType.Q8_0)
    marked, x = with_int8(plain, 256), torch.randn(65, 256)
    assert torch.equal(packed_matmuls(x[:64], [marked]), packed_matmuls(x[:64], [plain]))
    both, exact = packed_matmuls(x, [marked]), packed_matmuls(x, [plain])
    assert relative(both[:, 256:], exact[:, 256:]) < 1e-6
    assert 1e-3 < relative(both[:, :256], exact[:, :256]) < 2e-2


def test_a_row_is_the_same_alone_and_among_others() -> None:
    torch.manual_seed(2)
    weight = with_int8(pack(quantise(torch.randn(256, 512), QuantType.Q4_K), QuantType.Q4_K), 256)
    x = torch.randn(200, 512)
    assert torch.equal(packed_matmuls(x, [weight])[60:130], packed_matmuls(x[60:130], [weight]))
