"""A delta layer from the convolution on, whose text may be cut into steps in any way; for a CPU and a GPU."""

import random
from dataclasses import fields

import torch
from torch import Tensor

from bough.kernels.causal_conv import ConvRows, ConvWeights, DeltaBuffers, conv_index, tree_conv
from bough.kernels.delta_rule import DeltaRows, fold_path, tree_delta, tree_order


def copied(buffers: DeltaBuffers) -> DeltaBuffers:
    return DeltaBuffers(*(getattr(buffers, field.name).clone() for field in fields(buffers)))


def ancestors_of(parents: list[int]) -> list[int]:
    bits: list[int] = []
    for row, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << row)
    return bits


def packed_order(parents: list[int], device: str = "cpu") -> Tensor:
    signed = [bits - 2**64 if bits >= 2**63 else bits for bits in ancestors_of(parents)]
    return tree_order(torch.tensor([signed], device=device))


class DeltaLayer:
    """The buffers of one sequence; a step advances them as a decode step does."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"):
        self.key_heads, self.value_heads, dim = shape
        self.channels, self.device = (2 * self.key_heads + self.value_heads) * dim, device

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=device)

        window = normal(1, 3, self.channels).to(dtype)
        tree_inputs = torch.zeros(1, 64, self.channels, dtype=dtype, device=device)
        tree_gates = torch.zeros(1, 64, 2, self.value_heads, device=device)
        state = normal(1, self.value_heads, dim, dim)
        self.buffers = DeltaBuffers(state, window, tree_inputs, tree_gates)
        taps, decay, bias = (
            normal(self.channels, 4),
            -normal(self.value_heads).abs(),
            normal(self.value_heads),
        )
        self.weights = ConvWeights(taps, decay, bias, self.key_heads)
        self.slots, self.path = torch.zeros(1, dtype=torch.int64, device=device), []

    def copy(self) -> "DeltaLayer":
        other = object.__new__(DeltaLayer)
        other.__dict__.update(self.__dict__)
        other.buffers = copied(self.buffers)
        return other

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random inputs of the convolution, alpha and beta of as many rows."""
        heads = self.value_heads
        wide = torch.randn(1, count, self.channels + 2 * heads, device=self.device)
        inputs, alpha, beta = wide.split([self.channels, heads, heads], -1)
        return inputs, alpha, beta

    def step(self, parents: list[int], rows: tuple[Tensor, Tensor, Tensor], accepted: list[int]) -> Tensor:
        """Commit the path that is pending and return the outputs of a tree; `accepted` is pending then."""
        step = self.step_rows(parents)
        heads = tree_conv(*rows, self.weights, self.buffers, step)
        order = packed_order(parents, self.device)
        out = tree_delta(heads, self.buffers.state, DeltaRows(self.slots, step.count, order))
        self.path = accepted
        return out

    def fold(self) -> Tensor:
        """Commit the path that is pending as before a prompt chunk, and return the state."""
        fold_path(self.weights, self.buffers, self.step_rows([]))
        return self.buffers.state

    def step_rows(self, parents: list[int]) -> ConvRows:
        path = torch.tensor([self.path], dtype=torch.int64, device=self.device)
        count = torch.tensor([len(self.path)], device=self.device)
        rows = torch.tensor([parents], dtype=torch.int64, device=self.device)
        return ConvRows(self.slots, path, count, conv_index(rows, 4, count, len(self.path)))


def check_cuts_into_steps(trees: DeltaLayer, shapes: list[list[int]]) -> None:
    """Run trees one after the other and, on a copy, root-only steps over the accepted paths.

    Outputs of the accepted rows, and states after a fold of either, must be equal bit for bit.
    """
    plain = trees.copy()
    for number, parents in enumerate(shapes):
        rows, last = trees.rows(len(parents)), random.Random(number).randrange(len(parents))
        path = [row for row in range(len(parents)) if ancestors_of(parents)[last] >> row & 1]
        out = trees.step(parents, rows, path)
        for row in path:
            root = plain.step([-1], tuple(part[:, row : row + 1] for part in rows), [0])
            assert torch.equal(root[:, 0], out[:, row]), f"tree {number}, row {row}"
        assert torch.equal(trees.copy().fold(), plain.copy().fold()), f"state after tree {number}"
