"""Who proposes the tree of the coming step."""

from typing import Protocol

import torch

from treeflash.spec.tree import DraftTree


class Drafter(Protocol):
    def propose(self, anchor: int, position: int, limit: int) -> DraftTree:
        """A tree below `anchor`, which stands at `position`, of at most `limit` rows, the root included."""
        ...


class NoDrafter:
    """Plain decoding: the root alone."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = device

    def propose(self, anchor: int, position: int, limit: int) -> DraftTree:
        return DraftTree.root(anchor, self._device)
