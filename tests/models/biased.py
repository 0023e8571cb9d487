"""Files of models with biases. Imports no transformers: GPU tests use it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from bough.gguf.reader import GGUFFile, TensorInfo
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter

# Every matrix of a supported layer whose bias is computed; all other biases are refused.
TAKEN = {
    *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"),
    *("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ffn_gate_shexp", "ffn_up_shexp"),
}


def part_of(name: str) -> str:
    """Return a tensor's name without its block and suffix."""
    return name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]


def matrices_of(file: GGUFFile) -> dict[str, TensorInfo]:
    """Return the tensors with rows that have no bias yet."""
    return {
        name: info
        for name, info in file.tensors.items()
        if len(info.shape) > 1
        and name.endswith(".weight")
        and name.removesuffix("weight") + "bias" not in file.tensors
    }


def with_vectors(path: Path, out: Path, vectors: Mapping[str, np.ndarray]) -> Path:
    """Write a copy of a GGUF file with more float32 tensors."""
    with GGUFFile.open(path) as file, GGUFWriter(out, file.architecture) as writer:
        for key, value in file.metadata.items():
            if key not in ("general.architecture", "general.alignment"):
                writer.add(key, value)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, info.type)
        for name, vector in vectors.items():
            writer.add_tensor(name, vector.shape, QuantType.F32)
        writer.write_header()
        for name in file.tensors:
            writer.write_tensor(name, file.raw(name))
        for name, vector in vectors.items():
            writer.write_tensor(name, vector)
    return out


def biases_for(path: Path, names: Iterable[str], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random biases for matrices of a file, under their names in it."""
    generator = np.random.default_rng(seed)
    with GGUFFile.open(path) as file:
        sizes = {name: file.tensors[name].shape[:-1] for name in names}
    return {
        f"{name.removesuffix('weight')}bias": 0.3 * generator.standard_normal(size, np.float32)
        for name, size in sizes.items()
    }


def biased_model(path: Path, out: Path, seed: int = 0) -> Path:
    """Write a copy of a model in which every matrix that can have a bias has one."""
    with GGUFFile.open(path) as file:
        names = [name for name in matrices_of(file) if part_of(name) in TAKEN]
    return with_vectors(path, out, biases_for(path, names, seed))
