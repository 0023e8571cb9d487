"""How much memory a model takes once loaded, from its file's header alone. Imports no torch."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bough.gguf.types import TWO_BITS, TWO_BITS_PACKED, tile_type

if TYPE_CHECKING:
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec

_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the weights, of one sequence's recurrent state, and of the KV cache per token."""

    weights: int
    recurrent: int
    kv_per_token: int

    def at(self, context: int) -> dict[str, int]:
        kv = self.kv_per_token * context
        total = self.weights + self.recurrent + kv
        return {"weights": self.weights, "recurrent": self.recurrent, "kv": kv, "total": total}


def on_cpu(file: "GGUFFile", spec: "ModelSpec") -> Footprint:
    """Return the footprint where PyTorch computes: 32 bits a weight, except the rows of the embedding."""
    embedding = file.tensors[_EMBEDDING]
    expanded = sum(info.elements for name, info in file.tensors.items() if not in_mtp_block(name, spec))
    if not spec.tied_head:  # a tied head is an expanded copy beside the stored rows
        expanded -= embedding.elements
    thetas = {layer.rope_theta for layer in spec.attention}
    expanded += (len(thetas) + 2) * (spec.rope_dim // 2)  # frequencies, and axes in 64 bits
    if spec.family.normed_embedding:
        expanded += spec.width  # the weights of a norm that has none
    if spec.experts is not None and not spec.experts.shared_width:
        expanded += spec.width * len(spec.layers)  # zeros, where others have a shared expert's gate
    return _footprint(4 * expanded + embedding.nbytes, spec, 4 * spec.head_dim)


def in_native_code(file: "GGUFFile", spec: "ModelSpec") -> Footprint:
    """Return about the footprint where native CPU code computes: weights as in the file, of 1 bit in 2."""
    extra = sum(
        round(info.elements * (TWO_BITS_PACKED - info.type.bits_per_weight) / 8)
        for name, info in file.tensors.items()
        if info.type in TWO_BITS and not in_mtp_block(name, spec)
    )
    return _footprint(stored(file, spec) + extra, spec, 4 * spec.head_dim)


def on_gpu(file: "GGUFFile", spec: "ModelSpec") -> Footprint:
    """Return about the footprint on a GPU: of types without a kernel in what holds them there."""
    extra = sum(
        round(info.elements * (tile_type(info.type).bits_per_weight - info.type.bits_per_weight) / 8)
        for name, info in file.tensors.items()
        if info.type.bits_per_weight < 16 and name != _EMBEDDING and not in_mtp_block(name, spec)
    )
    return _footprint(stored(file, spec) + extra, spec, 2 * spec.head_dim)


def _footprint(weights: int, spec: "ModelSpec", row: int) -> Footprint:
    return Footprint(weights, spec.recurrent_bytes(), spec.kv_bytes_per_token(row, row))


def stored(file: "GGUFFile", spec: "ModelSpec") -> int:
    """Return the bytes in the file of the weights that are loaded."""
    return sum(info.nbytes for name, info in file.tensors.items() if not in_mtp_block(name, spec))


def in_mtp_block(name: str, spec: "ModelSpec") -> bool:
    """Return whether a tensor belongs to a multi-token prediction block, which proposes tokens."""
    block = re.match(r"blk\.(\d+)\.", name)
    return block is not None and int(block[1]) >= len(spec.layers)
