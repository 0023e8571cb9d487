"""The GPU kernels compile for cards that are not here, and the hot ones keep within those cards' limits."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.cards import CARDS, told
from treeflash.bench.tuning import candidates
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul.cuda import Card, defines, row_tiles, source, stage_bytes, stages
from treeflash.kernels.quant_matmul.layout import DENSE, LAYOUTS, Layout
from treeflash.kernels.quant_matmul.rows import BUCKETS
from treeflash.kernels.runtime.nvrtc import compile_cubin

HOT = [LAYOUTS[type] for type in (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0)]


def resources(card: Card, layout: Layout, bucket: int, folder: Path) -> dict[str, dict[str, int]]:
    """Registers, stack bytes and static shared bytes of each kernel of a variant, from its machine code."""
    path = folder / "variant.cubin"
    path.write_bytes(
        compile_cubin(source(), defines=defines(card, layout, bucket), arch=card.arch, cached=False)
    )
    text = told("cuobjdump", "--dump-resource-usage", str(path))
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    names = ("registers", "stack", "shared")
    return {name: dict(zip(names, map(int, numbers), strict=True)) for name, *numbers in found}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("bucket", [8, 24])
def test_hot_variants_fit_every_card(card: Card, bucket: int, tmp_path: Path) -> None:
    for layout in HOT if card.arch == "sm_90" else HOT[bucket == 8 :: 2]:
        found = resources(card, layout, bucket, tmp_path)
        assert set(found) == {"matmul", "expand"}
        assert found["matmul"]["stack"] == 0, (layout, found)
        ring = stages(card, layout, bucket) * stage_bytes(layout, bucket)
        assert (found["matmul"]["shared"] + ring) * card.resident <= card.shared_per_processor
        assert fits(card, found["matmul"]["registers"], bucket)


def fits(card: Card, registers: int, bucket: int) -> bool:
    """Registers are handed out in groups of four warps."""
    return 65536 // (registers * 32) // 4 * 4 >= 8 // row_tiles(card, bucket) * card.resident


@pytest.mark.parametrize("bucket", [32, 64])
def test_large_buckets_spill_nothing(bucket: int, tmp_path: Path) -> None:
    found = resources(CARDS["H200"], LAYOUTS[QuantType.Q5_K], bucket, tmp_path)["matmul"]
    assert found["stack"] == 0 and fits(CARDS["H200"], found["registers"], bucket)


def test_every_tiling_that_is_tried_fits(tmp_path: Path) -> None:
    layout, bucket = LAYOUTS[QuantType.Q4_K], 16
    tilings = candidates(CARDS["H200"], bucket, [layout])
    assert len(tilings) == 6
    for tiling in tilings:
        card = replace(CARDS["H200"], tuned=((bucket, tiling),))
        found = resources(card, layout, bucket, tmp_path)["matmul"]
        ring = stages(card, layout, bucket) * stage_bytes(layout, bucket)
        assert (found["shared"] + ring) * card.resident <= card.shared_per_processor, tiling
        assert found["stack"] == 0 and fits(card, found["registers"], bucket), tiling


def test_warps_are_wide_only_beside_a_second_block() -> None:
    assert row_tiles(CARDS["H200"], 64) == 2 and row_tiles(CARDS["H200"], 8) == 1
    assert all(row_tiles(CARDS[name], 64) == 1 for name in ("A100", "RTX 3090", "RTX 5090"))


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), DENSE], ids=[*(type.name for type in LAYOUTS), "F16"])
def test_every_layout_compiles(layout: Layout, tmp_path: Path) -> None:
    assert "matmul" in resources(CARDS["RTX 3090"], layout, 16, tmp_path)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_rows_are_packed_on_every_card(card: Card) -> None:
    assert compile_cubin(source("rows.cu"), defines={"BULK": int(card.bulk)}, arch=card.arch, cached=False)


def test_every_bucket_up_to_48_fits_every_card() -> None:
    for card in CARDS.values():
        for layout in (*LAYOUTS.values(), DENSE):
            assert all(stages(card, layout, bucket) >= 2 for bucket in BUCKETS if bucket <= 48), (
                card,
                layout,
            )


@pytest.mark.parametrize(
    "target", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "gfx942", "gfx1100"]
)
def test_triton_kernels_compile(target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_matmul", target]
    root = Path(__file__).parents[2]
    subprocess.run(command, cwd=root, env=environment, check=True, timeout=240)
