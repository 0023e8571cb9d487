"""PrefixCache: states of earlier conversations, for prompts that begin as they did; knows no text.

A snapshot is everything a sequence consists of at one moment, as one value that nothing changes. It is found
by its exact tokens alone. Going on from it gives the text that a fresh start gives, except where two tokens
are as likely as each other up to rounding: the sums of a prompt cut at other places round differently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from treeflash.state.draft_ring import SavedRings
from treeflash.state.sequences import SavedSequence

# Where a prompt may be picked up again: behind the system message and tools, behind the last question, behind
# the last message, behind the answer.
Kind = Literal["head", "question", "turn", "answer"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    tokens: list[int]  # processed; never changed
    kind: Kind
    state: SavedSequence
    draft: SavedRings | None


class PrefixCache:
    """Keeps the newest snapshot of each kind for the conversations used last, and as many heads."""

    def __init__(self, forget: Callable[[SavedSequence], None], *, conversations: int = 2):
        self._forget = forget
        self._most = conversations
        self._heads: list[Snapshot] = []  # least recently used first
        self._conversations: list[dict[Kind, Snapshot]] = []  # least recently used first

    @property
    def keeps(self) -> bool:
        """Whether anything is remembered at all."""
        return self._most > 0

    def match(self, ids: Sequence[int]) -> Snapshot | None:
        """The longest snapshot that `ids` begin with and go on from."""
        before_last = list(ids[:-1])
        found = max(
            (snapshot for snapshot in self._all() if _begins(before_last, snapshot)),
            key=lambda snapshot: len(snapshot.tokens),
            default=None,
        )
        if found is not None:
            self._touch(found)
        return found

    def put(self, snapshot: Snapshot) -> None:
        """In place of the one of its kind in the conversation that it continues."""
        if self._most == 0:
            self._forget(snapshot.state)
            return
        if snapshot.kind == "head":
            self._drop([head for head in self._heads if head.tokens == snapshot.tokens])
            self._heads.append(snapshot)
            self._drop(self._heads[: -self._most])
            return
        conversation = self._conversation(snapshot)
        old = conversation.get(snapshot.kind)
        conversation[snapshot.kind] = snapshot
        if old is not None:
            self._forget(old.state)
        while len(self._conversations) > self._most:
            self._drop_conversation()

    def evict(self) -> bool:
        """Frees what was used longest ago; False where nothing is left."""
        if self._conversations:
            self._drop_conversation()
        elif self._heads:
            self._drop(self._heads[:1])
        else:
            return False
        return True

    def clear(self) -> None:
        while self.evict():
            pass

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> list[Snapshot]:
        return [*self._heads, *(each for group in self._conversations for each in group.values())]

    def _conversation(self, snapshot: Snapshot) -> dict[Kind, Snapshot]:
        """The one of which some state is a beginning of this one, else a new one; the newest afterwards."""
        for group in reversed(self._conversations):
            if any(_begins(snapshot.tokens, each) for each in group.values()):
                break
        else:
            group = {}
            self._conversations.append(group)
        self._newest(group)
        return group

    def _touch(self, snapshot: Snapshot) -> None:
        if snapshot.kind == "head":
            self._heads = [head for head in self._heads if head is not snapshot] + [snapshot]
        for group in self._conversations:
            if any(each is snapshot for each in group.values()):
                self._newest(group)
                break

    def _newest(self, group: dict[Kind, Snapshot]) -> None:
        self._conversations = [each for each in self._conversations if each is not group] + [group]

    def _drop(self, heads: list[Snapshot]) -> None:
        for head in heads:
            self._forget(head.state)
        gone = {id(head) for head in heads}
        self._heads = [head for head in self._heads if id(head) not in gone]

    def _drop_conversation(self) -> None:
        for snapshot in self._conversations.pop(0).values():
            self._forget(snapshot.state)


def _begins(ids: list[int], snapshot: Snapshot) -> bool:
    count = len(snapshot.tokens)
    return count <= len(ids) and ids[:count] == snapshot.tokens
