"""What a step verifies: the trees of its sequences in static buffers, and the `Step` over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.kernels.sampling import RowOwners
from bough.kernels.slot_mapping import padded_tree, ragged_rows
from bough.kernels.tree import MAX_ROWS
from bough.models.step import Step
from bough.spec.tree import SharedTrees, Tree
from bough.state.graphs import StagedNumbers
from bough.state.sequences import SequenceStates


def tree_rows(sequences: int) -> int:
    """Return the rows that a tree may have in a step of `sequences` sequences.

    The delta rule's kernel reserves memory for the largest: with less of it twice as many run at a time.
    """
    return MAX_ROWS if sequences == 1 else 32 if sequences <= 4 else 16


@dataclass(frozen=True, slots=True)
class Verify:
    """One sequence's part of a step: a tree, of which at most `max_accepted` rows are accepted."""

    slot: int
    tree: Tree
    max_accepted: int
    given: bool = False  # a chain of a prompt's tokens: all are accepted; for steps of several sequences


class StepInputs:
    """The trees of a step in static buffers, for `capacity` sequences at most.

    One sequence: its tree may lie on the device. Several: ragged rows; a sequence that is missing has no rows
    and the slot of the first one. `given`: the token after each row that is not sampled because the prompt
    has it, else -1.
    """

    def __init__(self, capacity: int, device: torch.device):
        sizes = [4 * MAX_ROWS, capacity, capacity, capacity + 1, MAX_ROWS]
        self._numbers = StagedNumbers(sum(sizes), device=device)
        self._tables = np.split(self._numbers.numbers, np.cumsum(sizes)[:-1])
        rows, self.slots, self.limits, self.first, self.given = self._numbers.buffer.split(sizes)
        self.rows = rows.view(4, MAX_ROWS)  # tokens, parents, ancestors, depths
        self.load([Verify(0, Tree.root(0), 1)])

    def load(self, parts: Sequence[Verify], shared: SharedTrees | None = None) -> list[int]:
        """Load the trees of some sequences; return the bounds of their rows.

        `shared`: instead of the parts' own trees; the bounds are then not known.
        """
        self._numbers.wait()  # the next step may be loaded while one runs
        rows, slots, limits, first, given = self._tables
        slots[:], limits[:] = parts[0].slot if parts else 0, 1
        for index, part in enumerate(parts):
            slots[index], limits[index] = part.slot, part.max_accepted
        if shared is not None:
            self._numbers.copy(slice(4 * MAX_ROWS, 4 * MAX_ROWS + 2 * len(slots)))
            self._share(shared)
            return [0] * (len(parts) + 1)
        given[:] = -1
        on_device = len(parts) == 1 and parts[0].tree.packed.device.type != "cpu"
        bounds = [0, parts[0].tree.size] if on_device else _load_trees(rows, given, parts)
        first[: len(bounds)], first[len(bounds) :] = bounds, bounds[-1]
        self._numbers.copy(slice(4 * MAX_ROWS if on_device else 0, None))
        if on_device:
            self.rows.copy_(parts[0].tree.packed)
        return bounds

    def _share(self, shared: SharedTrees) -> None:
        self.rows.copy_(shared.rows)
        self.given.copy_(shared.given)
        # Where the last sequence's rows end, those of missing ones do, too.
        count = min(len(self.first), len(shared.first))
        self.first[:count].copy_(shared.first[:count])
        if count < len(self.first):
            self.first[count:].copy_(shared.first[-1:].expand(len(self.first) - count))


def _load_trees(rows: np.ndarray, given: np.ndarray, parts: Sequence[Verify]) -> list[int]:
    """Write the trees one after the other to rows [4 * 64]; return their bounds."""
    rows = rows.reshape(4, MAX_ROWS)
    if len(parts) > 1 and max(part.tree.size for part in parts) == 1:
        # At once: one by one they take longer than all else that the host does for a plain step.
        packed = torch.stack([part.tree.packed for part in parts])
        rows[:, : len(parts)] = packed[:, :, 0].T.cpu()
        return list(range(len(parts) + 1))
    bounds = [0]
    for part in parts:
        begin, end = bounds[-1], bounds[-1] + part.tree.size
        rows[:, begin:end] = part.tree.packed.cpu().numpy()[:, : part.tree.size]
        if part.given:
            given[begin : end - 1] = rows[0, begin + 1 : end]
        bounds.append(end)
    return bounds


class StepTrees:
    """The inputs of steps by how many sequences they hold."""

    def __init__(self, states: SequenceStates, device: torch.device, *, padded: bool):
        """`padded`: steps may have more rows than their trees."""
        self._lengths, self._device = states.buffers.lengths, device
        self._placed_on_host = device.type == "cpu" and not padded
        self._inputs = {1: StepInputs(1, device)}
        # On a CPU, of one sequence: steps over static buffers by rows, and where their rows are placed.
        self._steps: dict[int, Step] = {}
        self._placed = torch.zeros(3, MAX_ROWS, dtype=torch.int64, device=device)

    def of(self, capacity: int) -> StepInputs:
        if capacity not in self._inputs:
            self._inputs[capacity] = StepInputs(capacity, self._device)
        return self._inputs[capacity]

    def step(self, capacity: int, size: int) -> Step:
        """Return the step of the trees that were loaded, padded to `size` rows."""
        inputs = self.of(capacity)
        if capacity > 1:
            rows = ragged_rows(inputs.rows, inputs.first, inputs.slots, self._lengths, size=size)
            return _step(rows, inputs.slots, inputs.first, tree_rows(capacity))
        if self._placed_on_host:
            return self._placed_step(inputs, size)
        rows = padded_tree(inputs.rows, inputs.first[1:], inputs.slots, self._lengths, size=size)
        return _step(rows, inputs.slots, None, tree_rows(1))

    def _placed_step(self, inputs: StepInputs, size: int) -> Step:
        """Return a step of exactly `size` rows, whose tensors are made once for each size."""
        if size not in self._steps:
            tokens, parents, ancestors, _ = inputs.rows[:, None, :size].unbind()
            positions, slots, starts = self._placed[:, :size].unbind()
            tree, owners = (tokens, positions[None], parents, ancestors), RowOwners(slots, starts)
            self._steps[size] = Step(inputs.slots, *tree, owners=owners)
        slot, placed = inputs.slots.item(), self._placed.numpy()
        placed[0, :size] = inputs.rows.numpy()[3, :size] + self._lengths.numpy()[slot]
        placed[1, :size] = slot
        return self._steps[size]


def _step(rows: Tensor, slots: Tensor, first: Tensor | None, most: int) -> Step:
    """Return the step of rows [6, size], see `ragged_rows`."""
    tokens, parents, ancestors, positions, row_slots, starts = rows.unbind()
    tree = (tokens[None], positions[None], parents[None], ancestors[None])
    return Step(slots, *tree, first, RowOwners(row_slots, starts), most)
