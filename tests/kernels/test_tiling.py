"""Which variants of the products a card gets: by architecture, by what was measured, within its limits."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.cards import CARDS
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul.cuda import defines, partition, stage_bytes, stages
from treeflash.kernels.quant_matmul.layout import DENSE, LAYOUTS, empty_packed
from treeflash.kernels.quant_matmul.rows import BUCKETS
from treeflash.kernels.quant_matmul.tiling import MOST_STAGES, Tiling

EVERY = {**{type.name: layout for type, layout in LAYOUTS.items()}, "F16": DENSE}
# By type, for 8, 16, 24, 32, 48 and 64 rows: on an A100, on an H200, on cards with 100 KiB of shared memory.
STAGES = {
    "Q4_K": ("332233", "443322", "433220"),
    "Q5_K": ("322232", "433222", "332220"),
    "Q6_K": ("544332", "555543", "555433"),
    "Q3_K": ("555433", "555554", "555543"),
    "IQ4_XS": ("555433", "555554", "555543"),
    "Q8_0": ("433322", "554433", "544332"),
    "Q4_0": ("332233", "443322", "433220"),
    "Q5_0": ("322233", "433222", "332220"),
    "IQ4_NL": ("332233", "443322", "433220"),
    "MXFP4": ("332233", "443322", "433220"),
    "Q4_1": ("322233", "443322", "433220"),
    "Q5_1": ("222232", "433222", "332220"),
    "F16": ("222233", "332222", "222222"),
}
SCALES = {"none": 0, "six": 1, "byte": 2, "half": 3, "affine": 4}


@pytest.mark.parametrize("name", CARDS)
def test_the_variants_that_are_built_where_nothing_was_measured(name: str) -> None:
    bulk, column = name in ("H200", "RTX 5090"), {"A100": 0, "H200": 1}.get(name, 2)
    for type, layout in EVERY.items():
        for bucket, depth in zip(BUCKETS, map(int, STAGES[type][column]), strict=True):
            expected = {
                "LOW": layout.low,
                "HIGH": layout.high,
                "SCALES": SCALES[layout.scales],
                "OFFSET": layout.offset,
                "UNIT": layout.unit,
                "TOKENS": bucket,
                "STAGES": depth,
                "BULK": int(bulk),
                "ROW_TILES": 2 if name == "H200" and bucket >= 32 else 1,
                "HALFWAY": int(depth >= 3),
                "TABLE": int(bool(layout.table)),
            }
            found = defines(CARDS[name], layout, bucket)
            assert {key: found[key] for key in expected} == expected, (type, bucket)
            assert len(found) == len(expected) + (4 if layout.table else 0)


def test_a_table_is_four_words() -> None:
    found = defines(CARDS["H200"], LAYOUTS[QuantType.IQ4_NL], 8)
    words = b"".join(found[f"TABLE{index}"].to_bytes(4, "little") for index in range(4))
    assert tuple(words) == LAYOUTS[QuantType.IQ4_NL].table


def test_what_was_measured_decides_for_its_rows_alone() -> None:
    card, layout = CARDS["H200"], LAYOUTS[QuantType.Q4_K]
    tuned = replace(card, tuned=((8, Tiling(3, wide=True, halfway=False)),))
    changed = {"STAGES": 3, "ROW_TILES": 2, "HALFWAY": 0}
    assert defines(tuned, layout, 8) == defines(card, layout, 8) | changed
    assert all(defines(tuned, layout, bucket) == defines(card, layout, bucket) for bucket in BUCKETS[1:])


@pytest.mark.parametrize("name", CARDS)
def test_no_tiling_goes_beyond_the_card_or_changes_who_adds_what(name: str) -> None:
    card, weight = CARDS[name], empty_packed(QuantType.Q4_K, 5120, 1536, torch.device("meta"))
    for layout in EVERY.values():
        for bucket in BUCKETS:
            deep = replace(card, tuned=((bucket, Tiling(MOST_STAGES, wide=True, halfway=True)),))
            assert bool(stages(deep, layout, bucket)) == bool(stages(card, layout, bucket))
            ring = stages(deep, layout, bucket) * stage_bytes(layout, bucket)
            assert ring <= card.shared_per_block
            assert defines(deep, layout, bucket)["ROW_TILES"] == (2 if name == "H200" else 1)
            assert partition(deep, weight) == partition(card, weight)


def test_a_tiling_in_words() -> None:
    tiling = Tiling(4, wide=False, halfway=True)
    assert tiling.beside(tiling) == "as built in"
    assert Tiling(3, wide=False, halfway=False).beside(tiling) == "3 stages, filled at the start"
    assert Tiling(4, wide=True, halfway=True).beside(tiling) == "wide warps"
