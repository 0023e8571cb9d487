"""Which variants of the products are built: by architecture, by what was measured, and within a card's limits."""

import pytest

from tests.kernels.cards import CARDS
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul.cuda import defines
from treeflash.kernels.quant_matmul.layout import DENSE, LAYOUTS
from treeflash.kernels.quant_matmul.rows import BUCKETS

EVERY = {**{type.name: layout for type, layout in LAYOUTS.items()}, "F16": DENSE}
# Stages for 8, 16, 24, 32, 48 and 64 rows.
A100 = {
    "Q4_K": "332233", "Q5_K": "322232", "Q6_K": "544332", "Q3_K": "555433", "IQ4_XS": "555433", "Q8_0": "433322",
    "Q4_0": "332233", "Q5_0": "322233", "IQ4_NL": "332233", "MXFP4": "332233", "Q4_1": "322233", "Q5_1": "222232",
    "F16": "222233",
}  # fmt: skip
SMALL = {
    "Q4_K": "433220", "Q5_K": "332220", "Q6_K": "555433", "Q3_K": "555543", "IQ4_XS": "555543", "Q8_0": "544332",
    "Q4_0": "433220", "Q5_0": "332220", "IQ4_NL": "433220", "MXFP4": "433220", "Q4_1": "433220", "Q5_1": "332220",
    "F16": "222222",
}  # fmt: skip
H200 = {
    "Q4_K": "443322", "Q5_K": "433222", "Q6_K": "555543", "Q3_K": "555554", "IQ4_XS": "555554", "Q8_0": "554433",
    "Q4_0": "443322", "Q5_0": "433222", "IQ4_NL": "443322", "MXFP4": "443322", "Q4_1": "443322", "Q5_1": "433222",
    "F16": "332222",
}  # fmt: skip
STAGES = {"A100": A100, "RTX 3090": SMALL, "RTX 4090": SMALL, "H200": H200, "RTX 5090": SMALL}
SCALES = {"none": 0, "six": 1, "byte": 2, "half": 3, "affine": 4}


@pytest.mark.parametrize("name", CARDS)
def test_the_variants_that_are_built_where_nothing_was_measured(name: str) -> None:
    bulk = name in ("H200", "RTX 5090")
    for type, layout in EVERY.items():
        for bucket, depth in zip(BUCKETS, map(int, STAGES[name][type]), strict=True):
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
