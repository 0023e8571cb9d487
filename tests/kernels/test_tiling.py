"""Which variants of the products a card gets: by architecture, by what was measured, within its limits."""

import pytest

from tests.kernels.cards import CARDS
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul.cuda import defines
from treeflash.kernels.quant_matmul.layout import DENSE, LAYOUTS
from treeflash.kernels.quant_matmul.rows import BUCKETS

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
