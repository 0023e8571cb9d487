"""The products that a model's layers make, from the header of its file; reads no weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treeflash.gguf.reader import GGUFFile
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import has_layout
from treeflash.models.decoder import Block
from treeflash.models.measure import MeasuringLoader
from treeflash.models.spec import ModelSpec
from treeflash.models.weights import Matrix, Projections


def layer_products(file: GGUFFile) -> list[tuple[Sequence[tuple[QuantType, int]], int]]:
    """Of one layer of each kind: matrices (type, rows) that read the same x, and its columns.

    Routed experts, each of which few rows meet, are left out.
    """
    spec = ModelSpec.from_gguf(file)
    recorder = _Recorder(file)
    for kind in dict.fromkeys(spec.layers):
        # From the middle: mixes give more bits to the first and the last.
        layers = [index for index, each in enumerate(spec.layers) if each == kind]
        Block(spec, recorder, layers[len(layers) // 2])
    return recorder.products


class _Recorder(MeasuringLoader):
    """Notes which matrices stand side by side, as they are joined for a GPU."""

    def __init__(self, file: GGUFFile):
        super().__init__(file, tiles=True, dtype=torch.float32)
        self.products: list[tuple[Sequence[tuple[QuantType, int]], int]] = []
        self._made: list[tuple[QuantType, int]] = []

    def projections(self, names: Sequence[str], sizes: Sequence[int], columns: int) -> Projections:
        self._made = []
        result = super().projections(names, sizes, columns)
        self.products.append((tuple(self._made), columns))
        return result

    def _tile(self, packed: Tensor, type: QuantType) -> Matrix:
        self._made.append((type if has_layout(type) else QuantType.F16, len(packed)))
        return super()._tile(packed, type)
