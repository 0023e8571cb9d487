"""Runs the interpreted kernels, a file in a process of its own: Triton chooses the interpreter at import.

Files in tests/gpu whose tests are marked `interpreted` serve both devices, with sizes of its own for each.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ON_BOTH = [
    path for path in Path(__file__).parents[1].glob("gpu/test_*.py") if "mark.interpreted" in path.read_text()
]
SCRIPTS = sorted([*Path(__file__).parent.glob("interpreted_*.py"), *ON_BOTH])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem.split("_", 1)[1])
def test_kernels_are_their_references_in_the_interpreter(script: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(script)]
    command += ["-m", "interpreted"] if script in ON_BOTH else []
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
