"""The kernels of prompt text: interpreted, in a process of their own, and compiled for every listed card."""

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_are_their_references_in_the_interpreter() -> None:
    script = Path(__file__).parent / "interpreted_prefill.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(script)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
