"""States set aside: all that a slot consists of at one moment, for any slot to go on from; knows no tokens.

Full pages never change, so slots and saved states share them. A saved page lies in the pool as long as there
is room, and outside it, as the bytes it consists of, when there is not. Everything else of a saved state lies
outside a device's memory: recurrent states are large, and a bus is fast enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeflash.models.step import DeltaBuffers
from treeflash.state.sequences import PAGE, SequenceStates

_SLAB = 64 << 20  # bytes that are taken from the system at a time: pinning memory is slow
_SLAB_CELLS = 64  # pages of a slab, at most


def aside(tensor: Tensor) -> Tensor:
    """A copy that takes no device memory; a device fills it by the time it is next waited for."""
    kept = _host_memory(tensor.shape, tensor.dtype, tensor.device)
    return kept.copy_(tensor, non_blocking=True)


def _host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned where a device copies from and to it. MemoryError: there is none."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise MemoryError(str(error)) from error


@dataclass(slots=True, eq=False)
class SavedPage:
    """A full page of keys and values, which nothing changes: in the pool, outside it, or both."""

    index: int | None = None  # in the pool
    cell: Tensor | None = None  # its bytes outside the pool
    holders: int = 0  # saved states


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """One slot's state at one moment. Nothing writes to it, and any number of slots may begin with it."""

    length: int
    pages: list[SavedPage]  # full ones
    tail: Tensor | None  # bytes of the page behind them; None: nothing is in it
    layers: list[tuple[Tensor, ...]]  # a delta layer: state, window, and rows still to be folded in
    folding: int  # how many such rows

    @property
    def nbytes(self) -> int:
        """Outside the pool, full pages not counted."""
        parts = [part for layer in self.layers for part in layer]
        return sum(part.nbytes for part in parts) + (0 if self.tail is None else self.tail.nbytes)


class SavedStates:
    """Saved states of the slots of one `SequenceStates`, and the memory they take."""

    def __init__(self, states: SequenceStates):
        self.states = states
        self._device = states.buffers.lengths.device
        self._resident: dict[int, SavedPage] = {}
        self._free: list[Tensor] = []
        self._used = 0  # cells
        self.cell_bytes = sum(_page_bytes(plane) for plane in states.planes)

    @property
    def device_bytes(self) -> int:
        """Of pages that saved states keep in the pool."""
        return len(self._resident) * self.cell_bytes

    @property
    def cells_bytes(self) -> int:
        """Of pages outside the pool, tails among them."""
        return self._used * self.cell_bytes

    def save(self, slot: int) -> SavedSequence:
        """The slot's committed state, until `forget`. After a MemoryError nothing is held."""
        states, buffers = self.states, self.states.buffers
        full, rest = divmod(states.lengths[slot], PAGE)
        owned = states.pages.owned[slot]
        rows = buffers.pending.path[slot, : int(buffers.pending.count[slot])]
        layers: list[tuple[Tensor, ...]] = [
            (
                aside(layer.state[slot]),
                aside(layer.window[slot]),
                aside(layer.tree_inputs[slot, rows]),
                aside(layer.tree_gates[slot, rows]),
            )
            for layer in buffers.layers
            if isinstance(layer, DeltaBuffers)
        ]
        tail = self._read(owned[full]) if rest else None
        # Behind all that may fail: from here on pages are held.
        pages = [self._resident.get(index) or self._admit(index) for index in owned[:full]]
        for page in pages:
            page.holders += 1
        return SavedSequence(states.lengths[slot], pages, tail, layers, len(rows))

    def shortage(self, slot: int, saved: SavedSequence) -> int:
        """Pages that others have to let go of before the empty slot can go on from the state."""
        return self.states.shortage(slot, PAGE * self.missing(saved))

    def missing(self, saved: SavedSequence) -> int:
        """Pages that are not in the pool."""
        return sum(page.index is None for page in saved.pages) + (saved.tail is not None)

    def restore(self, slot: int, saved: SavedSequence) -> None:
        """Lets a slot that was just opened go on from a saved state."""
        states = self.states
        assert states.lengths[slot] == 0
        absent = [page for page in saved.pages if page.index is None]
        for page, index in zip(absent, states.grant(len(absent)), strict=True):
            assert page.cell is not None
            self._write(index, page.cell)
            page.index = index
            self._resident[index] = page
        states.begin(slot, [page.index for page in saved.pages if page.index is not None], saved.length)
        if saved.tail is not None:
            self._write(states.pages.owned[slot][len(saved.pages)], saved.tail)
        pending, folding = states.buffers.pending, saved.folding
        pending.count[slot] = folding
        pending.path[slot, :folding] = torch.arange(folding, device=pending.path.device)
        deltas = (layer for layer in states.buffers.layers if isinstance(layer, DeltaBuffers))
        for layer, (state, window, inputs, gates) in zip(deltas, saved.layers, strict=True):
            layer.state[slot].copy_(state, non_blocking=True)
            layer.window[slot].copy_(window, non_blocking=True)
            layer.tree_inputs[slot, :folding].copy_(inputs, non_blocking=True)
            layer.tree_gates[slot, :folding].copy_(gates, non_blocking=True)

    def forget(self, saved: SavedSequence) -> None:
        for page in saved.pages:
            page.holders -= 1
            if page.holders == 0:
                self.leave_pool(page)
                self.drop_copy(page)
        if saved.tail is not None:
            self._give(saved.tail)

    def is_idle(self, page: SavedPage) -> bool:
        """Whether it takes room in the pool that no slot needs."""
        return page.index is not None and self.states.pages.holders(page.index) == 1

    def copy_out(self, page: SavedPage) -> None:
        """Its bytes lie outside the pool, too."""
        if page.cell is None:
            assert page.index is not None
            page.cell = self._read(page.index)

    def leave_pool(self, page: SavedPage) -> None:
        """Gives its place in the pool back: where no copy was made, for good."""
        if page.index is not None:
            del self._resident[page.index]
            self.states.pages.drop([page.index])
            page.index = None

    def drop_copy(self, page: SavedPage) -> None:
        if page.cell is not None:
            self._give(page.cell)
            page.cell = None

    def new_cell(self) -> Tensor:
        """Room for the bytes of a page; it is given back with what it becomes a part of."""
        if not self._free:
            count = max(1, min(_SLAB // max(1, self.cell_bytes), _SLAB_CELLS))
            slab = _host_memory((count, self.cell_bytes), torch.uint8, self._device)
            self._free += slab.unbind()
        self._used += 1
        return self._free.pop()

    def wait(self) -> None:
        """Until the device has written all that was set aside, and read all that goes on."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _admit(self, index: int) -> SavedPage:
        self.states.pages.hold([index])
        page = self._resident[index] = SavedPage(index)
        return page

    def _give(self, cell: Tensor) -> None:
        self._used -= 1
        self._free.append(cell)

    def _read(self, index: int) -> Tensor:
        parts = [plane[:, index].reshape(-1).view(torch.uint8) for plane in self.states.planes]
        return self.new_cell().copy_(torch.cat(parts), non_blocking=True)

    def _write(self, index: int, cell: Tensor) -> None:
        start, cell = 0, cell.to(self._device, non_blocking=True)
        for plane in self.states.planes:
            place = plane[:, index]
            end = start + place.numel() * place.itemsize
            place.copy_(cell[start:end].view(place.dtype).view(place.shape))
            start = end


def _page_bytes(plane: Tensor) -> int:
    """Of a plane [attention layers, pages, ...], whether or not it has any pages yet."""
    return plane.shape[0] * torch.Size(plane.shape[2:]).numel() * plane.itemsize
