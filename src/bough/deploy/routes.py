"""Which replica has what: sessions and prompt prefixes, by what was sent to each.

A prompt's prefixes are the hashes of its chunks, each with all tokens before it. Which of them a replica
still has in its prefix cache is not asked: what was sent there last is the best guess, and a wrong one costs
time alone.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

CHUNK = 32  # tokens
MOST_CHUNKS = 1 << 17  # 4 million tokens, about 40 MB
MOST_SESSIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Hint:
    """What of a request decides where it goes."""

    session: str = ""
    prefixes: tuple[int, ...] = ()  # hashes, shortest prefix first

    @classmethod
    def of(cls, session: str, ids: Sequence[int]) -> Self:
        prefixes, before = [], 0
        for start in range(0, len(ids) - CHUNK + 1, CHUNK):
            before = hash((before, *ids[start : start + CHUNK]))
            prefixes.append(before)
        return cls(session, tuple(prefixes))


class Routes:
    """The replica of each session and those of each prefix; the least recently used are forgotten."""

    def __init__(self, slots: int, queue: int):
        self._slots, self._most = slots, slots + queue  # of a replica: run at once; taken at all
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prefixes: OrderedDict[int, set[str]] = OrderedDict()
        self._routed = 0  # requests
        self._last: dict[str, int] = {}  # number of the last request of each replica

    def ranked(self, hint: Hint, loads: Mapping[str, int]) -> list[str]:
        """Return the replicas that take a request, best first.

        loads: requests on each replica. A session stays where it is as long as that replica takes requests.
        A prefix is no reason to wait for a slot while another replica has one. Equal ones take turns.
        """
        taking = [name for name, load in loads.items() if load < self._most]
        taking.sort(key=lambda name: (loads[name], self._last.get(name, 0)))
        replica = self._sessions.get(hint.session)
        best = [replica] if replica in taking else self._with_prefix(hint, taking)
        waits = all(loads[name] >= self._slots for name in best)
        if best != [replica] and waits and any(loads[name] < self._slots for name in taking):
            best = []
        return [*best, *(name for name in taking if name not in best)]

    def record(self, hint: Hint, replica: str) -> None:
        """Note that a request went to a replica."""
        self._routed += 1
        self._last[replica] = self._routed
        if hint.session:
            self._sessions[hint.session] = replica
            self._sessions.move_to_end(hint.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        for prefix in hint.prefixes:
            self._prefixes.setdefault(prefix, set()).add(replica)
        # The shortest ones are used by most prompts, and go last.
        for prefix in reversed(hint.prefixes):
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > MOST_CHUNKS:
            self._prefixes.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        self._last = {name: last for name, last in self._last.items() if name in replicas}
        self._sessions = OrderedDict(item for item in self._sessions.items() if item[1] in replicas)
        for holders in self._prefixes.values():
            holders.intersection_update(replicas)

    def _with_prefix(self, hint: Hint, replicas: Sequence[str]) -> list[str]:
        """Return those of the replicas that have the longest beginning of the prompt."""
        for prefix in reversed(hint.prefixes):
            having = self._prefixes.get(prefix, ())
            if holders := [each for each in replicas if each in having]:
                return holders
        return []
