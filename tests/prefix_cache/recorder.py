"""Recorder: a model that writes the tokens it reads into every KV page and recurrent state."""

from collections.abc import Sequence
from pathlib import Path

import torch

from bough.models.spec import ModelSpec
from bough.models.step import DeltaBuffers
from bough.prefix_cache.boundaries import SnapshotKind
from bough.prefix_cache.cache import PrefixCache, PrefixCacheConfig
from bough.prefix_cache.files import SnapshotFiles
from bough.prefix_cache.snapshot import Snapshot
from bough.state.draft_ring import SavedRings
from bough.state.sequences import PAGE, SequenceStates
from bough.state.snapshots import SnapshotStore

IDENTITY = "0123456789abcdef0123456789abcdef"


class Recorder:
    def __init__(
        self,
        spec: ModelSpec,
        *,
        budget: int = 1 << 30,
        pages: int = 16,
        folder: Path | None = None,
        limit: int = 1 << 30,
        identity: str = IDENTITY,
    ):
        self.states = SequenceStates(spec, max_ctx=pages * PAGE - 1)
        self.store = SnapshotStore(self.states)
        self.files = None if folder is None else SnapshotFiles(folder, identity, limit=limit)
        self.cache = PrefixCache(self.store, PrefixCacheConfig(budget, self.files))

    def read(
        self, tokens: Sequence[int], snapshots: dict[int, SnapshotKind], unused_s: float | None = None
    ) -> int:
        """Prefill a prompt whose chunks end anywhere, take snapshots, and return the cached tokens."""
        slot = self.states.open()
        found = self.cache.restore(slot, tokens, range(len(tokens)))
        done = found.length if found else 0
        self.check(slot, tokens[:done], found)
        for end in sorted({*snapshots, len(tokens)}):
            if end > done:
                self._write(slot, tokens[:end])
                if end in snapshots:
                    ring = torch.tensor(tokens[:end])
                    rings = SavedRings(end, 0, [(ring, -ring)])
                    self.cache.insert(
                        slot, tokens[:end], snapshots[end], lambda rings=rings: rings, unused_s=unused_s
                    )
        self.check(slot, tokens, None)
        self.states.close(slot)
        self.cache.write()
        return done

    def check(self, slot: int, tokens: Sequence[int], found: Snapshot | None) -> None:
        """Check that the slot holds exactly the state of these tokens."""
        positions = torch.arange(len(tokens))
        pages = self.states.buffers.page_table[slot][positions // PAGE]
        for plane in self.states.planes:
            held = plane[:, pages, :, positions % PAGE].float()
            shape = (-1, *(1,) * (held.dim() - 1)) if held.shape[0] == len(tokens) else (1, -1, 1, 1)
            assert torch.equal(held, torch.tensor(tokens).float().view(shape).expand_as(held))
        for layer in self.states.buffers.layers:
            if isinstance(layer, DeltaBuffers):
                assert bool((layer.state[slot] == float(sum(tokens))).all())
        if found is not None:
            assert found.draft is not None and found.draft.rings[0][0].tolist() == list(tokens)

    def restarted(self, spec: ModelSpec, **options) -> "Recorder":
        assert self.files is not None
        self.files.flush()
        return Recorder(spec, **options)

    def _write(self, slot: int, tokens: Sequence[int]) -> None:
        start = self.states.lengths[slot]
        self.cache.reserve(slot, len(tokens) - start)
        self.states.reserve(slot, len(tokens) - start)
        for position in range(start, len(tokens)):
            page = int(self.states.buffers.page_table[slot, position // PAGE])
            for plane in self.states.planes:
                plane[:, page, :, position % PAGE] = tokens[position]
        self.states.lengths[slot] = len(tokens)
        self.states.buffers.lengths[slot] = len(tokens)
        for layer in self.states.buffers.layers:
            if isinstance(layer, DeltaBuffers):
                layer.state[slot] = float(sum(tokens))
