"""The emulation of a GeForce's tensor cores: the compiled matmul issues each mma so many times."""

from pathlib import Path

import pytest

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul.cuda import defines, matmul_source
from bough.kernels.quant_matmul.layout import LAYOUTS
from bough.kernels.quant_matmul.tiling import built_in_tilings
from bough.kernels.runtime.nvrtc import compile_cubin
from tests.kernels.cards import CARDS, tool_output
from workshop.gpu.emulate_geforce import repeated


@pytest.mark.parametrize("bucket", [8, 24])
def test_each_mma_is_issued_so_often(bucket: int, tmp_path: Path) -> None:
    card, issued = CARDS["RTX 3090"], []
    macros = defines(card, LAYOUTS[QuantType.Q4_K], bucket, built_in_tilings(card.arch)[bucket])
    for count in (1, 5):
        path = tmp_path / f"{count}.cubin"
        source = repeated(matmul_source(), count)
        path.write_bytes(compile_cubin(source, defines=macros, arch=card.target, cached=False))
        code = tool_output("nvdisasm", "-c", str(path)).partition(".text.matmul:")[2]
        issued.append(code.partition(".section")[0].count("HMMA."))
    assert issued[1] == 5 * issued[0] > 0
