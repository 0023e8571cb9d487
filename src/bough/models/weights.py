"""Loads a file's tensors to a device in the form that layers use."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.errors import ModelFileError, UnsupportedModel
from bough.gguf.quants import dequantise
from bough.gguf.reader import TensorInfo
from bough.gguf.types import QuantType
from bough.kernels.embedding import embed
from bough.kernels.experts import ExpertStack, padded
from bough.kernels.gather_rows import gather_rows
from bough.kernels.quant_matmul import (
    Layout,
    PackedRows,
    PackedWeight,
    Unfinished,
    dense_matmul,
    first_rows,
    has_layout,
    pack,
    packed_matmuls,
    partial_matmul,
    quant_matmul,
    row_scaled_matmul,
    supports_partial_sums,
    supports_row_scales,
    with_int8,
)
from bough.models.staging import StagedReader

Progress = Callable[[int, int], None]  # bytes done, bytes in all
# Smaller matrices stay in 16 bits for int8 prefill: they cost little time, and two of them, a delta layer's
# alpha and beta, decide how long its state lasts.
INT8_MIN_ROWS = 256


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [N, K]: expanded to floats, as packed rows [N, row bytes] of a quantised type, or in tiles."""

    data: Tensor | PackedWeight
    type: QuantType | None  # None: expanded, or in tiles

    def __call__(self, x: Tensor | PackedRows, *, exact: bool = False, into: Tensor | None = None) -> Tensor:
        """Return x [..., K] float32 times the weight, transposed: [..., N] float32.

        `exact`: the result is not rounded to the weights' type. A matrix in tiles also takes packed rows
        [M, K] and returns [M, N]. `into` [rows, N]: the result is in its first rows.
        """
        if into is not None:
            rows = x.rows if isinstance(x, PackedRows) else x.numel() // x.shape[-1]
            if isinstance(self.data, PackedWeight) and isinstance(x, PackedRows):
                return packed_matmuls(x, [self.data], into[:rows])
            return into[:rows].copy_(self(x, exact=exact).flatten(0, -2))
        if isinstance(self.data, PackedWeight):
            return _tiled_matmuls(x, [self.data])
        assert isinstance(x, Tensor), "packed rows for a matrix that is not in tiles"
        if self.type is not None:
            return quant_matmul(x, self.data, self.type)
        return dense_matmul(x, self.data, exact=exact).to(x.dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [..., K] float32 of a matrix that is not in tiles."""
        assert isinstance(self.data, Tensor), "tiles are not read by row"
        if self.type is None:
            return self.data[indices].float()
        return embed(self.data, self.type, indices)

    def first_rows(self, rows: int) -> "Matrix":
        """Return the first rows as a matrix: a copy of tiles, else a view."""
        if isinstance(self.data, PackedWeight):
            return Matrix(first_rows(self.data, rows), None)
        return Matrix(self.data[:rows], self.type)

    def partial_sums(self, x: Tensor | PackedRows) -> Tensor | Unfinished:
        """Return the same for a kernel with a fused reduction or scaling: unfinished where possible."""
        data = self.data
        if isinstance(x, PackedRows) and isinstance(data, PackedWeight):
            if supports_partial_sums(x, data):
                return partial_matmul(x, data)
            if supports_row_scales(x, data):
                return row_scaled_matmul(x, data)
        return self(x)


@dataclass(frozen=True, slots=True)
class Projections:
    """Several matrices that read the same input, with biases: one matmul if expanded, one for each run of
    equal types if in tiles."""

    matrices: tuple[Matrix, ...]
    sizes: tuple[int, ...]
    bias: Tensor | None

    def __call__(self, x: Tensor | PackedRows) -> tuple[Tensor, ...]:
        if len(self.matrices) == 1:
            out = self.matrices[0](x)
        elif tiles := [matrix.data for matrix in self.matrices if isinstance(matrix.data, PackedWeight)]:
            out = _tiled_matmuls(x, tiles)
        else:
            out = torch.cat([matrix(x) for matrix in self.matrices], -1)
        if self.bias is not None:
            out = out + self.bias
        return out.split(self.sizes, -1)

    def partial_sums(self, x: Tensor | PackedRows) -> Sequence[Tensor | Unfinished]:
        """Return the same as `Matrix.partial_sums`, if all of them are one matrix."""
        if len(self.matrices) > 1 or self.bias is not None or any(size % 4 for size in self.sizes):
            return self(x)
        out = self.matrices[0].partial_sums(x)
        return out.split(self.sizes) if isinstance(out, Unfinished) else out.split(self.sizes, -1)


def project_all(x: Tensor | PackedRows, projections: Sequence[Projections]) -> list[tuple[Tensor, ...]]:
    """Return the projections of the same x; matmuls with tiles overlap."""
    tiles = [matrix.data for group in projections for matrix in group.matrices]
    packed = [data for data in tiles if isinstance(data, PackedWeight)]
    if len(packed) < len(tiles) or any(group.bias is not None for group in projections):
        return [group(x) for group in projections]
    out = _tiled_matmuls(x, packed).split([sum(group.sizes) for group in projections], -1)
    return [part.split(group.sizes, -1) for part, group in zip(out, projections, strict=True)]


def _tiled_matmuls(x: Tensor | PackedRows, weights: Sequence[PackedWeight]) -> Tensor:
    """Return x [..., K] times matrices in tiles, concatenated: [..., total N]; packed rows: [M, total N]."""
    if isinstance(x, PackedRows):
        return packed_matmuls(x, weights)
    return packed_matmuls(x.reshape(-1, x.shape[-1]), weights).unflatten(0, x.shape[:-1])


@dataclass(frozen=True, slots=True)
class Embedding:
    """A table that stays quantised: a step needs few rows, which a GPU can read from the host's memory."""

    data: Tensor  # [V, row bytes]; pinned where it is not on the tokens' device
    type: QuantType

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., K] float32 of tokens [...]."""
        data = self.data
        if data.device != tokens.device:
            # Quantised rows are copied, and dequantised on the device.
            data = gather_rows(data, tokens.flatten().contiguous())
            tokens = torch.arange(len(data), device=data.device).view(tokens.shape)
        return embed(data, self.type, tokens)


class TensorSource(Protocol):
    """A file of named tensors, as bytes: GGUF, or safetensors with GGUF's names."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo: ...

    def raw(self, name: str) -> np.ndarray: ...

    def release(self, name: str) -> None:
        """Give back the memory that reading a tensor took."""
        ...


class WeightLoader:
    """Loads tensors by name, checks their shapes and counts the bytes read.

    On a GPU matrices become tiles, also with `expand`: nothing is faster there, nor smaller.
    """

    def __init__(
        self,
        file: TensorSource,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        expand: bool = True,
        tiles: bool | None = None,
        space: int | None = None,
        host_embedding: bool = False,
        host_experts: int = 0,
        int8_prefill: bool = False,
        staged: StagedReader | None = None,
        progress: Progress | None = None,
    ):
        """`tiles`: as on a GPU; None: if it is one. `space`: bytes of all tiles, in one allocation then,
        since an allocator rounds each piece up. `host_embedding`: its rows stay in pinned memory.
        `host_experts`: the routed experts of that many first layers do, in tiles. `int8_prefill`: the large
        matrices of layers, without routed experts, are multiplied in int8 for prompts. `staged`: reads the
        tensors ahead.
        """
        self._file = file
        self._device = device
        self._tiles = device.type == "cuda" if tiles is None else tiles
        self._space = None if space is None else torch.empty(space, dtype=torch.uint8, device=device)
        self._host_embedding, self._host_experts = host_embedding, host_experts
        self.int8_prefill = int8_prefill
        self._staged = staged
        self._expand = expand and not self._tiles
        # Quantised weights are multiplied with float32 inputs.
        self.dtype = dtype if self._expand else torch.float32
        self.layouts: set[Layout] = set()  # of the tiles made so far, without experts
        self.widened: dict[
            QuantType, int
        ] = {}  # bytes added to types without a tile layout, stored as float16
        self._progress = progress
        self._done = 0
        self.names: list[str] = []  # of the tensors loaded so far, in order
        self._total = sum(info.nbytes for info in file.tensors.values())

    def unread(self) -> list[str]:
        """Return the tensors of the file that were not loaded."""
        read = set(self.names)
        return [name for name in self._file.tensors if name not in read]

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def vector(self, name: str, *shape: int) -> Tensor:
        """Return a small tensor as float32, in the given shape; some writers put a 1 before it."""
        info = self._require_vector(name, shape)
        return dequantise(self._packed(name), info.type).reshape(shape)

    def token_ids(self, name: str, count: int, *, below: int) -> Tensor:
        """Return a table of different token ids [count] int64, each below a limit."""
        self._require_ids(name, count)
        ids = self._packed(name).view(torch.int64)
        low, high, different = int(ids.min()), int(ids.max()), len(ids.unique())
        if low < 0 or high >= below or different < count:
            raise ModelFileError(
                f"tensor {name} holds {different} token ids from {low} to {high}, "
                f"needed {count} from 0 to {below - 1}"
            )
        return ids

    def token_places(self, name: str, count: int, *, below: int) -> Tensor:
        """Return the place [below] int64 of each token id in such a table; 0 for those that it lacks."""
        ids = self.token_ids(name, count, below=below)
        places = torch.zeros(below, dtype=torch.int64, device=ids.device)
        return places.index_copy_(0, ids, torch.arange(count, device=ids.device))

    def _require_ids(self, name: str, count: int) -> None:
        info = self._file.require_tensor(name, (count,))
        if info.type is not QuantType.I64:
            raise UnsupportedModel(f"tensor {name} is of type {info.type.name}, needed I64")

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        bias = name.removesuffix("weight") + "bias"
        if self.has(bias):
            raise UnsupportedModel(f"tensor {bias}: a bias here is not part of any supported model")
        return self.projections([name], [rows], columns).matrices[0]

    def projections(self, names: Sequence[str], sizes: Sequence[int], columns: int) -> Projections:
        """Return matrices [size, columns] by name, with the .bias of each .weight if the file has one."""
        types = [
            self._loaded_type(self._file.require_tensor(name, (rows, columns)))
            for name, rows in zip(names, sizes, strict=True)
        ]
        if self._expand:
            data = torch.empty(sum(sizes), columns, dtype=self.dtype, device=self._device)
            for part, name, type in zip(data.split(list(sizes)), names, types, strict=True):
                self._expand_into(part, self._weight(name), type)
            matrices = (Matrix(data, None),)
        elif self._tiles:
            matrices = tuple(self._tile_runs(names, types))
        else:
            matrices = tuple(
                Matrix(self._weight(name), type) for name, type in zip(names, types, strict=True)
            )
        return Projections(matrices, tuple(sizes), self._biases(names, sizes))

    def experts(
        self, names: Sequence[str], count: int, rows: int, columns: int
    ) -> tuple[ExpertStack, ...] | tuple[tuple[Matrix, ...], ...]:
        """Return the stacks [count, rows, columns] that read the same input.

        In tiles as one stack for each run of equal types, its rows joined; else the matrices of each name.
        """
        shape = (count, rows, columns)
        types = [self._loaded_type(self._file.require_tensor(name, shape)) for name in names]
        if self._tiles:
            runs = groupby(zip(names, types, strict=True), key=lambda pair: pair[1])
            return tuple(self._tile_stack([name for name, _ in run], type, rows) for type, run in runs)
        return tuple(self._matrices(name, type) for name, type in zip(names, types, strict=True))

    def _matrices(self, name: str, type: QuantType) -> tuple[Matrix, ...]:
        packed = self._weight(name)
        if not self._expand:
            return tuple(Matrix(part, type) for part in packed)
        shape = self._file.tensors[name].shape
        data = torch.empty(shape, dtype=self.dtype, device=self._device)
        for part, source in zip(data, packed, strict=True):
            self._expand_into(part, source, type)
        return tuple(Matrix(part, None) for part in data)

    def _tile_stack(self, names: Sequence[str], type: QuantType, rows: int) -> ExpertStack:
        parts = [self._weight(name) for name in names]
        whole = len(parts) * rows
        stacked = self._stacked(parts, padded(whole) - whole)
        if int(names[0].split(".")[1]) < self._host_experts:
            return ExpertStack.of(self._host_tiles(stacked, type), len(parts[0]), whole)
        matrix = self._tile(stacked, type, layouts=False)
        assert isinstance(matrix.data, PackedWeight)
        return ExpertStack.of(matrix.data, len(parts[0]), whole)

    def _host_tiles(self, packed: Tensor, type: QuantType) -> PackedWeight:
        """Return tiles in host memory, pinned so that a GPU can read them; their row scales on the device."""
        weight = pack(packed, type)
        data = weight.data.cpu()
        return replace(weight, data=data.pin_memory() if self._device.type == "cuda" else data)

    def _stacked(self, parts: list[Tensor], missing: int) -> Tensor:
        """Return stacks [E, N, row bytes] as rows, each expert's together, filled up by `missing` ones."""
        return pad(torch.cat(parts, 1), (0, 0, 0, missing)).flatten(0, 1)

    def embedding(self, name: str, rows: int, columns: int) -> Embedding:
        info = self._file.require_tensor(name, (rows, columns))
        return Embedding(self._weight(name, pinned=self._host_embedding), self._loaded_type(info))

    def _require_vector(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.require_tensor(name)
        return info if info.shape == (1, *shape) else self._file.require_tensor(name, shape)

    def _loaded_type(self, info: TensorInfo) -> QuantType:
        """Return the type in which a matrix is held: NVFP4 becomes floats."""
        if info.type is not QuantType.NVFP4:
            return info.type
        return QuantType.F32 if self._expand else QuantType.F16

    def _weight(self, name: str, *, pinned: bool = False) -> Tensor:
        """Return the rows of a matrix in its loaded type: of NVFP4, times the scale beside it."""
        info, packed = self._file.tensors[name], self._packed(name, pinned=pinned)
        if info.type is not QuantType.NVFP4:
            return packed
        lead = info.shape[:-2]  # experts have a scale each
        scales = {}
        for kind in ("scale", "input_scale"):  # the second is for activations in four bits
            companion = f"{name.removesuffix('weight')}{kind}"
            if self.has(companion):
                scales[kind] = self.vector(companion, *(lead or (1,)))
        return self._floats(packed, scales.get("scale"), self._loaded_type(info))

    def _floats(self, packed: Tensor, scale: Tensor | None, type: QuantType) -> Tensor:
        """Return NVFP4 rows as the bytes of floats, times `scale`: one number, or one for each expert."""
        values = dequantise(packed, QuantType.NVFP4)
        if scale is not None:
            values *= scale.to(values.device).view(-1, *[1] * (values.ndim - 1))
        return values.to(torch.float32 if type is QuantType.F32 else torch.float16).view(torch.uint8)

    def _packed(self, name: str, *, pinned: bool = False) -> Tensor:
        info = self._file.tensors[name]
        if self._staged is not None:
            device = torch.device("cpu") if pinned else self._device
            shape = (*info.shape[:-1], info.row_bytes)
            data = torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
            self._staged.take(name, data)
        else:
            # A copy of the mapped bytes: the file may be on a slow disk, or replaced while we run.
            data = torch.from_numpy(self._file.raw(name).copy())
            data = data.pin_memory() if pinned else data.to(self._device)
        self._count(name)
        return data

    def _count(self, name: str) -> None:
        """Note that a tensor was read."""
        self.names.append(name)
        self._done += self._file.tensors[name].nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def _tile_runs(self, names: Sequence[str], types: Sequence[QuantType]) -> Iterator[Matrix]:
        """Yield neighbours of one type as one matrix: fewer and larger launches."""
        for type, run in groupby(zip(names, types, strict=True), key=lambda pair: pair[1]):
            joined = [name for name, _ in run]
            matrix = self._tile(self._joined([self._weight(name) for name in joined]), type)
            assert isinstance(matrix.data, PackedWeight)
            yield Matrix(with_int8(matrix.data, self._int8_rows(joined)), None)

    def _int8_rows(self, names: Sequence[str]) -> int:
        """Return how many of the first rows of joined matrices are multiplied in int8 for prompts."""
        if not self.int8_prefill or not names[0].startswith("blk."):
            return 0  # the head reads a prompt's last row
        sizes = (self._file.tensors[name].shape[0] for name in names)
        return sum(takewhile(lambda rows: rows >= INT8_MIN_ROWS, sizes))

    def _tile(self, packed: Tensor, type: QuantType, *, layouts: bool = True) -> Matrix:
        weight = pack(packed, type, self._space)
        if self._space is not None:
            self._space = self._space[weight.nbytes :]
        if layouts:
            self.layouts.add(weight.layout)
        if not has_layout(type) and type.bits_per_weight < 16:
            self.widened[type] = self.widened.get(type, 0) + weight.nbytes - packed.numel()
        return Matrix(weight, None)

    def _expand_into(self, out: Tensor, packed: Tensor, type: QuantType) -> None:
        rows = max(1, (1 << 22) // out.shape[-1])
        for target, source in zip(out.split(rows), packed.split(rows), strict=True):
            target.copy_(dequantise(source, type))

    def _biases(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor | None:
        bias_names = [name.removesuffix("weight") + "bias" for name in names]
        if not any(self.has(name) for name in bias_names):
            return None
        return self._joined(
            [
                self.vector(name, rows) if self.has(name) else torch.zeros(rows, device=self._device)
                for name, rows in zip(bias_names, sizes, strict=True)
            ]
        )

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if len(parts) > 1 else parts[0]
