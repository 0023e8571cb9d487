"""Cards that are not here, and the tools that look at machine code for them."""

import subprocess
from pathlib import Path

import triton

from treeflash.kernels.quant_matmul.cuda import Card

CARDS = {
    "A100": Card("sm_80", 108, 164 << 10, 163 << 10),
    "RTX 3090": Card("sm_86", 82, 100 << 10, 99 << 10),
    "RTX 4090": Card("sm_89", 128, 100 << 10, 99 << 10),
    "H200": Card("sm_90", 132, 228 << 10, 227 << 10),
    "RTX 5090": Card("sm_120", 170, 100 << 10, 99 << 10),
}


def told(tool: str, *arguments: str) -> str:
    """What one of the tools that come with Triton prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
