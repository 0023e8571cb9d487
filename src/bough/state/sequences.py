"""Every mutable tensor of the running sequences: paged KV cache, recurrent and convolution state, lengths.

A slot holds one sequence. A tree step writes its rows after the committed ones; `commit` keeps the accepted
path and drops the rest. Committed state is never overwritten by a tree, so a rejected branch needs no
rollback. Recurrent states advance over the accepted path at the start of the next forward; until then
`rollback` can shorten it, where the text ends inside a step.
"""

import contextlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.errors import ResourceError
from bough.kernels.commit import commit_path, host, move_rows
from bough.kernels.kv_cache.format import FORMATS, HeadPool, KVFormat, approximations
from bough.kernels.runtime.device import on_device
from bough.models.spec import ModelSpec
from bough.models.step import AttentionBuffers, Buffers, DeltaBuffers, Pending, Step
from bough.state.pages import PageAllocator

PAGE = 64  # tokens
_ALIGNMENT = 16  # bytes, of addresses that kernels are compiled for


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the KV cache is stored, and how far back a tree's rows attend."""

    k: KVFormat = FORMATS["f32"]
    v: KVFormat = FORMATS["f32"]
    window: int | None = None  # tokens; None: the whole context
    pages: int | None = None  # of the pool that all slots share; None: as many as all slots could ever fill


class SequenceStates:
    def __init__(
        self,
        spec: ModelSpec,
        *,
        max_ctx: int,
        slots: int = 1,
        max_rows: int = 1,
        device: torch.device | str = "cpu",
        cache: CacheConfig | None = None,
        input_dtype: torch.dtype = torch.float32,
        static: bool = False,
    ):
        """`input_dtype`: of the stored convolution inputs; the compute type loses nothing.

        `static`: all pages are allocated at once, and no buffer ever moves, as CUDA graphs need it.
        """
        cache = cache or CacheConfig()
        # A window that holds the whole context is none.
        window = None if cache.window is not None and cache.window >= max_ctx else cache.window
        self._spec = spec
        self._device = torch.device(device)
        self._input_dtype = input_dtype
        self._max_rows = max_rows
        self.max_ctx = max_ctx
        self.lengths = [0] * slots  # the host's copy of buffers.lengths
        self.offsets = [0] * slots  # and of buffers.offsets
        self._free_slots = list(range(slots))
        self.pages = PageAllocator(slots)
        self._keys, self._values = (self._pool(format, 0) for format in (cache.k, cache.v))
        # Of all delta layers, one after the other [layers, slots, ...]: a slot is cleared and saved at once.
        self.recurrent = self._recurrent(slots)
        deltas = iter(_layers(self.recurrent))
        self.buffers = Buffers(
            layers=tuple(self._attention(0) if kind == "attention" else next(deltas) for kind in spec.layers),
            page_table=self._zeros(slots, -(-(max_ctx + max_rows) // PAGE), dtype=torch.int64),
            lengths=self._zeros(slots, dtype=torch.int64),
            offsets=self._zeros(slots, dtype=torch.int64),
            pending=Pending(
                path=self._zeros(slots, max_rows, dtype=torch.int64),
                count=self._zeros(slots, dtype=torch.int64),
            ),
            window=window,
        )
        self._most_pages = cache.pages or self.buffers.page_table.numel()
        self.approximate = approximations(cache.k, cache.v, window)  # what of it is lossy, in words
        if static:
            # One more, for padding rows.
            self._most_pages += 1
            self._grow(self._most_pages)
            self.buffers = replace(self.buffers, spare_page=self.pages.allocate(1)[0])

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def open(self) -> int:
        """Return a free slot, cleared."""
        if not self._free_slots:
            raise ResourceError(f"all {len(self.lengths)} sequence slots are in use")
        slot = self._free_slots.pop(0)
        self.lengths[slot] = 0
        self.buffers.lengths[slot] = 0
        self.set_offset(slot, 0)
        self.buffers.pending.count[slot] = 0
        if self.recurrent is not None:
            self.recurrent.state[:, slot] = 0
            self.recurrent.window[:, slot] = 0
        return slot

    def close(self, slot: int) -> None:
        assert slot not in self._free_slots, f"slot {slot} is free already"
        self.pages.free_slot(slot)
        self._free_slots.append(slot)

    def set_offset(self, slot: int, offset: int) -> None:
        """Set what the rope positions of a slot's next rows have over their indices: an image has fewer."""
        if self.offsets[slot] != offset:
            self.offsets[slot] = offset
            self.buffers.offsets[slot] = offset

    def begin(self, slot: int, pages: list[int], length: int) -> None:
        """Start a fresh slot with `length` tokens in pages that it shares."""
        self.pages.share(slot, pages)
        self.buffers.page_table[slot, : len(pages)] = torch.tensor(
            pages, dtype=torch.int64, device=self._device
        )
        self.lengths[slot] = length
        self.buffers.lengths[slot] = length
        self.reserve(slot, 0)

    def shortage(self, slot: int, rows: int) -> int:
        """Return how many pages saved states must release before `reserve` can succeed."""
        missing = self.pages.missing(slot, -(-(self.lengths[slot] + rows) // PAGE))
        return max(0, self.pages.capacity + missing - self._most_pages)

    def has_pages(self, slot: int, rows: int) -> bool:
        """Return whether `reserve` has nothing to do."""
        return self.lengths[slot] + rows <= PAGE * len(self.pages.owned[slot])

    def reserve(self, slot: int, rows: int) -> None:
        """Allocate pages for `rows` rows after the slot's committed tokens."""
        pages = -(-(self.lengths[slot] + rows) // PAGE)
        self._provide(self.pages.missing(slot, pages))
        start = len(self.pages.owned[slot])
        new = self.pages.extend(slot, pages)
        if new:
            self.buffers.page_table[slot, start:pages] = on_device(new, self._device)

    def grant(self, count: int) -> list[int]:
        """Return pages of the pool that the caller owns."""
        self._provide(count - self.pages.free)
        return self.pages.allocate(count)

    def _provide(self, missing: int) -> None:
        """Grow the pool by at least `missing` pages."""
        if missing > 0:
            needed = self.pages.capacity + missing
            if needed > self._most_pages:
                raise ResourceError(f"{needed} KV pages needed, the pool has {self._most_pages}")
            self._grow(min(max(needed, 3 * self.pages.capacity // 2), self._most_pages))

    def advance(self, step: Step, slots: Iterable[int] | None = None) -> None:
        """Commit all rows of a prompt chunk; `slots`: its own, where the host knows them."""
        assert step.is_chunk
        self.buffers.lengths[step.slots] += step.rows
        for slot in step.slots.tolist() if slots is None else slots:
            self.lengths[slot] += step.rows

    def commit(self, step: Step, last: Tensor) -> Tensor:
        """Commit row `last` [S] of each slot's tree and its ancestors; -1 commits nothing.

        Return the committed rows [S], which the caller adds to `lengths`: there is no host/device
        synchronisation. The KV rows of the path are compacted now; the recurrent states advance over it at
        the start of the next forward pass.
        """
        assert step.ancestors is not None
        slots, buffers = step.slots, self.buffers
        state = {"path": buffers.pending.path, "count": buffers.pending.count, "lengths": buffers.lengths}
        kept = commit_path(step.ancestors, last, slots, step.first, **state)
        if self._spec.attention_layers:
            move_rows(self.planes, kept, slots, buffers.page_table)
        return kept.counts

    def commit_rows(self, slot: int, rows: list[int], *, size: int) -> None:
        """Commit an accepted path of one slot's tree of `size` rows, on a CPU; otherwise the same."""
        buffers = self.buffers
        state = {"path": buffers.pending.path, "count": buffers.pending.count, "lengths": buffers.lengths}
        start = host.commit_rows(rows, slot, size=size, **state)
        if self._spec.attention_layers and rows[-1] >= len(rows):
            host.move_rows(self.planes, rows, start, buffers.page_table[slot])

    def rollback(self, slot: int, count: int) -> None:
        """Remove the last `count` rows of the last commit, before the recurrent states advance over them."""
        assert 0 <= count <= self.lengths[slot]
        self.lengths[slot] -= count
        self.buffers.lengths[slot] -= count
        self.buffers.pending.count[slot] -= count

    def truncate(self, slot: int, length: int) -> None:
        """Remove the tokens after `length`, of a model without recurrent states."""
        assert self.recurrent is None and length <= self.lengths[slot]
        self.lengths[slot] = length
        self.buffers.lengths[slot] = length
        self.buffers.pending.count[slot] = 0

    def _grow(self, capacity: int) -> None:
        before, held = self.planes, self.pages.capacity
        self._keys, self._values = (self._pool(pool.format, capacity) for pool in (self._keys, self._values))
        for new, old in zip(self.planes, before, strict=True):
            new[:, :held] = old
        self.pages.grow(capacity)
        attention = iter(range(self._spec.attention_layers))
        self.buffers = replace(
            self.buffers,
            layers=tuple(
                self._attention(next(attention)) if isinstance(layer, AttentionBuffers) else layer
                for layer in self.buffers.layers
            ),
        )

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """Every tensor of the KV pool: [attention layers, pages, ...]."""
        return (*self._keys.planes, *self._values.planes)

    def _pool(self, format: KVFormat, pages: int) -> HeadPool:
        """[attention layers, pages, KV, page, row]."""
        layers, heads, dim = self._spec.attention_layers, self._spec.kv_heads, self._spec.head_dim
        size = layers * pages * heads * PAGE * format.row_bytes(dim)
        with self._allocating(size):
            if self._device.type == "cuda":
                return HeadPool.empty(format, (layers, pages, heads, PAGE), dim, self._device)
            # Heads outermost in memory: a head's tokens in consecutive pages are one matrix.
            pool = HeadPool.empty(format, (layers, heads, pages, PAGE), dim, self._device)
            return pool.map(lambda plane: plane.transpose(1, 2))

    def _attention(self, index: int) -> AttentionBuffers:
        return AttentionBuffers(self._keys[index], self._values[index])

    def _recurrent(self, slots: int) -> DeltaBuffers | None:
        delta, rows, dtype = self._spec.delta, self._max_rows, self._input_dtype
        if delta is None:
            return None
        return DeltaBuffers(
            state=self._stacked(slots, delta.value_heads, delta.head_dim, delta.head_dim),
            window=self._stacked(slots, delta.conv_width - 1, delta.channels, dtype=dtype),
            tree_inputs=self._stacked(slots, rows, delta.channels, dtype=dtype),
            tree_gates=self._stacked(slots, rows, 2, delta.value_heads),
        )

    def _stacked(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros [delta layers, *shape]; each layer is aligned."""
        layers = sum(kind != "attention" for kind in self._spec.layers)
        size, unit = torch.Size(shape).numel(), _ALIGNMENT // dtype.itemsize
        return self._zeros(layers, -(-size // unit) * unit, dtype=dtype)[:, :size].unflatten(1, shape)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        with self._allocating(dtype.itemsize * torch.Size(shape).numel()):
            return torch.zeros(shape, dtype=dtype, device=self._device)

    @contextlib.contextmanager
    def _allocating(self, size: int) -> Generator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(
                f"no memory for {size / 2**30:.2f} GiB of sequence state on {self._device}",
                "lower `max_ctx` or close other programs",
            ) from error


def _layers(stacked: DeltaBuffers | None) -> list[DeltaBuffers]:
    """Return the buffers of each delta layer."""
    if stacked is None:
        return []
    fields = (stacked.state, stacked.window, stacked.tree_inputs, stacked.tree_gates)
    return [DeltaBuffers(*parts) for parts in zip(*fields, strict=True)]
