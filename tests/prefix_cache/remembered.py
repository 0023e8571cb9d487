"""A stand-in for a model that writes down what it reads: every page and every state shows its tokens."""

from collections.abc import Sequence
from pathlib import Path

import torch

from treeflash.models.spec import ModelSpec
from treeflash.models.step import DeltaBuffers
from treeflash.prefix_cache.boundaries import Kind
from treeflash.prefix_cache.cache import PrefixCache, PrefixCacheConfig
from treeflash.prefix_cache.files import SnapshotFiles
from treeflash.prefix_cache.snapshot import Snapshot
from treeflash.state.draft_ring import SavedRings
from treeflash.state.sequences import PAGE, SequenceStates
from treeflash.state.snapshots import SavedStates

IDENTITY = "0123456789abcdef0123456789abcdef"


class Reader:
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
        self.saves = SavedStates(self.states)
        self.files = None if folder is None else SnapshotFiles(folder, identity, limit=limit)
        self.cache = PrefixCache(self.saves, PrefixCacheConfig(budget, self.files))

    def read(self, tokens: Sequence[int], keep: dict[int, Kind]) -> int:
        """Reads a prompt that is cut after every token; states are kept where told. Tokens found there."""
        slot = self.states.open()
        found = self.cache.resume(slot, tokens, range(len(tokens)))
        done = found.length if found else 0
        self.check(slot, tokens[:done], found)
        for end in sorted({*keep, len(tokens)}):
            if end > done:
                self._write(slot, tokens[:end])
                if end in keep:
                    ring = torch.tensor(tokens[:end])
                    rings = SavedRings(end, 0, [(ring, -ring)])
                    self.cache.put(slot, tokens[:end], keep[end], lambda rings=rings: rings)
        self.check(slot, tokens, None)
        self.states.close(slot)
        self.cache.write()
        return done

    def check(self, slot: int, tokens: Sequence[int], found: Snapshot | None) -> None:
        """The slot holds what these tokens left, and nothing else's."""
        places = torch.arange(len(tokens))
        pages = self.states.buffers.page_table[slot][places // PAGE]
        for plane in self.states.planes:
            held = plane[:, pages, :, places % PAGE].float()
            shape = (-1, *(1,) * (held.dim() - 1)) if held.shape[0] == len(tokens) else (1, -1, 1, 1)
            assert torch.equal(held, torch.tensor(tokens).float().view(shape).expand_as(held))
        for layer in self.states.buffers.layers:
            if isinstance(layer, DeltaBuffers):
                assert bool((layer.state[slot] == float(sum(tokens))).all())
        if found is not None:
            assert found.draft is not None and found.draft.rings[0][0].tolist() == list(tokens)

    def restarted(self, spec: ModelSpec, **options) -> "Reader":
        assert self.files is not None
        self.files.flush()
        return Reader(spec, **options)

    def _write(self, slot: int, tokens: Sequence[int]) -> None:
        start = self.states.lengths[slot]
        self.cache.make_room(slot, len(tokens) - start)
        self.states.reserve(slot, len(tokens) - start)
        for place in range(start, len(tokens)):
            page = int(self.states.buffers.page_table[slot, place // PAGE])
            for plane in self.states.planes:
                plane[:, page, :, place % PAGE] = tokens[place]
        self.states.lengths[slot] = len(tokens)
        self.states.buffers.lengths[slot] = len(tokens)
        for layer in self.states.buffers.layers:
            if isinstance(layer, DeltaBuffers):
                layer.state[slot] = float(sum(tokens))
