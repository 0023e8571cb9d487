"""Cards for cross-compilation, and tools that inspect their machine code."""

import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from bough.kernels.runtime.device import Card

CARDS = {
    "A100": Card("sm_80", 108, 164 << 10, 163 << 10),
    "RTX 3090": Card("sm_86", 82, 100 << 10, 99 << 10),
    "RTX 4090": Card("sm_89", 128, 100 << 10, 99 << 10),
    "H200": Card("sm_90", 132, 228 << 10, 227 << 10),
    "RTX 5090": Card("sm_120", 170, 100 << 10, 99 << 10),
}


# Targets of Triton, with the bytes of shared memory of one program.
TARGETS = {
    "sm_75": (GPUTarget("cuda", 75, 32), 65536),
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_86": (GPUTarget("cuda", 86, 32), 101376),
    "sm_89": (GPUTarget("cuda", 89, 32), 101376),
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "sm_120": (GPUTarget("cuda", 120, 32), 101376),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), 65536),
}


def tool_output(tool: str, *arguments: str) -> str:
    """Return what one of the tools that come with Triton prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def unwritten_reads(code: str) -> list[str]:
    """Return the instructions of sm_90, as nvdisasm lists them, that read an uninitialised register.

    A register of predicates is filled bit by bit, one of 16-bit numbers half by half, and either may be
    spilled before that: such instructions are allowed.
    """
    written, found = {1}, []
    for line in re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?) ;", code, re.MULTILINE):
        instruction = re.sub(r"^@!?U?P\d ", "", line)
        name, _, rest = instruction.partition(" ")
        operands = [operand.strip() for operand in re.split(r",(?![^\[]*\])", rest)]
        while operands and re.fullmatch(r"U?P[\dT]", operands[0]):
            operands.pop(0)
        target = re.fullmatch(r"R(\d+)", operands[0]) if operands else None
        read = operands[1:] if target else operands
        registers = {int(number) for each in read for number in re.findall(r"(?<![U\w])R(\d+)", each)}
        if registers - written and not name.startswith(("LOP3", "PRMT", "STL")):
            found.append(instruction)
        written |= registers
        if target:
            first = int(target[1])
            written |= set(range(first, first + _results(name)))
    return found


def _results(name: str) -> int:
    """Return the most registers that an instruction writes."""
    mma = re.match(r"HGMMA\.64x(\d+)x", name)
    if mma:
        return int(mma[1]) // 2
    if name.startswith("HMMA") or ".128" in name or ".M88.4" in name:
        return 4
    return 2 if re.search(r"\.64|WIDE|CS2R|M88\.2", name) else 1
