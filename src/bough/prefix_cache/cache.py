"""PrefixCache: snapshots of earlier conversations, for prompts that share a prefix with them.

A snapshot is the immutable state of a sequence after some tokens and is found by exactly these tokens. Its KV
pages stay in the device pool while there is room and are offloaded to host memory after that. When the host
budget is used up, snapshots are evicted: first those that a longer one of the conversation supersedes, then
the least recently used.
"""

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch

from bough.prefix_cache.boundaries import SnapshotKind
from bough.prefix_cache.files import SnapshotFile, SnapshotFiles
from bough.prefix_cache.snapshot import Snapshot, SnapshotList, packed
from bough.state.draft_ring import SavedRings
from bough.state.snapshots import SavedPage, SavedSequence, SnapshotStore

log = logging.getLogger(__name__)

_MAX_SNAPSHOTS = 256  # of any size: each prompt is compared with all of them
_KEPT = 4  # snapshots that stay, even if memory has to be pinned for the next one
_AHEAD = 4  # snapshots for each slot that host memory is pinned for while nothing runs


@dataclass(frozen=True, slots=True)
class PrefixUsage:
    snapshots: int
    device_bytes: int  # of pool pages that snapshots hold
    host_bytes: int
    disk_snapshots: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    budget: int = 0  # bytes of host memory for snapshots; 0 disables the cache
    files: SnapshotFiles | None = None  # snapshots on disk, which outlive the process
    exact: bool = False  # without states that decoding computed


class PrefixCache:
    def __init__(self, store: SnapshotStore, config: PrefixCacheConfig):
        self.store, self._budget, self._files = store, config.budget, config.files
        self._exact = config.exact
        self._snapshots = SnapshotList(store)
        self._unwritten: list[Snapshot] = []  # inserted since the last `write`
        self._warned = False

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    @property
    def usage(self) -> PrefixUsage:
        files = self._files.entries if self._files else ()
        return PrefixUsage(
            snapshots=len(self._snapshots),
            device_bytes=self.store.device_bytes,
            host_bytes=self._host_bytes,
            disk_snapshots=len(files),
            disk_bytes=sum(each.nbytes for each in files),
        )

    def restore(self, slot: int, ids: Sequence[int], ends: Container[int]) -> Snapshot | None:
        """Restore the snapshot that `match` finds to a newly opened slot."""
        snapshot = self.match(ids, ends)
        if snapshot is not None:
            self._evict_pages(lambda: self.store.shortage(slot, snapshot.state), keep=snapshot)
            self.store.restore(slot, snapshot.state)
        return snapshot

    def match(self, ids: Sequence[int], ends: Container[int]) -> Snapshot | None:
        """Return the longest snapshot of a proper prefix of `ids` that ends with a chunk or an answer."""
        if not self.enabled:
            return None
        before_last = packed(ids[:-1])

        def usable(snapshot: Snapshot | SnapshotFile) -> bool:
            if snapshot.nbytes > self._budget or not before_last.startswith(snapshot.tokens):
                return False
            if self._exact and snapshot.after_answer:
                return False
            return snapshot.kind == "answer" or snapshot.length in ends

        while True:
            all_entries = [*self._snapshots, *(self._files.entries if self._files else ())]
            longest_first = sorted(all_entries, key=lambda each: -each.length)
            match = next(filter(usable, longest_first), None)
            if isinstance(match, SnapshotFile):
                self._load(match)  # a file that cannot be read is removed from the entries
                continue
            if match is not None:
                self._snapshots.touch(match)
                if self._files:
                    self._files.touch(match.tokens)
            return match

    def insert(
        self,
        slot: int,
        tokens: Sequence[int],
        kind: SnapshotKind,
        draft: Callable[[], SavedRings | None],
        *,
        after_answer: bool = False,
        unused_s: float | None = None,
    ) -> None:
        """Take a snapshot of a slot's state after `tokens`, and evict others to stay within the budget.

        after_answer: decoding computed some of the state, beyond what `kind` says. unused_s: nobody has asked
        for it yet; it stays in memory, and after that time without a use it is evicted first. Memory of old
        snapshots is used before any is pinned: others wait, or this user's next request.
        """
        after_answer = after_answer or kind == "answer"
        if self._exact and after_answer:
            return
        self._evict_for(self.store.state_bytes)
        try:
            rings = draft()
            state = self.store.save(slot)
        except MemoryError:
            return self._lower_budget()
        assert state.length == len(tokens)
        expires = None if unused_s is None else time.monotonic() + unused_s
        snapshot = Snapshot(packed(tokens), kind, state, rings, after_answer, expires=expires)
        if snapshot.nbytes > self._budget:
            self._warn_too_large(snapshot)
        self._add(snapshot)
        if expires is None:
            self._unwritten.append(snapshot)
        self._evict_to_budget()

    def reserve(self, slot: int, rows: int) -> None:
        """Evict pages that only snapshots hold until the pool has room for `rows` more rows of a slot."""
        self._evict_pages(lambda: self.store.states.shortage(slot, rows))

    def reserve_for(self, slot: int, saved: SavedSequence) -> None:
        """Evict pages that only snapshots hold until a saved state can be restored to an empty slot."""
        self._evict_pages(lambda: self.store.shortage(slot, saved))

    def _evict_pages(self, shortage: Callable[[], int], *, keep: Snapshot | None = None) -> None:
        """Offload pages, then evict snapshots other than `keep`, until the shortage is 0 or none is left."""
        while pages := shortage():
            freed = 0
            for page in self._snapshots.lru_pages(keep):
                full = page.host is None and self._host_bytes + self.store.page_bytes > self._budget
                if full or freed == pages or not self._offload([page]):
                    break
                self.store.evict(page)
                freed += 1
            if not freed and not self._evict_lru(keep):
                return

    def use_idle_time(self) -> bool:
        """Pin a piece of host memory for the next snapshots; return whether there is more to do."""
        room = self._budget - self._host_bytes
        goal = min(room, _AHEAD * len(self.store.states.lengths) * self.store.state_bytes)
        if not self.enabled:
            return False
        return self.store.reserve_pages(room) or self.store.reserve.grow(self._snapshots.pinned_bytes, goal)

    def _evict_for(self, nbytes: int) -> None:
        """Evict snapshots, but the last few, until so much of the memory that is pinned already is free."""
        pinned = self.store.reserve.pinned  # 0: there was no idle time yet
        while pinned and len(self._snapshots) > _KEPT and self._snapshots.pinned_bytes + nbytes > pinned:
            if not self._evict_lru(None):
                return

    @torch.inference_mode()
    def write(self) -> None:
        """Queue the snapshots inserted since the last call for writing to disk, unless evicted meanwhile."""
        unwritten, self._unwritten = self._unwritten, []
        if self._files is None:
            return
        for snapshot in unwritten:
            if snapshot.kind == "grid" or snapshot.superseded or snapshot not in self._snapshots:
                continue
            copies = sum(page.host is None for page in snapshot.state.pages) * self.store.page_bytes
            while self._host_bytes + copies > self._budget and self._evict_lru(snapshot):
                pass
            if self._host_bytes + copies > self._budget:
                continue
            if self._offload(snapshot.state.pages):
                self.store.synchronize()
                self._files.write(snapshot)

    def clear(self) -> None:
        """Evict everything from memory; files stay."""
        if self._files:
            self._files.flush()
        while self._evict_lru(None):
            pass

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def _host_bytes(self) -> int:
        return self.store.host_page_bytes + self._snapshots.pinned_bytes

    def _add(self, snapshot: Snapshot) -> None:
        for other in list(self._snapshots):
            if other.tokens == snapshot.tokens:
                self._remove(other)
            elif other.kind == snapshot.kind != "head" and snapshot.tokens.startswith(other.tokens):
                other.superseded = True
        self._snapshots.add(snapshot)

    def _load(self, entry: SnapshotFile) -> None:
        assert self._files is not None
        self.store.synchronize()
        read = self._files.read(entry, self.store)
        if read is not None:
            snapshot = Snapshot(entry.tokens, entry.kind, *read, entry.after_answer)
            self._add(snapshot)
            self._evict_to_budget(keep=snapshot)

    def _evict_to_budget(self, keep: Snapshot | None = None) -> None:
        """Drop redundant host copies, then evict snapshots, until host memory is within the budget."""
        if len(self._snapshots) > _MAX_SNAPSHOTS:
            self._evict_lru(keep)
        if self._host_bytes <= self._budget:
            return
        pinned = {id(page) for each in self._pinned(keep) for page in each.state.pages}
        for page in self._snapshots.lru_pages(None):
            if self._host_bytes <= self._budget:
                return
            if page.host is not None and id(page) not in pinned:
                self.store.drop_host_copy(page)  # the page is in the pool, too
        while self._host_bytes > self._budget and self._evict_lru(keep):
            pass

    def _offload(self, pages: Sequence[SavedPage]) -> bool:
        """Copy pages to host memory; return whether there was enough."""
        try:
            for page in pages:
                self.store.offload(page)
        except MemoryError:
            self._lower_budget()
            return False
        return True

    def _lower_budget(self) -> None:
        """Lower the budget to what is in use: the system has less memory than was granted."""
        self._budget = min(self._budget, self._host_bytes)
        log.warning("no more than %d MiB could be allocated for the prefix cache", self._budget >> 20)

    def _warn_too_large(self, snapshot: Snapshot) -> None:
        """Warn once: snapshots of other prompts are about as large."""
        if not self._warned:
            log.warning(
                "%d tokens are not cached: their snapshot takes %.1f MiB, `prefix_cache` is %.1f MiB",
                snapshot.length,
                *(nbytes / 2**20 for nbytes in (snapshot.nbytes, self._budget)),
            )
        self._warned = True

    def _pinned(self, keep: Snapshot | None) -> list[Snapshot]:
        """Return `keep` and the snapshots that are being written, which must not change."""
        return [each for each in self._snapshots if each is keep or self._is_being_written(each)]

    def _is_being_written(self, snapshot: Snapshot) -> bool:
        return self._files is not None and self._files.is_writing(snapshot)

    def _evict_lru(self, keep: Snapshot | None) -> bool:
        pinned = self._pinned(keep)
        victim = next((each for each in self._snapshots.eviction_order() if each not in pinned), None)
        if victim is not None:
            self._remove(victim)
        return victim is not None

    def _remove(self, snapshot: Snapshot) -> None:
        if self._is_being_written(snapshot):
            assert self._files is not None
            self._files.flush()
        self._snapshots.remove(snapshot)
        self.store.release(snapshot.state)
