"""Triton fuses multiply-adds because the package says so, whatever its own or the user's default is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bough.startup import FUSION

SCRIPT = Path(__file__).with_name("fused_kernel.py")


def compiled(**environment: str) -> tuple[str, str]:
    """Return how many fused multiply-adds the kernel has, as a program on its own, and what it warns of."""
    removed = ("TRITON_INTERPRET", *FUSION)
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    command = [sys.executable, "-W", "always", str(SCRIPT)]
    done = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, timeout=280, check=True
    )
    return done.stdout.strip(), done.stderr


OFF = {"TRITON_DEFAULT_FP_FUSION": "0", "TRITON_FORCE_DISABLE_FP_FUSION": "1"}


@pytest.mark.parametrize("theirs", [{}, OFF], ids=["unset", "switched off"])
def test_kernels_fuse_multiply_adds_whatever_the_default(theirs: dict[str, str], tmp_path: Path) -> None:
    fused, warned = compiled(TRITON_CACHE_DIR=str(tmp_path), **theirs)
    assert fused == "by default 1, without fusion 0"
    assert "FP_FUSION" not in warned
