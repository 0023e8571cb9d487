"""The GPU kernels compile for every supported card, and the hot ones stay within its limits."""

import re
from pathlib import Path

import pytest

from bough.bench.tuning import candidates
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul.cuda import (
    defines,
    grouped_source,
    matmul_source,
    resident_blocks,
    rows_source,
    stage_bytes,
    stages,
)
from bough.kernels.quant_matmul.layout import DENSE, LAYOUTS, Layout
from bough.kernels.quant_matmul.rows import BUCKETS
from bough.kernels.quant_matmul.tiling import Tiling, built_in_tilings
from bough.kernels.runtime.device import Card
from bough.kernels.runtime.nvrtc import compile_cubin
from tests.kernels.cards import CARDS, tool_output

HOT = [LAYOUTS[type] for type in (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0)]


def built_in(card: Card, bucket: int) -> Tiling:
    return built_in_tilings(card.arch)[bucket]


def resources(
    card: Card, layout: Layout, bucket: int, tiling: Tiling, folder: Path
) -> dict[str, dict[str, int]]:
    """Return registers, stack bytes and static shared bytes of each kernel of a variant, from its cubin."""
    path, macros = folder / "variant.cubin", defines(card, layout, bucket, tiling)
    path.write_bytes(compile_cubin(matmul_source(), defines=macros, arch=card.arch, cached=False))
    text = tool_output("cuobjdump", "--dump-resource-usage", str(path))
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    names = ("registers", "stack", "shared")
    return {name: dict(zip(names, map(int, numbers), strict=True)) for name, *numbers in found}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("bucket", [8, 24])
def test_hot_variants_fit_every_card(card: Card, bucket: int, tmp_path: Path) -> None:
    tiling = built_in(card, bucket)
    for layout in HOT if card.arch == "sm_90" else HOT[bucket == 8 :: 2]:
        found = resources(card, layout, bucket, tiling, tmp_path)
        assert set(found) == {"matmul", "expand"}
        assert found["matmul"]["stack"] == 0, (layout, found)
        ring = stages(card, layout, bucket, tiling) * stage_bytes(card, layout, bucket)
        assert (found["matmul"]["shared"] + ring) * resident_blocks(card) <= card.shared_per_processor
        assert fits(card, found["matmul"]["registers"])


def fits(card: Card, registers: int) -> bool:
    """Registers are allocated in groups of four warps."""
    return 65536 // (registers * 32) // 4 * 4 >= 8 * resident_blocks(card)


@pytest.mark.parametrize(("name", "bucket"), [("A100", 32), ("A100", 64), ("RTX 5090", 48), ("H200", 8)])
def test_large_buckets_spill_nothing(name: str, bucket: int, tmp_path: Path) -> None:
    """The largest of each card that single warps multiply."""
    card, tiling = CARDS[name], built_in(CARDS[name], bucket)
    found = resources(card, LAYOUTS[QuantType.Q5_K], bucket, tiling, tmp_path)["matmul"]
    assert found["stack"] == 0 and fits(card, found["registers"])


@pytest.mark.parametrize("bucket", [8, 24, 64])
def test_warp_group_mma_spill_nothing_and_do_not_wait_for_each_other(bucket: int, tmp_path: Path) -> None:
    card, tiling = CARDS["H200"], Tiling(3, halfway=True)
    for layout in HOT:
        path, macros = tmp_path / "grouped.cubin", defines(card, layout, bucket, tiling, grouped=True)
        source = grouped_source(bucket)
        path.write_bytes(compile_cubin(source, defines=macros, arch="sm_90a", cached=False))
        text = tool_output("cuobjdump", "--dump-resource-usage", str(path))
        [(registers, stack)] = re.findall(r"Function matmul:\s+REG:(\d+) STACK:(\d+)", text)
        assert stack == "0" and fits(card, int(registers))
        code = tool_output("nvdisasm", "-c", str(path))
        # Two mma of 16 columns for each wait.
        assert code.count("HGMMA") == layout.unit // 16 >= 2 * code.count("WARPGROUP.DEPBAR")


def test_every_tiling_that_is_tried_fits(tmp_path: Path) -> None:
    card, layout, bucket = CARDS["H200"], LAYOUTS[QuantType.Q4_K], 8
    tilings = candidates(card, bucket, [layout])
    assert len(tilings) == 6
    for tiling in tilings:
        found = resources(card, layout, bucket, tiling, tmp_path)["matmul"]
        ring = stages(card, layout, bucket, tiling) * stage_bytes(card, layout, bucket)
        assert (found["shared"] + ring) * resident_blocks(card) <= card.shared_per_processor, tiling
        assert found["stack"] == 0 and fits(card, found["registers"]), tiling


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), DENSE], ids=[*(type.name for type in LAYOUTS), "F16"])
def test_every_layout_compiles(layout: Layout, tmp_path: Path) -> None:
    card = CARDS["RTX 3090"]
    assert "matmul" in resources(card, layout, 16, built_in(card, 16), tmp_path)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_rows_are_packed_on_every_card(card: Card) -> None:
    assert compile_cubin(rows_source(), defines={"OVERLAP": int(card.pdl)}, arch=card.arch, cached=False)


def test_every_bucket_up_to_48_fits_every_card() -> None:
    for card in CARDS.values():
        for layout in (*LAYOUTS.values(), DENSE):
            for bucket in BUCKETS[:-1]:
                assert stages(card, layout, bucket, built_in(card, bucket)) >= 2, (card, layout, bucket)
