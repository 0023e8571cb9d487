"""The memory of a model's weights, from building it on the meta device. Reads no weights."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import empty_packed, has_layout
from treeflash.models.weights import Matrix, TensorSource, WeightLoader

META = torch.device("meta")


class MeasuringLoader(WeightLoader):
    """A `WeightLoader` on the meta device.

    Nothing is computed on meta tensors: the first time takes torch two seconds.
    """

    def __init__(self, file: TensorSource, *, tiles: bool, dtype: torch.dtype, expand: bool = True):
        super().__init__(file, device=META, dtype=dtype, expand=expand, tiles=tiles)
        self.tile_bytes = 0

    def vector(self, name: str, *shape: int) -> Tensor:
        self._require_vector(name, shape)
        self._read.add(name)
        return torch.empty(shape, device=META)

    def _packed(self, name: str, *, pinned: bool = False) -> Tensor:
        info = self._file.tensors[name]
        self._read.add(name)
        return torch.empty(*info.shape[:-1], info.row_bytes, dtype=torch.uint8, device=META)

    def _tile(self, packed: Tensor, type: QuantType) -> Matrix:
        columns = packed.shape[1] // type.block_bytes * type.block_elements
        weight = empty_packed(type, len(packed), columns, META)
        self.tile_bytes += weight.nbytes
        if not has_layout(type) and type.bits_per_weight < 16:
            self.widened[type] = self.widened.get(type, 0) + weight.nbytes - packed.numel()
        return Matrix(weight, None)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])

    def _expand_into(self, out: Tensor, packed: Tensor, type: QuantType) -> None:
        """Do nothing: meta tensors have no values."""


def tile_space(source: TensorSource, build: Callable[[WeightLoader], Any]) -> int:
    """Return the bytes of all tiles of the model that `build` makes with a loader."""
    loader = MeasuringLoader(source, tiles=True, dtype=torch.float32)
    build(loader)
    return loader.tile_bytes


def held_bytes(*things: Any) -> int:
    """Return the bytes of all tensors that these objects of ours hold; shared storage counts once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    queue: list[Any] = list(things)
    while queue:
        thing = queue.pop()
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        elif id(thing) not in seen:
            seen.add(id(thing))
            queue += _parts(thing)
    return sum(storages.values())


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return thing.values()
    if isinstance(thing, list | tuple | set | frozenset):
        return thing
    if is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, field.name) for field in fields(thing)]
    if type(thing).__module__.startswith("treeflash."):
        return getattr(thing, "__dict__", {}).values()
    return ()
