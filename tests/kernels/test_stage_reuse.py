"""Machine code of products: a stage is given back only when all that was loaded from it has arrived."""

import re
from pathlib import Path

import pytest

from tests.kernels.cards import CARDS, told
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul.cuda import defines, source
from treeflash.kernels.quant_matmul.layout import DENSE, LAYOUTS, Layout
from treeflash.kernels.runtime.nvrtc import compile_cubin

# One of every way in which scales and codes are loaded.
KINDS = {
    **{type.name: LAYOUTS[type] for type in (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q5_1)},
    "dense": DENSE,
}
WORDS = {"": 1, ".64": 2, ".128": 4}


def reads(line: str) -> set[int]:
    """Registers that an instruction reads; a product's operands are several."""
    product = re.search(r"HMMA\S* R\d+, R(\d+)(?:\.reuse)?, R(\d+)", line)
    if product:
        first, second = int(product[1]), int(product[2])
        return {*range(first, first + 4), second, second + 1}
    return {int(number) for number in re.findall(r"\bR(\d+)\b", line.partition(",")[2])}


@pytest.mark.parametrize("bucket", [8, 24, 64])
@pytest.mark.parametrize("layout", KINDS.values(), ids=KINDS)
def test_no_load_is_on_its_way_when_a_stage_is_given_back(
    layout: Layout, bucket: int, tmp_path: Path
) -> None:
    path, macros = tmp_path / "product.cubin", defines(CARDS["H200"], layout, bucket)
    path.write_bytes(compile_cubin(source(), defines=macros, arch="sm_90", cached=False))
    code = told("nvdisasm", "-c", str(path)).partition(".text.matmul:")[2].splitlines()
    given_back = next(place for place, line in enumerate(code) if "ARRIVE.TRANS64.A1T0" in line)
    # Behind the last wait: for this stage, or halfway for another one that is filled again.
    waited = max(place for place, line in enumerate(code[:given_back]) if "PHASECHK" in line)
    loads = 0
    for place in range(waited, given_back):
        load = re.search(r"LDS(\.64|\.128)? R(\d+), \[", code[place])
        if load:
            loads += 1
            loaded = set(range(int(load[2]), int(load[2]) + WORDS[load[1] or ""]))
            assert any(loaded & reads(line) for line in code[place + 1 : given_back]), code[place]
    assert loads >= layout.unit // 64 * bucket // 8
