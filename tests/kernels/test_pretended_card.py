"""A card that acts as another one: its limits, and PTX that the driver of the real one can compile."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from bough.errors import UsageError
from bough.gguf.types import QuantType
from bough.kernels.attention.cuda import tile_of
from bough.kernels.causal_conv import cuda as conv_cuda
from bough.kernels.delta_rule import cuda as delta_cuda
from bough.kernels.experts import cuda as experts_cuda
from bough.kernels.norm_rope import cuda as rows_cuda
from bough.kernels.quant_matmul import cuda as matmul_cuda
from bough.kernels.quant_matmul.layout import LAYOUTS
from bough.kernels.quant_matmul.tiling import built_in_tilings
from bough.kernels.runtime import device
from bough.kernels.runtime.device import Card, capability_of, pretended
from bough.kernels.runtime.nvrtc import compile_cubin
from tests.kernels.cards import CARDS

HOPPER = (9, 0)
LATER = ("cp.async.bulk", "griddepcontrol", "mbarrier", "wgmma", "cluster")  # what only Hopper and later have


OTHERS = [card for card in CARDS.values() if card.arch != "sm_90"]


@pytest.mark.parametrize("card", OTHERS, ids=lambda card: card.arch)
def test_a_hopper_has_the_limits_of_the_other_card(card: Card) -> None:
    acting = pretended(card.arch, HOPPER, 132)
    assert (acting.shared_per_processor, acting.shared_per_block) == (
        card.shared_per_processor,
        card.shared_per_block,
    )
    assert (acting.bulk_copies, acting.pdl, acting.processors) == (card.bulk_copies, card.pdl, 132)
    # An older driver cannot compile PTX of a newer architecture.
    assert acting.target == ("compute_90" if card.arch == "sm_120" else card.arch.replace("sm", "compute"))
    assert card.target == card.arch


def test_an_unknown_card_is_an_error() -> None:
    with pytest.raises(UsageError, match="BOUGH_PRETEND_CARD is 'sm_61', needed: one of sm_75"):
        pretended("sm_61", HOPPER, 132)


def test_every_decision_asks_for_the_pretended_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    gpu = torch.device("cuda", 0)
    assert capability_of(gpu) == HOPPER and device.usable(gpu)
    monkeypatch.setenv("BOUGH_PRETEND_CARD", "sm_75")
    assert capability_of(gpu) == (7, 5) and not device.usable(gpu)


def sources(card: Card) -> dict[str, tuple[str, dict[str, int], str]]:
    """Return the source, the macros and the target of one variant of each CUDA C++ kernel."""
    layout, tiling = LAYOUTS[QuantType.Q4_K], built_in_tilings(card.arch)[24]
    tile = tile_of(card, "q8_0", "q8_0", 144)
    assert tile is not None
    experts = experts_cuda.shape_of(card, layout, experts_cuda.SEVERAL)
    overlap = {"OVERLAP": int(card.pdl)}
    norm = rows_cuda.shape_of(rows_cuda.NORM, 2048)
    return {
        "matmul": (matmul_cuda.matmul_source(), matmul_cuda.defines(card, layout, 24, tiling), card.target),
        "pack": (matmul_cuda.rows_source(), {"OVERLAP": int(card.pdl)}, card.target),
        "attention": (tile.source(), tile.defines(card.pdl), tile.arch(card)),
        "experts": (experts_cuda.source(), experts.defines(card, layout), card.target),
        "delta": (delta_cuda.source(), {"D": 128, **overlap}, card.target),
        "conv": (conv_cuda.source(), conv_cuda.defines(True, 16, card.pdl), card.target),
        "norm": (rows_cuda.source(), norm.defines(card.pdl), card.target),
    }


def test_kernels_are_ptx_of_that_architecture(tmp_path: Path) -> None:
    card = pretended("sm_86", HOPPER, 132)
    for name, (source, macros, target) in sources(card).items():
        text = compile_cubin(source, defines=macros, arch=target, cached=False).rstrip(b"\0").decode()
        assert ".target sm_86" in text, name
        assert not [word for word in LATER if word in text], name
        assert assembled(text, tmp_path), name


def assembled(ptx: str, folder: Path) -> bool:
    """Return whether the assembler that comes with Triton makes machine code for Hopper of it."""
    path = folder / "kernel.ptx"
    # Its version may be older than NVRTC's; the kernels use nothing that new.
    path.write_text(re.sub(r"\.version \d+\.\d+", ".version 8.4", ptx))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [str(tool), "-arch=sm_90", str(path), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True).returncode == 0
