"""PageAllocator: which pages of the KV pool each slot owns, with reference counts. Imports no torch."""

import heapq
from collections import Counter
from collections.abc import Iterable


class PageAllocator:
    """Allocates the lowest free pages first, so that the pages of a single sequence are contiguous.

    A full page is immutable, so slots and saved states share it. It is free once its reference count is 0.
    """

    def __init__(self, slots: int):
        self.owned: list[list[int]] = [[] for _ in range(slots)]
        self._free: list[int] = []
        self._references: Counter[int] = Counter()
        self.capacity = 0

    def missing(self, slot: int, pages: int) -> int:
        """Return how many pages the pool lacks for `slot` to own `pages` of them."""
        return max(0, pages - len(self.owned[slot]) - len(self._free))

    @property
    def free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def grow(self, capacity: int) -> None:
        for page in range(self.capacity, capacity):
            heapq.heappush(self._free, page)
        self.capacity = max(self.capacity, capacity)

    def extend(self, slot: int, pages: int) -> list[int]:
        """Extend `slot` to `pages` pages in total and return the new ones."""
        new = self.allocate(pages - len(self.owned[slot]))
        self.owned[slot] += new
        return new

    def allocate(self, count: int) -> list[int]:
        """Allocate free pages, each with one reference, which the caller owns."""
        new = [heapq.heappop(self._free) for _ in range(count)]
        self.retain(new)
        return new

    def share(self, slot: int, pages: list[int]) -> None:
        """Start an empty slot with pages that have other references, too."""
        assert not self.owned[slot]
        self.retain(pages)
        self.owned[slot] = list(pages)

    def free_slot(self, slot: int) -> None:
        self.release(self.owned[slot])
        self.owned[slot] = []

    def retain(self, pages: Iterable[int]) -> None:
        self._references.update(pages)

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free already"
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                heapq.heappush(self._free, page)
