"""Saved sequence states: the whole state of a slot at one moment, from which any slot can continue.

Full KV pages are immutable, so slots and saved states share them. A saved page stays in the device pool while
there is room and is offloaded to host memory, byte for byte, when there is not. The rest of a saved state is
always in host memory: recurrent states are large, and the bus is fast enough to restore them. Copies to the
host run beside the steps of other sequences.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bough.state.sequences import PAGE, SequenceStates

_SLAB_BYTES = 64 << 20  # allocated at a time: pinning memory is slow
_SLAB_PAGES = 64  # at most
_AHEAD_PAGES = 8  # that are free after some idle time
_GROUP_BYTES = 32 << 20  # copied at a time: torch rounds pinned memory up to a power of two


def host_copy(tensor: Tensor) -> Tensor:
    """Copy to host memory, from a GPU asynchronously: the device may read it after `wait_for_copies`."""
    return _copy_to_host(tensor, _host_memory(tensor.shape, tensor.dtype, tensor.device))


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a `host_copy` of each; from a GPU many at a time."""
    if not tensors or not tensors[0].is_cuda:
        return [host_copy(tensor) for tensor in tensors]
    copies: dict[int, Tensor] = {}
    for places in _groups(tensors):
        try:
            flat = torch.cat([tensors[place].flatten() for place in places])
        except torch.OutOfMemoryError:
            copies |= {place: host_copy(tensors[place]) for place in places}
            continue
        whole = _copy_to_host(flat, _host_memory(flat.shape, flat.dtype, flat.device), owned=True)
        parts = whole.split([tensors[place].numel() for place in places])
        copies |= {place: part.view(tensors[place].shape) for place, part in zip(places, parts, strict=True)}
    return [copies[place] for place in range(len(tensors))]


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return indices of tensors of one type, and of _GROUP_BYTES in all, unless a tensor alone has more."""
    groups: dict[tuple[torch.dtype, int], list[int]] = {}
    sizes, numbers = Counter[torch.dtype](), Counter[torch.dtype]()
    for place, tensor in enumerate(tensors):
        kind = tensor.dtype
        if sizes[kind] and sizes[kind] + tensor.nbytes > _GROUP_BYTES:
            sizes[kind], numbers[kind] = 0, numbers[kind] + 1
        sizes[kind] += tensor.nbytes
        groups.setdefault((kind, numbers[kind]), []).append(place)
    return list(groups.values())


def wait_for_copies(device: torch.device) -> None:
    """Have the device's next work wait for the copies to host memory."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_copy_stream(device))


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy_to_host(source: Tensor, target: Tensor, *, owned: bool = False) -> Tensor:
    """Copy without a delay of the device's next steps: on a stream of its own, from a copy on the device.

    `owned`: the source is such a copy.
    """
    if not source.is_cuda:
        return target.copy_(source)
    try:
        copy = source if owned else source.clone(memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError:
        return target.copy_(source, non_blocking=True)
    side = _copy_stream(source.device)
    side.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(side):
        target.copy_(copy, non_blocking=True)
    copy.record_stream(side)
    return target


def _host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory, pinned for copies from and to a GPU; raise MemoryError if there is none."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise MemoryError(str(error)) from error


def _pin_in_threads() -> None:
    """Have torch pin host memory in several threads: the first touch of its pages is what takes long."""
    if not torch.cuda.is_available():
        return
    threads = 1 << min(3, (os.cpu_count() or 1).bit_length() - 1)
    setting = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    settings = f"pinned_use_cuda_host_register:True,pinned_num_register_threads:{threads}"
    set_up = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # in torch 2.10 and newer
    set_up = set_up or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if set_up is None:
        return
    with contextlib.suppress(TypeError, RuntimeError, ValueError):  # it is only slower without
        set_up(f"{setting},{settings}" if setting else settings)


class HostReserve:
    """Pinned host memory ahead of its use: all requests would wait while it is pinned, 0.3 to 0.8 ms a MiB.

    torch keeps freed pinned memory for the next allocation of the same size.
    """

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            _pin_in_threads()
        self._held: list[Tensor] = []
        self.pinned = 0  # bytes that were in use or held at one time, at most

    def grow(self, in_use: int, wanted: int) -> bool:
        """Pin one more group of memory until `wanted` bytes are free; return whether there is more to do."""
        if self._device.type != "cuda" or wanted <= 0 or self.pinned >= in_use + wanted:
            self._held.clear()
            return False
        try:
            self._held.append(_host_memory((_GROUP_BYTES,), torch.uint8, self._device))
        except MemoryError:
            self.pinned = in_use + wanted  # there is no more
            return False
        self.pinned = max(self.pinned, in_use + len(self._held) * _GROUP_BYTES)
        return True

    def release(self) -> None:
        """Leave what is held to the next allocations."""
        self._held.clear()


@dataclass(slots=True, eq=False)
class SavedPage:
    """A full, immutable KV page: in the device pool, in host memory, or both."""

    index: int | None = None  # in the pool
    host: Tensor | None = None  # its bytes in host memory
    references: int = 0  # saved states


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """One slot's state at one moment; immutable, and any number of slots can continue from it."""

    length: int
    pages: list[SavedPage]  # full ones
    tail: Tensor | None  # bytes of the partly filled page after them; None: there is none
    # Of some delta layers each [layers, ...]: state, window, inputs and gates of pending rows.
    layers: list[tuple[Tensor, ...]]
    pending: int  # accepted rows that the recurrent states do not include yet
    offset: int = 0  # of rope positions, after images

    @property
    def nbytes(self) -> int:
        """Return the bytes in host memory, full pages not counted."""
        tensors = [tensor for layer in self.layers for tensor in layer]
        return sum(tensor.nbytes for tensor in tensors) + (0 if self.tail is None else self.tail.nbytes)


class SnapshotStore:
    """Saves and restores slots of one `SequenceStates`, and owns the memory of the saved states."""

    def __init__(self, states: SequenceStates):
        self.states = states
        self._device = states.buffers.lengths.device
        self._resident: dict[int, SavedPage] = {}  # by page index in the pool
        self._free: list[Tensor] = []  # host pages
        self._used: set[int] = set()  # ids of host pages
        self.page_bytes = sum(_page_bytes(plane) for plane in states.planes)
        self.reserve = HostReserve(self._device)
        # Of a saved sequence, at least: its recurrent states.
        whole = states.recurrent
        self.state_bytes = 0 if whole is None else whole.state[:, 0].nbytes + whole.window[:, 0].nbytes

    @property
    def device_bytes(self) -> int:
        """Return the bytes of pool pages that saved states hold."""
        return len(self._resident) * self.page_bytes

    @property
    def host_page_bytes(self) -> int:
        """Return the bytes of pages in host memory, tails included."""
        return len(self._used) * self.page_bytes

    def save(self, slot: int) -> SavedSequence:
        """Save the slot's committed state until `release`; a MemoryError leaves nothing allocated."""
        states, buffers = self.states, self.states.buffers
        self.reserve.release()
        full, rest = divmod(states.lengths[slot], PAGE)
        owned = states.pages.owned[slot]
        rows = buffers.pending.path[slot, : int(buffers.pending.count[slot])]
        copies = host_copies(self._recurrent_of(slot, rows))
        layers = [tuple(copies[start : start + 4]) for start in range(0, len(copies), 4)]
        tail = self._read_page(owned[full]) if rest else None
        # After everything that can fail: from here on pages are referenced.
        pages = [self._resident.get(index) or self._retain(index) for index in owned[:full]]
        for page in pages:
            page.references += 1
        return SavedSequence(states.lengths[slot], pages, tail, layers, len(rows), states.offsets[slot])

    def _recurrent_of(self, slot: int, rows: Tensor) -> list[Tensor]:
        """Return the four tensors of `SavedSequence.layers` for groups of layers, copied at a time."""
        whole = self.states.recurrent
        if whole is None:
            return []
        count = max(1, _GROUP_BYTES // whole.state[0, 0].nbytes)
        parts = (
            whole.state[:, slot],
            whole.window[:, slot],
            whole.tree_inputs[:, slot, rows],
            whole.tree_gates[:, slot, rows],
        )
        return [
            tensor for group in zip(*(part.split(count) for part in parts), strict=True) for tensor in group
        ]

    def shortage(self, slot: int, saved: SavedSequence) -> int:
        """Return how many pages must be evicted before the state can be restored to an empty slot."""
        return self.states.shortage(slot, PAGE * self.pages_to_load(saved))

    def pages_to_load(self, saved: SavedSequence) -> int:
        """Return how many pages are not in the pool."""
        return sum(page.index is None for page in saved.pages) + (saved.tail is not None)

    def restore(self, slot: int, saved: SavedSequence) -> None:
        """Restore a saved state to a newly opened slot."""
        states = self.states
        assert states.lengths[slot] == 0
        wait_for_copies(self._device)
        absent = [page for page in saved.pages if page.index is None]
        for page, index in zip(absent, states.grant(len(absent)), strict=True):
            assert page.host is not None
            self._write_page(index, page.host)
            page.index = index
            self._resident[index] = page
        states.begin(slot, [page.index for page in saved.pages if page.index is not None], saved.length)
        states.set_offset(slot, saved.offset)
        if saved.tail is not None:
            self._write_page(states.pages.owned[slot][len(saved.pages)], saved.tail)
        pending, count = states.buffers.pending, saved.pending
        pending.count[slot] = count
        pending.path[slot, :count] = torch.arange(count, device=pending.path.device)
        whole, first = states.recurrent, 0
        for state, window, inputs, gates in saved.layers:
            assert whole is not None
            some = slice(first, first + len(state))
            whole.state[some, slot].copy_(state, non_blocking=True)
            whole.window[some, slot].copy_(window, non_blocking=True)
            whole.tree_inputs[some, slot, :count].copy_(inputs, non_blocking=True)
            whole.tree_gates[some, slot, :count].copy_(gates, non_blocking=True)
            first = some.stop

    def park(self, slot: int) -> SavedSequence:
        """Save a slot, close it and free its pages: those that no other slot uses go to host memory."""
        saved = self.save(slot)
        self.states.close(slot)
        for page in saved.pages:
            if self.is_evictable(page):
                self.offload(page)
                self.evict(page)
        return saved

    def unpark(self, slot: int, parked: SavedSequence) -> None:
        """Restore a parked state to a newly opened slot and drop it; `shortage` of pages must be 0."""
        self.restore(slot, parked)
        self.release(parked)

    def release(self, saved: SavedSequence) -> None:
        """Drop a saved state and the pages that no other saved state references."""
        for page in saved.pages:
            assert page.references > 0, "a saved state was released twice"
            page.references -= 1
            if page.references == 0:
                self.evict(page)
                self.drop_host_copy(page)
        if saved.tail is not None:
            self._free_host_page(saved.tail)

    def is_evictable(self, page: SavedPage) -> bool:
        """Return whether the page is in the pool and no slot uses it."""
        return page.index is not None and self.states.pages.references(page.index) == 1

    def offload(self, page: SavedPage) -> None:
        """Copy the page's bytes to host memory, unless they are there already."""
        if page.host is None:
            assert page.index is not None
            page.host = self._read_page(page.index)

    def evict(self, page: SavedPage) -> None:
        """Free the page's slot in the pool; without a host copy its content is lost."""
        if page.index is not None:
            del self._resident[page.index]
            self.states.pages.release([page.index])
            page.index = None

    def drop_host_copy(self, page: SavedPage) -> None:
        if page.host is not None:
            self._free_host_page(page.host)
            page.host = None

    def allocate_host_page(self) -> Tensor:
        """Return memory for the bytes of a page; releasing its owner frees it."""
        if not self._free:
            self._add_pages()
        page = self._free.pop()
        self._used.add(id(page))
        return page

    def _add_pages(self) -> None:
        count = max(1, min(_SLAB_BYTES // max(1, self.page_bytes), _SLAB_PAGES))
        slab = _host_memory((count, self.page_bytes), torch.uint8, self._device)
        self._free += slab.unbind()

    def reserve_pages(self, room: int) -> bool:
        """Pin memory of pages for the next snapshots, unless there is some; return whether it did."""
        if self._device.type != "cuda" or len(self._free) >= _AHEAD_PAGES or room < _SLAB_BYTES:
            return False
        before = len(self._free)
        with contextlib.suppress(MemoryError):
            self._add_pages()
        return len(self._free) > before

    def synchronize(self) -> None:
        """Wait for all asynchronous copies from and to the device."""
        if self._device.type == "cuda":
            wait_for_copies(self._device)
            torch.cuda.current_stream(self._device).synchronize()

    def _retain(self, index: int) -> SavedPage:
        self.states.pages.retain([index])
        page = self._resident[index] = SavedPage(index)
        return page

    def _free_host_page(self, page: Tensor) -> None:
        assert id(page) in self._used, "a host page is free already"
        self._used.remove(id(page))
        self._free.append(page)

    def _read_page(self, index: int) -> Tensor:
        parts = [plane[:, index].reshape(-1).view(torch.uint8) for plane in self.states.planes]
        return _copy_to_host(torch.cat(parts), self.allocate_host_page(), owned=True)

    def _write_page(self, index: int, page: Tensor) -> None:
        start, page = 0, page.to(self._device, non_blocking=True)
        for plane in self.states.planes:
            target = plane[:, index]
            end = start + target.numel() * target.itemsize
            target.copy_(page[start:end].view(target.dtype).view(target.shape))
            start = end


def _page_bytes(plane: Tensor) -> int:
    """Return the bytes of a page in a plane [attention layers, pages, ...], which may have no pages yet."""
    return plane.shape[0] * torch.Size(plane.shape[2:]).numel() * plane.itemsize
