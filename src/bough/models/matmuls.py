"""The matmuls of a model's layers, from the header of its file. Reads no weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType, tile_type
from bough.kernels.quant_matmul import PackedWeight
from bough.models.decoder import Block
from bough.models.measure import MeasuringLoader
from bough.models.spec import ModelSpec
from bough.models.weights import Projections


def layer_matmuls(file: GGUFFile) -> list[tuple[Sequence[tuple[QuantType, int]], int]]:
    """Return, for one layer of each kind, the matrices (type, rows) that read the same x, and its columns.

    Without routed experts, each of which gets few rows.
    """
    spec = ModelSpec.from_gguf(file)
    recorder = _Recorder(file)
    for kind in dict.fromkeys(spec.layers):
        # A layer in the middle: quantisation mixes give more bits to the first and the last.
        layers = [index for index, layer in enumerate(spec.layers) if layer == kind]
        Block(spec, recorder, layers[len(layers) // 2])
    return recorder.matmuls


class _Recorder(MeasuringLoader):
    """Records the matrices that share an input, joined as for a GPU."""

    def __init__(self, file: GGUFFile):
        super().__init__(file, tiles=True, dtype=torch.float32)
        self.matmuls: list[tuple[Sequence[tuple[QuantType, int]], int]] = []
        self._made: list[tuple[QuantType, int]] = []

    def projections(self, names: Sequence[str], sizes: Sequence[int], columns: int) -> Projections:
        self._made = []
        result = super().projections(names, sizes, columns)
        self.matmuls.append((tuple(self._made), columns))
        return result

    def _tile(self, packed: Tensor, type: QuantType) -> PackedWeight:
        self._made.append((tile_type(type), len(packed)))
        return super()._tile(packed, type)
