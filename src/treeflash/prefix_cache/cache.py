"""PrefixCache: states of earlier conversations, for prompts that begin as they did; knows no text.

A snapshot is everything a sequence consists of at one moment, as one value that nothing changes. It is found
by its exact tokens alone. Its keys and values lie in the pool while there is room, then outside it; where the
memory set aside is used up, snapshots go, those first that a later one of their conversation stands for.
"""

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import torch

from treeflash.prefix_cache.boundaries import Kind
from treeflash.prefix_cache.files import SnapshotFile, SnapshotFiles
from treeflash.prefix_cache.snapshot import Snapshot, packed
from treeflash.state.draft_ring import SavedRings
from treeflash.state.snapshots import SavedPage, SavedStates

log = logging.getLogger(__name__)

# Snapshots, however small: each of them is looked at when a prompt comes.
_MOST = 256


@dataclass(frozen=True, slots=True)
class PrefixUsage:
    snapshots: int
    device_bytes: int  # of pages that stay in the pool for them
    host_bytes: int
    disk_snapshots: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    budget: int = 0  # bytes of host memory for snapshots; 0: no prefix cache
    files: SnapshotFiles | None = None  # snapshots on disk, which outlive the process


class PrefixCache:
    def __init__(self, saves: SavedStates, config: PrefixCacheConfig):
        self.saves, self._budget, self._files = saves, config.budget, config.files
        self._snapshots: list[Snapshot] = []
        self._fresh: list[Snapshot] = []  # put since files were last written
        self._time = 0
        self._complained = False

    @property
    def keeps(self) -> bool:
        """Whether anything is remembered at all."""
        return self._budget > 0

    @property
    def usage(self) -> PrefixUsage:
        files = self._files.entries if self._files else ()
        return PrefixUsage(
            snapshots=len(self._snapshots),
            device_bytes=self.saves.device_bytes,
            host_bytes=self._host_bytes,
            disk_snapshots=len(files),
            disk_bytes=sum(each.nbytes for each in files),
        )

    def resume(self, slot: int, ids: Sequence[int], cuts: Container[int]) -> Snapshot | None:
        """Lets a slot that was just opened go on from the longest beginning of `ids` that is remembered.

        It ends where `ids` are cut, or with an answer, and leaves something of them to compute.
        """
        found = self.match(ids, cuts)
        if found is not None:
            self._free(lambda: self.saves.shortage(slot, found.state), keep=found)
            self.saves.restore(slot, found.state)
        return found

    def match(self, ids: Sequence[int], cuts: Container[int]) -> Snapshot | None:
        """The snapshot that `resume` takes."""
        if not self.keeps:
            return None
        before_last = packed(ids[:-1])

        def usable(each: Snapshot | SnapshotFile) -> bool:
            if each.nbytes > self._budget or not before_last.startswith(each.tokens):
                return False
            return each.kind == "answer" or each.length in cuts

        while True:
            known = [*self._snapshots, *(self._files.entries if self._files else ())]
            longest_first = sorted(known, key=lambda each: -each.length)
            found = next(filter(usable, longest_first), None)
            if isinstance(found, SnapshotFile):
                self._load(found)  # a file that cannot be read is no longer among the entries
                continue
            if found is not None:
                self._touch(found)
            return found

    def put(
        self, slot: int, tokens: Sequence[int], kind: Kind, draft: Callable[[], SavedRings | None]
    ) -> None:
        """Remembers a slot's state behind `tokens`, and forgets what that leaves no room for."""
        try:
            rings = draft()
            state = self.saves.save(slot)
        except MemoryError:
            return self._learn_limit()
        assert state.length == len(tokens)
        snapshot = Snapshot(packed(tokens), kind, state, rings)
        if snapshot.nbytes > self._budget:
            self._complain(snapshot)
        self._add(snapshot)
        self._fresh.append(snapshot)
        self._fit()

    def make_room(self, slot: int, rows: int) -> None:
        """In the pool, for rows behind a slot's tokens: pages leave it that only snapshots hold."""
        self._free(lambda: self.saves.states.shortage(slot, rows))

    def _free(self, shortage: Callable[[], int], *, keep: Snapshot | None = None) -> None:
        """Until nothing is short or nothing left; `keep` stays where it is."""
        while pages := shortage():
            freed = 0
            for page in self._coldest_pages(keep):
                full = page.cell is None and self._host_bytes + self.saves.cell_bytes > self._budget
                if full or freed == pages or not self._copy_out([page]):
                    break
                self.saves.leave_pool(page)
                freed += 1
            if not freed and not self._drop_coldest(keep):
                return

    @torch.inference_mode()
    def write(self) -> None:
        """Hands what was put since the last time to whoever writes files, as far as it is still here."""
        fresh, self._fresh = self._fresh, []
        if self._files is None:
            return
        for snapshot in fresh:
            if snapshot.kind == "grid" or snapshot.superseded or snapshot not in self._snapshots:
                continue
            copies = sum(page.cell is None for page in snapshot.state.pages) * self.saves.cell_bytes
            while self._host_bytes + copies > self._budget and self._drop_coldest(snapshot):
                pass
            if self._host_bytes + copies > self._budget:
                continue
            if self._copy_out(snapshot.state.pages):
                self.saves.wait()
                self._files.write(snapshot)

    def clear(self) -> None:
        """Forgets everything but files."""
        if self._files:
            self._files.flush()
        while self._drop_coldest(None):
            pass

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def _host_bytes(self) -> int:
        tails = sum(each.state.tail is not None for each in self._snapshots) * self.saves.cell_bytes
        return self.saves.cells_bytes - tails + sum(each.nbytes for each in self._snapshots)

    def _add(self, snapshot: Snapshot) -> None:
        for each in list(self._snapshots):
            if each.tokens == snapshot.tokens:
                self._drop(each)
            elif each.kind == snapshot.kind != "head" and snapshot.tokens.startswith(each.tokens):
                each.superseded = True
        self._snapshots.append(snapshot)
        self._stamp(snapshot)

    def _load(self, entry: SnapshotFile) -> None:
        assert self._files is not None
        self.saves.wait()
        read = self._files.read(entry, self.saves)
        if read is not None:
            snapshot = Snapshot(entry.tokens, entry.kind, *read)
            self._add(snapshot)
            self._fit(keep=snapshot)

    def _fit(self, keep: Snapshot | None = None) -> None:
        """Brings what lies outside the pool down to the budget."""
        if len(self._snapshots) > _MOST:
            self._drop_coldest(keep)
        if self._host_bytes <= self._budget:
            return
        busy = {id(page) for each in self._busy(keep) for page in each.state.pages}
        for page in self._coldest_pages(None):
            if self._host_bytes <= self._budget:
                return
            if page.cell is not None and id(page) not in busy:
                self.saves.drop_copy(page)  # it is in the pool, too
        while self._host_bytes > self._budget and self._drop_coldest(keep):
            pass

    def _copy_out(self, pages: Sequence[SavedPage]) -> bool:
        """Whether there was memory for it."""
        try:
            for page in pages:
                self.saves.copy_out(page)
        except MemoryError:
            self._learn_limit()
            return False
        return True

    def _learn_limit(self) -> None:
        """The system has less memory than was granted."""
        self._budget = min(self._budget, self._host_bytes)
        log.warning("no more than %d MiB could be had for remembered prompts", self._budget >> 20)

    def _complain(self, snapshot: Snapshot) -> None:
        """Once: other prompts take about as much."""
        if not self._complained:
            log.warning(
                "%d tokens are not remembered: their state takes %.1f MiB, --prefix-cache is %.1f MiB",
                snapshot.length,
                *(nbytes / 2**20 for nbytes in (snapshot.nbytes, self._budget)),
            )
        self._complained = True

    def _busy(self, keep: Snapshot | None) -> list[Snapshot]:
        """Snapshots that must stay as they are."""
        return [each for each in self._snapshots if each is keep or self._is_written(each)]

    def _is_written(self, snapshot: Snapshot) -> bool:
        return self._files is not None and self._files.is_writing(snapshot)

    def _coldest_pages(self, keep: Snapshot | None) -> Iterator[SavedPage]:
        """Pages that take room in the pool, those first whose last user will be forgotten first."""
        seen = {id(page) for page in keep.state.pages} if keep else set()
        groups = []
        for snapshot in reversed(self._by_worth()):
            own = [page for page in snapshot.state.pages if id(page) not in seen]
            seen |= {id(page) for page in own}
            groups.append([page for page in own if self.saves.is_idle(page)])
        for group in reversed(groups):
            yield from reversed(group)

    def _by_worth(self) -> list[Snapshot]:
        return sorted(self._snapshots, key=lambda each: (not each.superseded, each.used))

    def _drop_coldest(self, keep: Snapshot | None) -> bool:
        busy = self._busy(keep)
        victim = next((each for each in self._by_worth() if each not in busy), None)
        if victim is not None:
            self._drop(victim)
        return victim is not None

    def _drop(self, snapshot: Snapshot) -> None:
        if self._is_written(snapshot):
            assert self._files is not None
            self._files.flush()
        self._snapshots.remove(snapshot)
        self.saves.forget(snapshot.state)

    def _touch(self, snapshot: Snapshot) -> None:
        """It was used, and with it all that it goes on from."""
        snapshot.superseded = False
        below = [each for each in self._snapshots if snapshot.tokens.startswith(each.tokens)]
        for each in sorted(below, key=lambda each: each.length):
            self._stamp(each)
        if self._files:
            self._files.touch(snapshot.tokens)

    def _stamp(self, snapshot: Snapshot) -> None:
        self._time += 1
        snapshot.used = self._time
