"""Files with weights in a rotated basis, and the same models without it: by a matrix, in float64."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter

PREFIX = "prism.hadamard."
EMBEDDING = "token_embd.weight"
UNROTATED = ("ssm_alpha", "ssm_beta", "conv1d", "cls.")  # as published: the first two in BF16
SCALE_AT = {QuantType.PTQ1_0: 26}  # else first in a block


def hadamard(block: int) -> np.ndarray:
    """Return the normalised matrix: -1 to the power of the ones that both indices have."""
    index = np.arange(block)
    ones = np.array([[bin(i & j).count("1") for j in index] for i in index])
    return (1.0 - 2.0 * (ones % 2)) / np.sqrt(block)


@dataclass
class Basis:
    """The basis of a file's weights."""

    block: int
    heads: tuple[int, int] | None = None  # key heads and value heads of delta layers, whose order is undone
    seed: int = 0
    signs: dict[int, np.ndarray] = field(default_factory=dict)

    def signs_of(self, columns: int) -> np.ndarray:
        random = np.random.default_rng(self.seed + columns)
        return self.signs.setdefault(columns, random.choice([-1.0, 1.0], columns))

    def _grouped(self, name: str, columns: int) -> np.ndarray:
        """Return the column of our tiled heads at each place."""
        if self.heads is None or "ssm_out" not in name:
            return np.arange(columns)
        keys, values = self.heads
        size = columns // values
        heads = [repeat * keys + key for key in range(keys) for repeat in range(values // keys)]
        return np.concatenate([np.arange(head * size, (head + 1) * size) for head in heads])

    def fold(self, name: str, weight: np.ndarray) -> np.ndarray:
        """Return a weight as it is stored."""
        columns = weight.shape[1]
        signed = weight.astype(np.float64)[:, self._grouped(name, columns)] * self.signs_of(columns)
        return (signed.reshape(len(weight), -1, self.block) @ hadamard(self.block)).reshape(weight.shape)

    def unfold(self, name: str, stored: np.ndarray) -> np.ndarray:
        """Return the weight of the unrotated model."""
        columns = stored.shape[1]
        blocks = stored.astype(np.float64).reshape(len(stored), -1, self.block)
        weight = np.empty(stored.shape)
        weight[:, self._grouped(name, columns)] = (blocks @ hadamard(self.block)).reshape(stored.shape)
        signs = np.empty(columns)
        signs[self._grouped(name, columns)] = self.signs_of(columns)
        return weight * signs

    def keys(self, names: list[str]) -> dict[str, Any]:
        widths = sorted(self.signs)
        values = {
            "version": 1,
            "block_size": self.block,
            "transform": "normalized-sylvester-walsh-hadamard",
            "axis": "input-last-dimension",
            "sign_mode": "explicit",
            "weight_names": [name for name in names if name != EMBEDDING],
            "inverse_weight_names": [name for name in names if name == EMBEDDING],
            "sign_widths": widths,
            "sign_values": [int(sign) for width in widths for sign in self.signs[width]],
            "gdn_v_grouped": self.heads is not None,
        }
        return {f"{PREFIX}{key}": value for key, value in values.items() if value != []}


def random_blocks(type: QuantType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return random rows of a type of 1 or 2 bits, of weights of a usual size."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // type.block_elements, type.block_bytes), np.uint8)
    scale = (random.choice([-1, 1], blocks.shape[:2]) * random.uniform(0.01, 0.06, blocks.shape[:2])).astype(
        np.float16
    )
    at = SCALE_AT.get(type, 0)
    blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _rotated(file: GGUFFile, block: int, extra: tuple[str, ...]) -> list[str]:
    return [
        name
        for name, info in file.tensors.items()
        if len(info.shape) == 2
        and info.shape[1] % block == 0
        and not any(part in name for part in (*UNROTATED, *extra))
        and not (name == EMBEDDING and "output.weight" not in file.tensors)
    ]


def _values(file: GGUFFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    return dequantise(torch.from_numpy(file.raw(name).copy()), info.type).double().numpy()


def write_rotated(
    source: Path,
    folder: Path,
    *,
    block: int,
    type: QuantType = QuantType.F32,
    grouped: bool = True,
    without: tuple[str, ...] = (),
) -> tuple[Path, Path]:
    """Write a model with its matrices in a rotated basis, of a type, and the same one unrotated in float32.

    Of other types than F32 the matrices are random. `without`: parts of names that stay as they are.
    """
    with GGUFFile.open(source) as file:
        prefix = f"{file.architecture}.ssm."
        heads = tuple(file.metadata.get(f"{prefix}{key}") for key in ("group_count", "time_step_rank"))
        basis = Basis(block, heads if grouped and all(heads) else None)
        stored, plain = {}, {}
        for seed, name in enumerate(_rotated(file, block, without)):
            rows, columns = file.tensors[name].shape
            if type is QuantType.F32:
                stored[name] = basis.fold(name, _values(file, name)).astype(np.float32)
                values = stored[name]
            else:
                stored[name] = random_blocks(type, rows, columns, seed)
                values = dequantise(torch.from_numpy(stored[name]), type).numpy()
            plain[name] = basis.unfold(name, values).astype(np.float32)
        keys = basis.keys(list(stored))
        rotated = _write(file, folder / f"rotated-{type.name}-{block}.gguf", type, stored, keys)
        return rotated, _write(file, folder / f"plain-{type.name}-{block}.gguf", QuantType.F32, plain, {})


def _write(
    file: GGUFFile, path: Path, type: QuantType, rows: Mapping[str, np.ndarray], keys: Mapping[str, Any]
) -> Path:
    with GGUFWriter(path, file.architecture) as writer:
        for key, value in (*_others(file), *keys.items()):
            writer.add(key, value)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, type if info.name in rows else info.type)
        writer.write_header()
        for name in file.tensors:
            writer.write_tensor(name, rows[name] if name in rows else file.raw(name))
    return path


def _others(file: GGUFFile) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in file.metadata.items() if key != "general.architecture")
