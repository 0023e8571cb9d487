"""Every Triton kernel that a model launches compiles for every card on the list, and fits there."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from triton.compiler import ASTSource, CompiledKernel

from bough.gguf.types import QuantType
from bough.kernels.check.cases import cases_of
from bough.kernels.check.shapes import COMMON, Shapes
from bough.kernels.runtime.device import Card
from bough.kernels.runtime.dry_run import DryRun, Launch, Pointer, Tiles
from tests.kernels.cards import CARDS, TARGETS, tool_output, unwritten_reads
from tests.session.fake_gpu import GPU, fake_gpu

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64"}
DTYPES |= {torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1"}
Q = QuantType
# A 27B and a 35B with experts; and what neither has.
SHAPES = (
    *COMMON[:2],
    replace(
        COMMON[0], name="odd", kv=(("tq3_0", "q4_0"), ("bf16", "q5_0")), types=(Q.IQ4_XS, Q.F16), rows=(24,),
        embedding=Q.Q6_K, window=1000, sliding=500, interleaved=True, head_norms=False,
    ),
)  # fmt: skip
# Turing has no such mma in Triton, or the program is too long to compile: it is refused there.
OFTEN = ("sm_86", "sm_90", "gfx942")  # one of each kind: more variants are compiled
TOO_LARGE = ("_matmul_kernel",)  # for the 64 KiB of AMD's cards in some layouts, where nobody has run it
NOT_ON_TURING = {"_prepare_kernel", "_scan_kernel", "int8_kernels"}


@contextmanager
def card_of_target(name: str) -> Iterator[None]:
    """Have our kernels believe in a card of a target: of AMD without a compute capability."""
    known = {card.arch: card for card in CARDS.values()}
    amd = patch.object(torch.version, "hip", "6" if name.startswith("gfx") else None)
    with fake_gpu(known.get(name, Card("sm_75", 40, 64 << 10, 64 << 10))), amd:
        yield


def launches_on(target: str, shapes: Sequence[Shapes] = SHAPES) -> list[Launch]:
    """Return the launches of all cases of some models."""
    with pytest.MonkeyPatch.context() as patched, card_of_target(target), DryRun(GPU) as recorded:
        patched.setenv("BOUGH_KERNELS", "triton")
        for case in (case for some in shapes for case in cases_of(some, GPU)):
            work = case.make()
            work.run(*work.fresh())
    return list(recorded.launches)


def some_of_each(launches: list[Launch], *, most: int) -> list[Launch]:
    """Return a launch of each kernel, or two: the first and the most different one."""
    by_kernel: dict[Any, list[Launch]] = {}
    for launch in launches:
        by_kernel.setdefault(launch.kernel, []).append(launch)
    some = []
    for first, *others in by_kernel.values():
        constants = set(first.options)
        apart = max(others, key=lambda launch: len(set(launch.options) ^ constants), default=first)
        some += [first, apart][: most if set(apart.options) != constants else 1]
    return some


def compiled(launch: Launch, target: str) -> CompiledKernel:
    kernel, named = launch.kernel, dict(launch.options)
    values = dict(zip(kernel.arg_names, launch.arguments, strict=False)) | named
    types, constants, aligned = {}, {}, {}
    for place, param in enumerate(kernel.params):
        value, divisible = values[param.name], [["tt.divisibility", 16]]
        if param.is_constexpr or isinstance(value, bool) or value == 1:
            types[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Pointer):
            types[param.name] = f"*{DTYPES[value.dtype]}"
            aligned |= {(place,): divisible} if value.address % 16 == 0 else {}
        elif isinstance(value, Tiles):
            types[param.name] = f"tensordesc<{DTYPES[value.dtype]}[{','.join(map(str, value.block))}]>"
        elif isinstance(value, float):
            types[param.name] = "fp32"
        else:
            types[param.name] = "i64" if value >= 1 << 31 else "i32"
            aligned |= {(place,): divisible} if value % 16 == 0 else {}
    options = {name: value for name, value in named.items() if name not in kernel.arg_names}
    options.pop("launch_pdl", None)
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=TARGETS[target][0], options=options)


def machine_code(launch: Launch, target: str, folder: Path) -> tuple[str, str]:
    """Return the instructions, and what the code takes of the card."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled(launch, target).asm["cubin"])
    return tool_output("nvdisasm", "-c", str(path)), tool_output(
        "cuobjdump", "--dump-resource-usage", str(path)
    )


def module_of(launch: Launch) -> str:
    return launch.kernel.fn.__module__.rpartition(".")[2]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target: str) -> None:
    launches = some_of_each(launches_on(target), most=2 if target in OFTEN else 1)
    assert len({launch.kernel for launch in launches}) > 40
    for launch in launches:
        if target == "sm_75" and {module_of(launch), launch.name} & NOT_ON_TURING:
            continue
        shared, large = (
            compiled(launch, target).metadata.shared,
            target[:3] == "gfx" and launch.name in TOO_LARGE,
        )
        assert shared <= TARGETS[target][1] or large, launch.name


@pytest.mark.parametrize("target", [name for name in TARGETS if name[:2] == "sm" and name != "sm_75"])
def test_int8_matmuls_use_the_tensor_cores_without_spills(target: str, tmp_path: Path) -> None:
    launches = launches_on(target, [replace(COMMON[0], kv=())])
    matmul = next(
        each for each in launches if (module_of(each), each.name) == ("int8_kernels", "_matmul_kernel")
    )
    code, resources = machine_code(matmul, target, tmp_path)
    assert re.search(r"\bIGMMA\b" if target == "sm_90" else r"\bIMMA\b", code)
    assert "STACK:0 " in resources


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_the_delta_rule_reads_nothing_that_was_never_written(dim: int, tmp_path: Path) -> None:
    """As heads of 16 dims did in four warps: such a register held the address of an mma operand."""
    launches = launches_on("sm_90", [replace(COMMON[0], delta=(2, 6, dim, 4), types=(), kv=())])
    kernels = [launch for launch in launches if launch.name in ("_prepare_kernel", "_scan_kernel")]
    assert len(kernels) == 2
    for launch in kernels:
        code, _ = machine_code(launch, "sm_90", tmp_path)
        assert "HGMMA" in code and not unwritten_reads(code)


def test_a_read_of_what_was_never_written_is_found() -> None:
    lines = (
        "S2R R2, SR_TID.X",
        "@!P0 IADD3 R5, P2, R2, 0x20, RZ",
        "LOP3.LUT R4, R4, 0xfffffeff, RZ, 0xc0, !PT",
    )
    wrong = "IADD3 R160, P2, R0, 0x20, RZ"
    assert unwritten_reads("".join(f"  /*0010*/  {line} ;\n" for line in lines)) == []
    assert unwritten_reads("".join(f"  /*0010*/  {line} ;\n" for line in (*lines, wrong, wrong))) == [wrong]


def test_prompt_attention_through_descriptors(tmp_path: Path) -> None:
    """With 64 keys at a time, copied by the bulk tensor engine, and mma that need not wait for each other."""
    launches = launches_on("sm_90", [replace(COMMON[0], types=(), kv=COMMON[0].kv[:1])])
    attention = next(launch for launch in launches if launch.name == "_chunk_attention_kernel")
    code, _ = machine_code(attention, "sm_90", tmp_path)
    assert "UTMALDG" in code and code.count("WARPGROUP") < code.count("HGMMA")
