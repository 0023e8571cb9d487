"""The kernels of prompt text: interpreted, in a process of their own, and compiled for every listed card."""

from pathlib import Path

import pytest

from bough.kernels.attention import prefill as attention
from bough.kernels.causal_conv import chunk as conv
from bough.kernels.delta_rule import chunk as delta
from tests.kernels.cards import TARGETS, tool_output, unwritten_reads
from tests.kernels.test_compile_layers import capability, compiled, shared_memory, tiled

HEADS = {"KEY_HEADS": 16, "VALUE_HEADS": 48, "D": 128}
TYPES = dict.fromkeys(("q", "k", "erase", "attention"), "*fp16") | {
    "values": "*fp32",
    "peaks": "*i32",
    "runs": "i32",
}


@pytest.mark.parametrize("card", [card for card in TARGETS if card[:2] == "sm" and card != "sm_75"])
def test_the_delta_rule_compiles(card: str) -> None:
    target, limit = TARGETS[card]
    tiles = (choose(128, capability(target)) for choose in (delta.prepare_tiles, delta.scan_tiles))
    for kernel, chosen in zip((delta._prepare_kernel, delta._scan_kernel), tiles, strict=True):
        assert compiled(kernel, card, {**HEADS, "C": 64}, chosen, scalars=TYPES) <= limit
    rows = {**HEADS, "WIDTH": 4, "ROWS": conv.ROWS, "WINDOW": 4}
    assert shared_memory(conv._chunk_conv_kernel, target, rows, scalars={"q": "*fp16", "k": "*fp16"}) <= limit


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_the_delta_rule_reads_nothing_that_was_never_written(dim: int, tmp_path: Path) -> None:
    """As heads of 16 dims did in four warps: such a register held the address of an mma operand."""
    heads, path = {"KEY_HEADS": 2, "VALUE_HEADS": 6, "D": dim, "C": 64}, tmp_path / "kernel.cubin"
    tiles = (choose(dim, (9, 0)) for choose in (delta.prepare_tiles, delta.scan_tiles))
    for kernel, chosen in zip((delta._prepare_kernel, delta._scan_kernel), tiles, strict=True):
        path.write_bytes(tiled(kernel, "sm_90", heads, chosen, scalars=TYPES).asm["cubin"])
        code = tool_output("nvdisasm", "-c", str(path))
        assert "HGMMA" in code
        assert not unwritten_reads(code)


def test_a_read_of_what_was_never_written_is_found() -> None:
    lines = (
        "S2R R2, SR_TID.X",
        "@!P0 IADD3 R5, P2, R2, 0x20, RZ",
        "LOP3.LUT R4, R4, 0xfffffeff, RZ, 0xc0, !PT",
    )
    wrong = "IADD3 R160, P2, R0, 0x20, RZ"
    assert unwritten_reads("".join(f"  /*0010*/  {line} ;\n" for line in lines)) == []
    assert unwritten_reads("".join(f"  /*0010*/  {line} ;\n" for line in (*lines, wrong, wrong))) == [wrong]


@pytest.mark.parametrize("card", TARGETS)
def test_attention_compiles(card: str) -> None:
    """Over one slice, and over the first of several."""
    target, limit = TARGETS[card]
    for dim, whole in ((256, True), (256, False), (128, True))[: 3 if card == "sm_90" else 1]:
        parts = {"BEGIN": True, "END": whole, "GATE": whole}
        constants = {"KV": 4, "GROUP": 6, "D": dim, "PRECISION": "ieee", "DESCRIPTORS": False, **parts}
        chosen = attention.tiles(dim, capability(target))
        scalars = {"first": "i32", "last": "i32"}
        assert compiled(attention._chunk_attention_kernel, card, constants, chosen, scalars=scalars) <= limit


def test_attention_through_descriptors_compiles(tmp_path: Path) -> None:
    """With 64 keys at a time, copied by the bulk tensor engine, and mma that need not wait for each other."""
    parts = {"BEGIN": True, "END": True, "GATE": True, "PRECISION": "ieee", "DESCRIPTORS": True}
    chosen = attention.descriptor_tiles()
    boxes = {"q": chosen["BLOCK_M"], "keys": chosen["BLOCK_N"], "values": chosen["BLOCK_N"]}
    scalars = {name: f"tensordesc<fp16[{rows},256]>" for name, rows in boxes.items()}
    scalars |= {"first": "i32", "last": "i32"}
    kernel = attention._chunk_attention_kernel
    made = tiled(kernel, "sm_90", {"KV": 4, "GROUP": 6, "D": 256, **parts}, chosen, scalars=scalars)
    assert made.metadata.shared <= TARGETS["sm_90"][1]
    path = tmp_path / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    code = tool_output("nvdisasm", "-c", str(path))
    assert "UTMALDG" in code and code.count("WARPGROUP") < code.count("HGMMA")
