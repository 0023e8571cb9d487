"""Machine code of matmuls: a stage is released only when all loads from it have completed."""

import re
from pathlib import Path

import pytest

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul.cuda import defines, matmul_source
from bough.kernels.quant_matmul.layout import DENSE, LAYOUTS, Layout
from bough.kernels.quant_matmul.tiling import built_in_tilings
from bough.kernels.runtime.nvrtc import compile_cubin
from tests.kernels.cards import CARDS, tool_output

# One of every way in which scales and codes are loaded.
KINDS = {
    **{type.name: LAYOUTS[type] for type in (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q5_1)},
    "dense": DENSE,
}
WORDS = {"": 1, ".64": 2, ".128": 4}


def reads(line: str) -> set[int]:
    """Return the registers that an instruction reads; an mma's operands are several."""
    mma = re.search(r"HMMA\S* R\d+, R(\d+)(?:\.reuse)?, R(\d+)", line)
    if mma:
        first, second = int(mma[1]), int(mma[2])
        return {*range(first, first + 4), second, second + 1}
    return {int(number) for number in re.findall(r"\bR(\d+)\b", line.partition(",")[2])}


@pytest.mark.parametrize("bucket", [8, 24, 64])
@pytest.mark.parametrize("layout", KINDS.values(), ids=KINDS)
def test_no_load_is_outstanding_when_a_stage_is_released(layout: Layout, bucket: int, tmp_path: Path) -> None:
    tiling = built_in_tilings("sm_90")[bucket]
    path, macros = tmp_path / "matmul.cubin", defines(CARDS["H200"], layout, bucket, tiling)
    path.write_bytes(compile_cubin(matmul_source(), defines=macros, arch="sm_90", cached=False))
    code = tool_output("nvdisasm", "-c", str(path)).partition(".text.matmul:")[2].splitlines()
    released = next(at for at, line in enumerate(code) if "ARRIVE.TRANS64.A1T0" in line)
    # After the last wait: for this stage, or halfway for another one that is refilled.
    waited = max(at for at, line in enumerate(code[:released]) if "PHASECHK" in line)
    loads = 0
    for at in range(waited, released):
        load = re.search(r"LDS(\.64|\.128)? R(\d+), \[", code[at])
        if load:
            loads += 1
            loaded = set(range(int(load[2]), int(load[2]) + WORDS[load[1] or ""]))
            assert any(loaded & reads(line) for line in code[at + 1 : released]), code[at]
    assert loads >= layout.unit // 64 * bucket // 8
