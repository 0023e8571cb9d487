"""Embedding rows; the kernel runs in its own process: Triton chooses the interpreter at import."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels.embedding import embed
from tests.kernels.test_quant_matmul_layout import random_blocks


def test_the_kernel_is_its_reference_in_the_interpreter() -> None:
    script = Path(__file__).parent / "interpreted_embedding.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(script)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]


def test_any_shape_of_tokens() -> None:
    data = random_blocks(QuantType.Q4_0, 5, 64)
    tokens = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(embed(data, QuantType.Q4_0, tokens)[1, 0], dequantise(data[1:2], QuantType.Q4_0)[0])
