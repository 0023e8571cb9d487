"""Which pages of the KV pool belong to which sequence slot; numbers only, no tensors."""

import heapq
from collections import Counter
from collections.abc import Iterable


class PageAllocator:
    """Hands out the lowest free pages, so that a lone sequence's pages lie in a row.

    A full page never changes again, so slots and saved states may hold it together: it is free when the last
    of them lets go.
    """

    def __init__(self, slots: int):
        self.owned: list[list[int]] = [[] for _ in range(slots)]
        self._free: list[int] = []
        self._holders: Counter[int] = Counter()
        self.capacity = 0

    def missing(self, slot: int, pages: int) -> int:
        """How many pages the pool lacks for `slot` to own `pages` of them."""
        return max(0, pages - len(self.owned[slot]) - len(self._free))

    @property
    def free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def grow(self, capacity: int) -> None:
        for page in range(self.capacity, capacity):
            heapq.heappush(self._free, page)
        self.capacity = max(self.capacity, capacity)

    def take(self, slot: int, pages: int) -> list[int]:
        """Lets `slot` own `pages` pages in all and returns the new ones."""
        new = self.grant(pages - len(self.owned[slot]))
        self.owned[slot] += new
        return new

    def grant(self, count: int) -> list[int]:
        """Free pages that the caller holds from now on."""
        new = [heapq.heappop(self._free) for _ in range(count)]
        self.hold(new)
        return new

    def adopt(self, slot: int, pages: list[int]) -> None:
        """Lets an empty slot begin with pages that others hold."""
        assert not self.owned[slot]
        self.hold(pages)
        self.owned[slot] = list(pages)

    def release(self, slot: int) -> None:
        self.drop(self.owned[slot])
        self.owned[slot] = []

    def hold(self, pages: Iterable[int]) -> None:
        self._holders.update(pages)

    def drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                heapq.heappush(self._free, page)
