"""The matmul variants of a card: by architecture, by what was measured, within its limits."""

from pathlib import Path

import pytest
import torch

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import cuda
from bough.kernels.quant_matmul.cuda import defines, partition, stage_bytes, stages
from bough.kernels.quant_matmul.layout import DENSE, LAYOUTS, empty_packed
from bough.kernels.quant_matmul.rows import BUCKETS
from bough.kernels.quant_matmul.tiling import MAX_STAGES, Tiling, built_in_tilings
from bough.kernels.quant_matmul.tuned import TunedFile
from tests.kernels.cards import CARDS

EVERY = {**{type.name: layout for type, layout in LAYOUTS.items()}, "F16": DENSE}
# By type, for 8 to 64 rows: on an A100, an H200, an RTX 5090 (100 KiB of shared memory), and an RTX 3090,
# which has as much, no bulk copies, and blocks of 256 rows.
STAGES = {
    "Q4_K": ("332233", "422322", "433220", "222332"),
    "Q5_K": ("322232", "422222", "332220", "233322"),
    "Q6_K": ("544332", "533543", "555433", "333222"),
    "Q3_K": ("555433", "533554", "555543", "444332"),
    "IQ4_XS": ("555433", "533554", "555543", "444332"),
    "Q8_0": ("433322", "533433", "544332", "222220"),
    "Q4_0": ("332233", "422322", "433220", "222332"),
    "Q5_0": ("322233", "422222", "332220", "233322"),
    "IQ4_NL": ("332233", "422322", "433220", "222332"),
    "MXFP4": ("332233", "422322", "433220", "222332"),
    "Q4_1": ("322233", "422322", "433220", "223332"),
    "Q5_1": ("222232", "422222", "332220", "333322"),
    "F16": ("222233", "332222", "222222", "222222"),
}
# Stages of a tile on an RTX 3090: halves where two whole tiles do not fit.
HALVES = {"Q4_K": "111222", "Q5_K": "122222", "Q4_0": "111222", "Q5_0": "122222", "IQ4_NL": "111222"}
HALVES |= {"MXFP4": "111222", "Q4_1": "112222", "Q5_1": "222222"}
SCALES = {"none": 0, "six": 1, "byte": 2, "half": 3, "affine": 4}


@pytest.mark.parametrize("name", CARDS)
def test_the_variants_of_every_card(name: str) -> None:
    bulk, column = name in ("H200", "RTX 5090"), {"A100": 0, "H200": 1, "RTX 5090": 2}.get(name, 3)
    for type, layout in EVERY.items():
        halves = map(int, HALVES.get(type, "111111") if column == 3 else "111111")
        for bucket, depth, half in zip(BUCKETS, map(int, STAGES[type][column]), halves, strict=True):
            expected = {
                "LOW": layout.low,
                "HIGH": layout.high,
                "SCALES": SCALES[layout.scales],
                "OFFSET": layout.offset,
                "UNIT": layout.unit // half,
                "HALVES": half,
                "BLOCK_TILES": 16 if column == 3 and type != "F16" else 8,
                "TOKENS": bucket,
                "STAGES": depth,
                "BULK": int(bulk),
                "OVERLAP": int(bulk),
                "HALFWAY": int(depth >= 3),
                "TABLE": int(bool(layout.table)),
            }
            found = defines(CARDS[name], layout, bucket, built_in_tilings(CARDS[name].arch)[bucket])
            assert {key: found[key] for key in expected} == expected, (type, bucket)
            assert len(found) == len(expected) + (4 if layout.table else 0)


def test_a_table_is_four_words() -> None:
    found = defines(CARDS["H200"], LAYOUTS[QuantType.IQ4_NL], 8, built_in_tilings("sm_90")[8])
    words = b"".join(found[f"TABLE{index}"].to_bytes(4, "little") for index in range(4))
    assert tuple(words) == LAYOUTS[QuantType.IQ4_NL].table


def test_a_tiling_decides_over_stages_and_refills_alone() -> None:
    card, layout = CARDS["H200"], LAYOUTS[QuantType.Q4_K]
    built_in, tuned = built_in_tilings(card.arch)[8], Tiling(3, halfway=False)
    changed = {"STAGES": 3, "HALFWAY": 0}
    assert defines(card, layout, 8, tuned) == defines(card, layout, 8, built_in) | changed


def test_a_tuned_tiling_replaces_the_built_in_one_of_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, tuned = torch.device("cuda", 0), Tiling(3, halfway=False)
    monkeypatch.setattr(cuda, "card_of", lambda _: CARDS["H200"])
    monkeypatch.setattr(cuda, "kind_of", lambda _: "H200")
    monkeypatch.setattr(TunedFile, "default", lambda: TunedFile(tmp_path / "tilings.json"))
    TunedFile.default().save("H200", {8: tuned})
    assert cuda.tilings_of.__wrapped__(device) == {**built_in_tilings("sm_90"), 8: tuned}


@pytest.mark.parametrize("name", CARDS)
def test_no_tiling_exceeds_the_card(name: str) -> None:
    card, deep = CARDS[name], Tiling(MAX_STAGES, halfway=True)
    for layout in EVERY.values():
        for bucket in BUCKETS:
            built_in = built_in_tilings(card.arch)[bucket]
            assert bool(stages(card, layout, bucket, deep)) == bool(stages(card, layout, bucket, built_in))
            ring = stages(card, layout, bucket, deep) * stage_bytes(card, layout, bucket)
            assert ring <= card.shared_per_block


@pytest.mark.parametrize("name", CARDS)
def test_the_partition_depends_on_the_card_and_the_matrix_alone(name: str) -> None:
    weight = empty_packed(QuantType.Q4_K, 5120, 1536, torch.device("meta"))
    grid, share, extra = partition(CARDS[name], weight)
    rows = 16 * cuda.block_tiles(CARDS[name], weight.layout)
    assert grid * share + extra == weight.padded_rows // rows * weight.data.shape[0]
    assert grid <= 2 * CARDS[name].processors and extra < grid


def test_a_tiling_in_words() -> None:
    tiling = Tiling(4, halfway=True)
    assert tiling.compare(tiling) == "as built in"
    assert Tiling(3, halfway=False).compare(tiling) == "3 stages, filled at the start"
