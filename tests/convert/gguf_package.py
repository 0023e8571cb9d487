"""GGUF files as the gguf package reads them, as an independent reference."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def read_keys(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def read_key_types(path: Path) -> dict[str, tuple[str, ...]]:
    fields = gguf.GGUFReader(path).fields
    return {key: tuple(kind.name for kind in field.types) for key, field in fields.items()}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Float32 values by name, in torch's order of dimensions."""
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type)
        tensors[tensor.name] = values.astype(np.float32).reshape([int(n) for n in reversed(tensor.shape)])
    return tensors


def read_types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
