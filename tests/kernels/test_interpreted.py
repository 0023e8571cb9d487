"""Runs the interpreted kernels, a file in a process of its own: Triton chooses the interpreter at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem.removeprefix("interpreted_"))
def test_kernels_are_their_references_in_the_interpreter(script: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(script)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
