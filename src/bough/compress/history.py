"""What earlier turns of a conversation were read as, so that later prompts begin with the same tokens."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from bough.compress.conversation import Message, Place, Wanted
from bough.compress.selection import Passage

TURNS = 64  # remembered, of all conversations together; their texts stay in memory


@dataclass(frozen=True, slots=True)
class Document:
    """A shortened text: what of it was read at first, and what has been added to later questions."""

    passage: Passage
    kept: frozenset[int]
    added: frozenset[int] = frozenset()
    whole: bool = False  # read exactly after all

    def runs(self) -> list[tuple[bool, str]]:
        """Return the text as runs that were read and runs that were not."""
        read = self.kept | self.added
        spans = [(self.whole or index in read, unit) for index, unit in enumerate(self.passage.units)]
        return [
            (keep, "".join(self.passage.text[unit.start : unit.end] for _, unit in run))
            for keep, run in groupby(spans, key=lambda each: each[0])
        ]

    @property
    def tokens(self) -> int:
        return sum(self.passage.costs)

    @property
    def added_tokens(self) -> int:
        return sum(self.passage.costs[index] for index in self.added)


@dataclass(frozen=True, slots=True)
class CompressedTurn:
    """How a request was read."""

    messages: int
    sent: int  # tokens of the prompt before compression
    kept: int  # ... and after it
    asked: tuple[str, ...] = ()  # see Wanted.asked
    documents: Mapping[Place, Document] = field(default_factory=dict)
    notes: Mapping[int, str] = field(default_factory=dict)  # in front of a message: what was added there
    reason: str = ""  # why the prompt was read exactly


class History:
    """Turns by their messages: a later request that begins with the same ones is their continuation."""

    def __init__(self, limit: int = TURNS):
        self._turns: OrderedDict[bytes, CompressedTurn] = OrderedDict()
        self._limit = limit

    def find(self, messages: Sequence[Message], settings: Wanted) -> CompressedTurn | None:
        """Return the longest turn that these messages begin with."""
        keys = _keys(messages, settings)
        for count in range(len(messages), 0, -1):
            turn = self._turns.get(keys[count - 1])
            if turn is not None and (count < len(messages) or turn.asked == settings.asked()):
                self._turns.move_to_end(keys[count - 1])
                return turn
        return None

    def store(self, messages: Sequence[Message], settings: Wanted, turn: CompressedTurn) -> None:
        self._turns[_keys(messages, settings)[-1]] = turn
        while len(self._turns) > self._limit:
            self._turns.popitem(last=False)


def _keys(messages: Sequence[Message], settings: Wanted) -> list[bytes]:
    """Return a key for every beginning of the conversation."""
    running = hashlib.sha256(repr(settings.identity()).encode())
    keys = []
    for message in messages:
        running.update(json.dumps(message, sort_keys=True, default=_plain).encode(errors="replace"))
        keys.append(running.digest())
    return keys


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
