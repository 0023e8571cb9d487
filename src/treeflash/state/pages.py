"""Which pages of the KV pool belong to which sequence slot; numbers only, no tensors."""

import heapq


class PageAllocator:
    """Hands out the lowest free pages, so that a lone sequence's pages lie in a row."""

    def __init__(self, slots: int):
        self.owned: list[list[int]] = [[] for _ in range(slots)]
        self._free: list[int] = []
        self.capacity = 0

    def missing(self, slot: int, pages: int) -> int:
        """How many pages the pool lacks for `slot` to own `pages` of them."""
        return max(0, pages - len(self.owned[slot]) - len(self._free))

    def grow(self, capacity: int) -> None:
        for page in range(self.capacity, capacity):
            heapq.heappush(self._free, page)
        self.capacity = max(self.capacity, capacity)

    def take(self, slot: int, pages: int) -> list[int]:
        """Lets `slot` own `pages` pages in all and returns the new ones."""
        new = [heapq.heappop(self._free) for _ in range(pages - len(self.owned[slot]))]
        self.owned[slot] += new
        return new

    def release(self, slot: int) -> None:
        for page in self.owned[slot]:
            heapq.heappush(self._free, page)
        self.owned[slot] = []
