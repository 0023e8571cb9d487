"""The memory of a model's weights, from building it on the meta device. Reads no weights."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import PackedWeight, empty_packed
from bough.models.staging import RangeSource, StagedReader
from bough.models.weights import TensorSource, WeightLoader

META = torch.device("meta")


class MeasuringLoader(WeightLoader):
    """A `WeightLoader` on the meta device.

    Nothing is computed on meta tensors: the first time takes torch two seconds.
    """

    def __init__(self, file: TensorSource, *, tiles: bool, **options: Any):
        super().__init__(file, device=META, tiles=tiles, **options)
        self.tile_bytes = self.host_bytes = 0

    def vector(self, name: str, *shape: int) -> Tensor:
        self._require_vector(name, shape)
        self.names.append(name)
        return torch.empty(shape, device=META)

    def token_ids(self, name: str, count: int, *, below: int) -> Tensor:
        self._require_ids(name, count)
        self.names.append(name)
        return torch.empty(count, dtype=torch.int64, device=META)

    def token_places(self, name: str, count: int, *, below: int) -> Tensor:
        self._require_ids(name, count)
        self.names.append(name)
        return torch.empty(below, dtype=torch.int64, device=META)

    def _packed(self, name: str, *, pinned: bool = False) -> Tensor:
        info = self._file.tensors[name]
        self.names.append(name)
        # Memory of the host that nothing touches is never allocated.
        device = torch.device("cpu") if pinned else META
        return torch.empty(*info.shape[:-1], info.row_bytes, dtype=torch.uint8, device=device)

    def _converted(self, packed: Tensor, source: QuantType, type: QuantType, scale: Tensor | None) -> Tensor:
        columns = packed.shape[-1] // source.block_bytes * source.block_elements
        return packed.new_empty(*packed.shape[:-1], type.row_bytes(columns))

    def _tile(self, packed: Tensor, type: QuantType) -> PackedWeight:
        columns = packed.shape[1] // type.block_bytes * type.block_elements
        weight = empty_packed(type, len(packed), columns, META)
        self.tile_bytes += weight.nbytes
        return weight

    def _expert_memory(self, shape: tuple[int, ...], *, pinned: bool = False) -> Tensor:
        self.host_bytes += prod(shape) if pinned else 0
        self.tile_bytes += 0 if pinned else prod(shape)
        return torch.empty(shape, dtype=torch.uint8, device=META)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])

    def _stacked(self, parts: list[Tensor], missing: int) -> Tensor:
        count, _, row_bytes = parts[0].shape
        return parts[0].new_empty(count * (sum(part.shape[1] for part in parts) + missing), row_bytes)

    def _expand_into(self, out: Tensor, packed: Tensor, type: QuantType) -> None:
        """Do nothing: meta tensors have no values."""


def measured(
    source: TensorSource, build: Callable[[WeightLoader], Any], *, expert_slots: int | None = None
) -> MeasuringLoader:
    """Return the loader with which `build` has made a model: it holds the order of its tensors."""
    loader = MeasuringLoader(source, tiles=True, expert_slots=expert_slots)
    build(loader)
    return loader


@contextmanager
def weight_loader(
    source: TensorSource, plan: MeasuringLoader, device: torch.device, **options: Any
) -> Generator[WeightLoader]:
    """Yield the loader of a model that was measured; for a GPU tensors are read ahead, as far as possible."""
    if device.type != "cuda":
        yield WeightLoader(source, device=device, **options)
    elif not isinstance(source, RangeSource):
        yield WeightLoader(source, device=device, space=plan.tile_bytes, **options)
    else:
        with StagedReader(source, plan.names, device) as staged:
            yield WeightLoader(source, device=device, space=plan.tile_bytes, staged=staged, **options)


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
    if type(thing).__module__.startswith("bough."):
        return getattr(thing, "__dict__", {}).values()
    return ()
