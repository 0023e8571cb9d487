"""Loads a file's tensors to a device in the form that layers use."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.errors import ModelFileError, UnsupportedModel
from bough.gguf.quants import dequantise, to_q4_0
from bough.gguf.reader import TensorInfo
from bough.gguf.rotation import KeyedTensors, rotation_of
from bough.gguf.types import TWO_BITS, QuantType, tile_type
from bough.kernels.embedding import embed, gather_rows
from bough.kernels.experts import ExpertStack, padded, stack_shape
from bough.kernels.hadamard import BlockRotation
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
from bough.models.pinned import pinned_memory
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
    rotation: BlockRotation | None = None  # it is stored in this basis, and so never takes packed rows

    def __call__(self, x: Tensor | PackedRows, *, exact: bool = False, into: Tensor | None = None) -> Tensor:
        """Return x [..., K] float32 times the weight, transposed: [..., N] float32.

        `exact`: the result is not rounded to the weights' type. A matrix in tiles also takes packed rows
        [M, K] and returns [M, N]. `into` [rows, N]: the result is in its first rows.
        """
        if self.rotation is not None:
            return self.unrotated(_rotated(x, self.rotation), exact=exact, into=into)
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

    def unrotated(self, x: Tensor | PackedRows, **options: Any) -> Tensor:
        """Return the same of x that is in the weight's basis."""
        return replace(self, rotation=None)(x, **options)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [..., K] float32 of a matrix that is not in tiles."""
        assert isinstance(self.data, Tensor), "tiles are not read by row"
        rows = self.data[indices].float() if self.type is None else embed(self.data, self.type, indices)
        return rows if self.rotation is None else self.rotation.restored(rows)

    def first_rows(self, rows: int) -> "Matrix":
        """Return the first rows as a matrix: a copy of tiles, else a view."""
        if isinstance(self.data, PackedWeight):
            return replace(self, data=first_rows(self.data, rows))
        return replace(self, data=self.data[:rows])

    def partial_sums(self, x: Tensor | PackedRows) -> Tensor | Unfinished:
        """Return the same for a kernel with a fused reduction or scaling: unfinished where possible."""
        data = self.data
        if isinstance(x, PackedRows) and isinstance(data, PackedWeight) and self.rotation is None:
            if supports_partial_sums(x, data):
                return partial_matmul(x, data)
            if supports_row_scales(x, data):
                return row_scaled_matmul(x, data)
        return self(x)


@dataclass(frozen=True, slots=True)
class Projections:
    """Several matrices that read the same input, with biases: one matmul if expanded, one for each run of
    equal types if in tiles. All rotated ones are in the same basis."""

    matrices: tuple[Matrix, ...]
    sizes: tuple[int, ...]
    bias: Tensor | None

    def __call__(self, x: Tensor | PackedRows) -> tuple[Tensor, ...]:
        rotation = self.rotation
        if len(self.matrices) == 1:
            out = self.matrices[0](x)
        elif rotation is not None:
            basis = _rotated(x, rotation)
            parts = [matrix.unrotated(x if matrix.rotation is None else basis) for matrix in self.matrices]
            out = torch.cat(parts, -1)
        elif tiles := [matrix.data for matrix in self.matrices if isinstance(matrix.data, PackedWeight)]:
            out = _tiled_matmuls(x, tiles)
        else:
            out = torch.cat([matrix(x) for matrix in self.matrices], -1)
        if self.bias is not None:
            out = out + self.bias
        return out.split(self.sizes, -1)

    @property
    def rotation(self) -> BlockRotation | None:
        """Return the basis of those matrices that are rotated."""
        return next((matrix.rotation for matrix in self.matrices if matrix.rotation is not None), None)

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
    if len(packed) < len(tiles) or any(group.bias is not None or group.rotation for group in projections):
        return [group(x) for group in projections]
    out = _tiled_matmuls(x, packed).split([sum(group.sizes) for group in projections], -1)
    return [part.split(group.sizes, -1) for part, group in zip(out, projections, strict=True)]


def _rotated(x: Tensor | PackedRows, rotation: BlockRotation) -> Tensor:
    assert isinstance(x, Tensor), "packed rows for a matrix in another basis"
    return rotation(x)


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
    rotation: BlockRotation | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., K] float32 of tokens [...]."""
        data = self.data
        if data.device != tokens.device:
            # Quantised rows are copied, and dequantised on the device.
            data = gather_rows(data, tokens.flatten().contiguous())
            tokens = torch.arange(len(data), device=data.device).view(tokens.shape)
        rows = embed(data, self.type, tokens)
        return rows if self.rotation is None else self.rotation.restored(rows)


class TensorSource(KeyedTensors, Protocol):
    """A file of named tensors, as bytes: GGUF, or safetensors with GGUF's names."""

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo: ...

    def raw(self, name: str) -> np.ndarray: ...

    def release(self, name: str) -> None:
        """Give back the memory that reading a tensor took."""
        ...


class RotatedBases:
    """The bases of a file's rotated weights, on a device."""

    def __init__(self, file: TensorSource, device: torch.device):
        self._weights, self._tensors, self._device = rotation_of(file), file.tensors, device
        # By columns, and whether they are reordered.
        self._bases: dict[tuple[int, bool], BlockRotation] = {}

    def __call__(self, name: str) -> BlockRotation | None:
        """Return the basis of a matrix's columns, None if it is the usual one."""
        columns = self._tensors[name].shape[-1]
        signs = None if self._weights is None else self._weights.signs_of(name, columns)
        if self._weights is None or signs is None:
            return None
        order = self._weights.order_of(name)
        key = (columns, order is not None)
        if key not in self._bases:
            columns_read = None if order is None else torch.tensor(order, device=self._device)
            self._bases[key] = BlockRotation(
                torch.tensor(signs, device=self._device), columns_read, self._weights.block
            )
        return self._bases[key]


def _note_growth(widened: dict[QuantType, int], infos: Sequence[TensorInfo], nbytes: int) -> None:
    """Count what matrices in tiles take more than in the file, where no kernel knows their types."""
    elements = sum(info.elements for info in infos)
    for info in infos:
        if not has_layout(info.type) and info.type.bits_per_weight < 16:
            extra = nbytes * info.elements // elements - info.nbytes
            widened[info.type] = widened.get(info.type, 0) + extra


def _int8_rows(infos: Sequence[TensorInfo]) -> int:
    """Return how many of the first rows of joined matrices are multiplied in int8 for prompts."""
    if not infos[0].name.startswith("blk."):
        return 0  # the head reads a prompt's last row
    sizes = (info.shape[0] for info in infos)
    return sum(takewhile(lambda rows: rows >= INT8_MIN_ROWS, sizes))


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
        expert_slots: int | None = None,
        int8_prefill: bool = False,
        staged: StagedReader | None = None,
        progress: Progress | None = None,
    ):
        """`tiles`: as on a GPU; None: if it is one. `space`: bytes of all tiles, in one allocation then,
        since an allocator rounds each piece up. `host_embedding`: its rows stay in pinned memory.
        `expert_slots`: routed experts do, in tiles, and so many of each layer have a place on the device.
        `int8_prefill`: the large matrices of layers, without routed experts, are multiplied in int8 for
        prompts. `staged`: reads the tensors ahead.
        """
        self._file = file
        self._rotation = RotatedBases(file, device)
        self._device = device
        self._tiles = device.type == "cuda" if tiles is None else tiles
        self._space = None if space is None else torch.empty(space, dtype=torch.uint8, device=device)
        self._host_embedding, self._expert_slots = host_embedding, expert_slots
        self.int8_prefill = int8_prefill
        self._staged = staged
        self._expand = expand and not self._tiles
        # Quantised weights are multiplied with float32 inputs.
        self.dtype = dtype if self._expand else torch.float32
        self.layouts: set[Layout] = set()  # of the tiles made so far, without experts
        # Bytes that types without a tile layout take more than in the file.
        self.widened: dict[QuantType, int] = {}
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
        for name, rows in zip(names, sizes, strict=True):
            self._file.require_tensor(name, (rows, columns))
        if self._expand:
            matrices = tuple(self._expanded_runs(names, columns))
        elif self._tiles:
            matrices = tuple(self._tile_runs(names))
        else:
            matrices = tuple(
                Matrix(self._weight(name), self._loaded_type(name), self._rotation(name)) for name in names
            )
        return Projections(matrices, tuple(sizes), self._biases(names, sizes))

    def _expanded_runs(self, names: Sequence[str], columns: int) -> Iterator[Matrix]:
        """Yield neighbours in the same basis as one matrix of floats."""
        for _, run in groupby(names, key=lambda name: self._rotation(name) is None):
            joined = list(run)
            sizes = [self._file.tensors[name].shape[0] for name in joined]
            data = torch.empty(sum(sizes), columns, dtype=self.dtype, device=self._device)
            for part, name in zip(data.split(sizes), joined, strict=True):
                self._expand_into(part, self._weight(name), self._loaded_type(name))
            yield Matrix(data, None, self._rotation(joined[0]))

    def experts(
        self, names: Sequence[str], count: int, rows: int, columns: int
    ) -> tuple[ExpertStack, ...] | tuple[tuple[Matrix, ...], ...]:
        """Return the stacks [count, rows, columns] that read the same input.

        In tiles as one stack for each run of equal types, its rows joined; else the matrices of each name.
        """
        for name in names:
            self._file.require_tensor(name, (count, rows, columns))
        if self._tiles:
            runs = groupby(names, key=self._loaded_type)
            return tuple(self._tile_stack(list(run), type, rows) for type, run in runs)
        return tuple(self._matrices(name, self._loaded_type(name)) for name in names)

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
        (count, _, row_bytes), whole = parts[0].shape, len(parts) * rows
        stacked = self._stacked(parts, padded(whole) - whole)
        shape = stack_shape(type, whole, row_bytes // type.block_bytes * type.block_elements)
        slots = count if self._expert_slots is None else self._expert_slots
        data = self._expert_memory((slots, *shape))
        if self._expert_slots is None:
            _note_growth(self.widened, [self._file.tensors[name] for name in names], data.numel())
            return ExpertStack.packed(stacked, type, whole, data)
        host = self._expert_memory((count, *shape), pinned=True)
        return ExpertStack.packed(stacked, type, whole, host).cached(slots, data)

    def _expert_memory(self, shape: tuple[int, ...], *, pinned: bool = False) -> Tensor:
        """Return memory of the device, from the one allocation if there is one, or of the host."""
        if pinned:
            return pinned_memory(shape, self._device)
        if self._space is None:
            return torch.empty(shape, dtype=torch.uint8, device=self._device)
        data, self._space = self._space[: prod(shape)], self._space[prod(shape) :]
        return data.view(shape)

    def _stacked(self, parts: list[Tensor], missing: int) -> Tensor:
        """Return stacks [E, N, row bytes] as rows, each expert's together, filled up by `missing` ones."""
        return pad(torch.cat(parts, 1), (0, 0, 0, missing)).flatten(0, 1)

    def embedding(self, name: str, rows: int, columns: int) -> Embedding:
        info = self._file.require_tensor(name, (rows, columns))
        type = info.type if info.type in TWO_BITS else self._loaded_type(name)  # its rows are not multiplied
        return Embedding(self._weight(name, type, pinned=self._host_embedding), type, self._rotation(name))

    def _require_vector(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.require_tensor(name)
        return info if info.shape == (1, *shape) else self._file.require_tensor(name, shape)

    def _loaded_type(self, name: str) -> QuantType:
        """Return the type in which a matrix is held: NVFP4 becomes floats, ternary weights in tiles Q4_0."""
        type = self._file.tensors[name].type
        if type is QuantType.NVFP4:
            return QuantType.F32 if self._expand else QuantType.F16
        return tile_type(type) if self._tiles and type in TWO_BITS else type

    def _weight(self, name: str, type: QuantType | None = None, *, pinned: bool = False) -> Tensor:
        """Return the rows of a matrix in its loaded type, or another: of NVFP4, times the scale beside it."""
        info, packed = self._file.tensors[name], self._packed(name, pinned=pinned)
        type = type or self._loaded_type(name)
        if info.type is type:
            return packed
        lead = info.shape[:-2]  # experts have a scale each
        scales = {}
        for kind in ("scale", "input_scale"):  # the second is for activations in four bits
            companion = f"{name.removesuffix('weight')}{kind}"
            if info.type is QuantType.NVFP4 and self.has(companion):
                scales[kind] = self.vector(companion, *(lead or (1,)))
        return self._converted(packed, info.type, type, scales.get("scale"))

    def _converted(self, packed: Tensor, source: QuantType, type: QuantType, scale: Tensor | None) -> Tensor:
        """Return rows of a type as those of another, times `scale`: one number, or one for each expert."""
        if type is QuantType.Q4_0:
            return to_q4_0(packed, source)
        values = dequantise(packed, source)
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

    def _tile_runs(self, names: Sequence[str]) -> Iterator[Matrix]:
        """Yield neighbours of one type and basis as one matrix: fewer and larger launches."""
        for (type, _), run in groupby(
            names, key=lambda name: (self._loaded_type(name), self._rotation(name) is None)
        ):
            joined = list(run)
            weight = self._tile(self._joined([self._weight(name) for name in joined]), type)
            self.layouts.add(weight.layout)
            infos = [self._file.tensors[name] for name in joined]
            _note_growth(self.widened, infos, weight.nbytes)
            int8_rows = _int8_rows(infos) if self.int8_prefill else 0
            yield Matrix(with_int8(weight, int8_rows), None, self._rotation(joined[0]))

    def _tile(self, packed: Tensor, type: QuantType) -> PackedWeight:
        weight = pack(packed, type, self._space)
        if self._space is not None:
            self._space = self._space[weight.nbytes :]
        return weight

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
