"""How much memory a model takes once loaded, from its file's header alone. Knows no devices, no torch."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treeflash.gguf.reader import GGUFFile
    from treeflash.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the weights, of one sequence's recurrent state, and of a token's keys and values."""

    weights: int
    recurrent: int
    kv_per_token: int

    def at(self, context: int) -> dict[str, int]:
        kv = self.kv_per_token * context
        total = self.weights + self.recurrent + kv
        return {"weights": self.weights, "recurrent": self.recurrent, "kv": kv, "total": total}


def on_cpu(file: "GGUFFile", spec: "ModelSpec") -> Footprint:
    """Weights expanded to 32 bits, but for the embedding, whose rows stay as they are stored."""
    embedding = file.tensors["token_embd.weight"]
    expanded = sum(info.elements for name, info in file.tensors.items() if not unused(name, spec))
    if not spec.tied_head:  # a tied head is an expanded copy beside the stored rows
        expanded -= embedding.elements
    expanded += spec.rope_dim // 2  # frequencies
    return _footprint(4 * expanded + embedding.nbytes, spec, 4 * spec.head_dim)


def on_gpu(file: "GGUFFile", spec: "ModelSpec") -> Footprint:
    """About: weights take there what they take in the file, or a little more."""
    return _footprint(stored(file, spec), spec, 2 * spec.head_dim)


def _footprint(weights: int, spec: "ModelSpec", row: int) -> Footprint:
    return Footprint(weights, spec.recurrent_bytes(), spec.kv_bytes_per_token(row, row))


def stored(file: "GGUFFile", spec: "ModelSpec") -> int:
    """Bytes in the file of the weights that are used."""
    return sum(info.nbytes for name, info in file.tensors.items() if not unused(name, spec))


def unused(name: str, spec: "ModelSpec") -> bool:
    """Whether a tensor belongs to a prediction block behind the trunk, which is not loaded."""
    block = re.match(r"blk\.(\d+)\.", name)
    return block is not None and int(block[1]) >= len(spec.layers)
