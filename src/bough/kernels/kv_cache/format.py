"""The storage of the KV cache: formats, planes, and pools of them.

A row is one token's head: D values. Quantised, it is `codes`, small integers in planes of bits, and `scales`,
one float16 for each `group` values. A plane of p bits a value takes D * p / 8 bytes; value e is in its byte
e % bytes, p * (e // bytes) bits from the right: neighbours in a row are neighbours in the plane.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # values that any quantised row must be a multiple of


@dataclass(frozen=True, slots=True)
class KVFormat:
    name: str
    dtype: torch.dtype | None = None  # of values that are not quantised; None: quantised
    planes: tuple[int, ...] = ()  # bits a value in each plane of codes, the low bits first
    group: int = BLOCK  # values that share a scale

    @property
    def quantised(self) -> bool:
        return self.dtype is None

    @property
    def lossy(self) -> bool:
        """Below 8 bits a value: output may differ from that of an unquantised KV cache."""
        return self.quantised and sum(self.planes) < 8

    def code_bytes(self, dim: int) -> int:
        return dim * (sum(self.planes) if self.dtype is None else 8 * self.dtype.itemsize) // 8

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of a row, including scales."""
        return self.code_bytes(dim) + (2 * self.scale_count(dim) if self.quantised else 0)

    def scale_count(self, dim: int) -> int:
        return -(-dim // self.group)


FORMATS = {
    format.name: format
    for format in (
        KVFormat("f32", torch.float32),
        KVFormat("f16", torch.float16),
        KVFormat("bf16", torch.bfloat16),
        KVFormat("q8_0", planes=(8,)),
        KVFormat("q5_0", planes=(4, 1)),
        KVFormat("q4_0", planes=(4,)),
        # The norm of a group is stored once, where ggml's blocks repeat it four times: 3.125 bits, not 3.5.
        KVFormat("tq3_0", planes=(2, 1), group=128),
    )
}


def approximations(keys: KVFormat, values: KVFormat, window: int | None) -> tuple[str, ...]:
    """Return what makes output differ from that of full attention over an 8-bit KV cache, in words."""
    same = keys == values
    sides = [("keys and values", keys)] if same else [("keys", keys), ("values", values)]
    reasons = [f"{side} in {format.name}" for side, format in sides if format.lossy]
    return (*reasons, *([] if window is None else [f"a window of {window:,} tokens"]))


@dataclass(frozen=True, slots=True)
class HeadPool:
    """K or V in pages: [..., pages, KV heads, tokens of a page, row]."""

    format: KVFormat
    dim: int  # values of a row
    codes: Tensor  # uint8 [..., code_bytes], or floats [..., dim]
    scales: Tensor | None  # float16 [..., scale_count]; None: floats

    @classmethod
    def empty(cls, format: KVFormat, shape: tuple[int, ...], dim: int, device: torch.device) -> "HeadPool":
        """Return a pool of zeros: unwritten pages hold finite numbers. `shape`: all but the row."""
        if format.dtype is not None:
            return cls(format, dim, torch.zeros(*shape, dim, dtype=format.dtype, device=device), None)
        codes = torch.zeros(*shape, format.code_bytes(dim), dtype=torch.uint8, device=device)
        scales = torch.zeros(*shape, format.scale_count(dim), dtype=torch.float16, device=device)
        return cls(format, dim, codes, scales)

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """All tensors of the pool; the axes before the last are the same in each."""
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    @property
    def page(self) -> int:
        return self.codes.shape[-2]

    def __getitem__(self, index: int) -> "HeadPool":
        """Index the first axis: return one layer of a pool of all layers."""
        return self.map(lambda plane: plane[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> "HeadPool":
        """Return a pool with `function` applied to each plane; it must keep rows."""
        scales = None if self.scales is None else function(self.scales)
        return HeadPool(self.format, self.dim, function(self.codes), scales)


@dataclass(frozen=True, slots=True)
class KVRing:
    """A draft layer's K and V of some slots: position p is at p modulo the ring."""

    keys: Tensor  # [slots, ring, KV, D]
    values: Tensor
    slots: Tensor  # [B]
    lengths: Tensor  # [slots]: the ring holds the newest of positions starts to lengths - 1
    starts: Tensor  # [slots]
