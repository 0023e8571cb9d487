"""Runs the interpreted kernels in their own process: the interpreter is chosen when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path


def test_cache_kernels_are_their_references_in_the_interpreter() -> None:
    script = Path(__file__).parent / "interpreted_cache.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(script)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
