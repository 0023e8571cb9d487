"""Matmuls of prompts in int8: the kernels interpreted and compiled, and their error."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import (
    cuda,
    int8,
    int8_hopper,
    int8_kernels,
    pack,
    packed_matmuls,
    unpack,
    with_int8,
)
from bough.kernels.quant_matmul.layout import DENSE, LAYOUTS, Layout
from bough.kernels.quant_matmul.triton_kernels import constants
from bough.kernels.runtime.nvrtc import compile_cubin
from tests.kernels.cards import tool_output, unwritten_reads
from tests.kernels.emulated_int8 import EmulatedInt8, emulated_requantise
from tests.kernels.emulator import needs_compiler
from tests.kernels.test_compile_layers import TARGETS, capability, compiled, tiled

BYTES = {"x": "*i8", "weight": "*i8", "codes": "*i8"}
SIZES = dict.fromkeys(("rows", "columns", "x_padded", "weight_padded", "first", "all_tiles", "padded"), "i32")
CARDS = [card for card in TARGETS if card != "sm_75"]  # Turing has no such mma in Triton; it is refused


def test_kernels_are_their_references_in_the_interpreter() -> None:
    script = Path(__file__).parent / "interpreted_int8.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(script)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("card", CARDS)
def test_the_matmul_compiles(card: str, tmp_path: Path) -> None:
    """For the tensor cores, within shared memory and without spills."""
    target, limit = TARGETS[card]
    made = tiled(
        int8_kernels._matmul_kernel, card, {"K": 5120}, int8_kernels.tiles(capability(target)),
        scalars=BYTES | SIZES,
    )  # fmt: skip
    assert made.metadata.shared <= limit
    if target.backend == "cuda":
        path = tmp_path / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        assert re.search(
            r"\bIGMMA\b" if card == "sm_90" else r"\bIMMA\b", tool_output("nvdisasm", "-c", str(path))
        )
        assert "STACK:0 " in tool_output("cuobjdump", "--dump-resource-usage", str(path))


@pytest.mark.parametrize("layout", [LAYOUTS[QuantType.Q4_K], LAYOUTS[QuantType.Q6_K], DENSE], ids=str)
@pytest.mark.parametrize("card", ["sm_86", "sm_90", "gfx942"])
def test_quantisation_compiles(card: str, layout: Layout) -> None:
    options = constants(layout) | {"ROWS": int8_kernels._REQUANTISED_ROWS, "TILED": card == "sm_90"}
    assert compiled(int8_kernels._requantise_kernel, card, options, {}, scalars=BYTES | SIZES)
    if layout is DENSE:
        types = BYTES | SIZES | {"x": "*fp16"}
        rows = {"GROUPS": 8, "TILED": card == "sm_90"}
        assert compiled(int8_kernels._quantise_kernel, card, rows, {}, scalars=types)


def test_the_hopper_kernel_compiles(tmp_path: Path) -> None:
    """With mma that need not wait for each other, and bulk copies, within the shared memory of a block."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compile_cubin(int8_hopper.hopper_source(), defines={}, arch="sm_90a", cached=False))
    code = tool_output("nvdisasm", "-c", str(path))
    assert code.count("IGMMA.64x128x32.S8.S8") == 8 and code.count("WARPGROUP.ARRIVE") == 2
    assert "UBLKCP" in code and "USETMAXREG" in code
    assert not unwritten_reads(re.sub("IGMMA", "HGMMA", code))
    assert TARGETS["sm_90"][1] >= int8_hopper.SHARED


@needs_compiler
def test_the_hopper_kernel_on_a_cpu(tmp_path: Path) -> None:
    """Several blocks of the output for each of the grid, more steps than stages, rows that fill no block."""
    torch.manual_seed(0)
    emulated = EmulatedInt8(tmp_path)
    for rows, columns, summed, grid, wide in ((130, 270, 640, 2, 0), (65, 300, 128, 1, 1)):
        x, weight = (int8.quantise(torch.randn(count, summed)) for count in (rows, columns))
        out = torch.full((rows, columns + wide), float("nan"))
        emulated.matmul(int8.in_tiles(x), int8.in_tiles(weight), out[:, :columns], grid=grid)
        expected = int8.matmul(x, weight, torch.empty(rows, columns))
        torch.testing.assert_close(out[:, :columns], expected, rtol=1e-5, atol=1e-5)
        assert bool(out[:, columns:].isnan().all())


@needs_compiler
@pytest.mark.parametrize("type", [QuantType.Q4_K, QuantType.Q6_K])
def test_weights_in_cuda_on_a_cpu(type: QuantType, tmp_path: Path) -> None:
    """In tiles, as Hopper reads them; a value is a float16 there, so a code may be off by one at a tie."""
    torch.manual_seed(0)
    data = torch.randn(256, 512)
    data[130, 128:256] = 0
    weight = pack(data.half().view(torch.uint8) if type is QuantType.F16 else quantise(data, type), type)
    found = int8.empty_int8(128, 512, torch.device("cpu"), tiled=True)
    emulated_requantise(weight, 128, found, tmp_path)
    expected = int8.quantise(unpack(weight)[128:])
    torch.testing.assert_close(found.scales[:, :128], expected.scales[:, :128], rtol=3e-3, atol=0)
    tiles = int8.in_tiles(expected)
    pieces = [each.codes.view(4, 2, 128, 128)[:, 0].int() for each in (found, tiles)]
    off = (pieces[0] - pieces[1]).abs()
    assert int(off.max()) <= 1 and float(off.float().mean()) < 0.05


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_weights_in_cuda_compile(arch: str) -> None:
    for layout in (LAYOUTS[QuantType.Q4_K], DENSE):
        macros = cuda.int8_defines(layout)
        assert compile_cubin(cuda.int8_source(), defines=macros, arch=arch, cached=False)


def test_tiles_hold_the_swizzled_matrix() -> None:
    """Byte b of row r of a tile is at r * 128 + ((b / 16) ^ (r % 8)) * 16 + b % 16."""
    matrix = int8.quantise(torch.randn(300, 384))
    tiles = int8.in_tiles(matrix)
    assert tiles.tiled and tiles.codes.shape == matrix.codes.shape
    flat = tiles.codes.flatten()
    for row, column in ((0, 0), (5, 17), (130, 200), (299, 383)):
        tile = column // 128 * (len(matrix.codes) // 128) + row // 128
        at = row % 128 * 128 + (column % 128 // 16 ^ row % 8) * 16 + column % 16
        assert flat[tile * 16384 + at] == matrix.codes[row, column]


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
