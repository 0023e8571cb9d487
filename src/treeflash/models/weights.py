"""Reads a GGUF file's tensors onto a device as the layers want them; knows names and shapes, not meanings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treeflash.errors import UnsupportedModel
from treeflash.gguf.quants import dequantise
from treeflash.gguf.reader import TensorInfo
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import dense_matmul, quant_matmul

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [N, K], expanded to floats, or as packed rows [N, row bytes] of a quantised type."""

    data: Tensor
    type: QuantType | None  # None: expanded

    def __call__(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """x [..., K] float32 to [..., N] float32; not rounded to the weights' type on the way if `exact`."""
        if self.type is not None:
            return quant_matmul(x, self.data, self.type)
        return dense_matmul(x, self.data, exact=exact).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Projections:
    """Several matrices that read the same input, with biases; one product where they are expanded."""

    matrices: tuple[Matrix, ...]
    sizes: tuple[int, ...]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if len(self.matrices) == 1:
            out = self.matrices[0](x)
        else:
            out = torch.cat([matrix(x) for matrix in self.matrices], -1)
        if self.bias is not None:
            out = out + self.bias
        return out.split(self.sizes, -1)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows stay packed: a step needs a handful of them."""

    data: Tensor  # [V, row bytes]
    type: QuantType

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [...] to [..., K] float32."""
        return dequantise(self.data[tokens], self.type)


class TensorSource(Protocol):
    """A file of named tensors, as bytes; GGUF, or safetensors made to look like it."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo: ...

    def raw(self, name: str) -> np.ndarray: ...


class WeightLoader:
    """Hands out tensors by name, checking shapes; counts the bytes it has read."""

    def __init__(
        self,
        file: TensorSource,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        expand: bool = True,
        progress: Progress | None = None,
    ):
        self._file = file
        self._device = device
        self._expand = expand
        # Packed weights meet their inputs as they are, in float32.
        self.dtype = dtype if expand else torch.float32
        self._progress = progress
        self._done = 0
        self._read: set[str] = set()
        self._total = sum(info.nbytes for info in file.tensors.values())

    def unread(self) -> list[str]:
        """Tensors of the file that nobody asked for."""
        return [name for name in self._file.tensors if name not in self._read]

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def vector(self, name: str, *shape: int) -> Tensor:
        """A small tensor as float32, in the given shape; some writers put a 1 before it."""
        info = self._file.require_tensor(name)
        if info.shape != (1, *shape):
            self._file.require_tensor(name, shape)
        return dequantise(self._packed(name), info.type).reshape(shape)

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        bias = name.removesuffix("weight") + "bias"
        if self.has(bias):
            raise UnsupportedModel(f"tensor {bias}: a bias here is not part of any supported model")
        return self.projections([name], [rows], columns).matrices[0]

    def projections(self, names: Sequence[str], sizes: Sequence[int], columns: int) -> Projections:
        """Matrices [size, columns] by name; where the file has a .bias beside a .weight, it is added."""
        types = [
            self._file.require_tensor(name, (rows, columns)).type
            for name, rows in zip(names, sizes, strict=True)
        ]
        if self._expand:
            data = torch.empty(sum(sizes), columns, dtype=self.dtype, device=self._device)
            for part, name, type in zip(data.split(list(sizes)), names, types, strict=True):
                self._expand_into(part, self._packed(name), type)
            matrices = (Matrix(data, None),)
        else:
            matrices = tuple(
                Matrix(self._packed(name), type) for name, type in zip(names, types, strict=True)
            )
        return Projections(matrices, tuple(sizes), self._biases(names, sizes))

    def experts(self, name: str, count: int, rows: int, columns: int) -> tuple[Matrix, ...]:
        """A stack [count, rows, columns] as one matrix an expert."""
        info = self._file.require_tensor(name, (count, rows, columns))
        packed = self._packed(name)
        if not self._expand:
            return tuple(Matrix(part, info.type) for part in packed)
        data = torch.empty(count, rows, columns, dtype=self.dtype, device=self._device)
        for part, source in zip(data, packed, strict=True):
            self._expand_into(part, source, info.type)
        return tuple(Matrix(part, None) for part in data)

    def embedding(self, name: str, rows: int, columns: int) -> Embedding:
        info = self._file.require_tensor(name, (rows, columns))
        return Embedding(self._packed(name), info.type)

    def _packed(self, name: str) -> Tensor:
        # A copy of the mapped bytes: the file may be on a slow disk, or replaced while we run.
        data = torch.from_numpy(self._file.raw(name).copy()).to(self._device)
        self._read.add(name)
        self._done += self._file.tensors[name].nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
        return data

    def _expand_into(self, out: Tensor, packed: Tensor, type: QuantType) -> None:
        rows = max(1, (1 << 22) // out.shape[-1])
        for target, source in zip(out.split(rows), packed.split(rows), strict=True):
            target.copy_(dequantise(source, type))

    def _biases(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor | None:
        found = [name.removesuffix("weight") + "bias" for name in names]
        if not any(self.has(name) for name in found):
            return None
        return torch.cat(
            [
                self.vector(name, rows) if self.has(name) else torch.zeros(rows, device=self._device)
                for name, rows in zip(found, sizes, strict=True)
            ]
        )
