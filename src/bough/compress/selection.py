"""Which units are kept within a budget, and the text that they make."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bough.compress.units import Unit

MASS = 0.95  # of all scores; the units that hold the rest are kept only as neighbours
NOUNS = {"sentence": "sentence", "line": "line", "block": "line", "row": "row", "element": "element"}


@dataclass(frozen=True, slots=True)
class Passage:
    """A text whose units are candidates."""

    text: str
    units: tuple[Unit, ...]
    costs: tuple[int, ...]  # tokens of each unit
    forced: frozenset[int] = frozenset()  # units that are always kept

    def unit_texts(self) -> list[str]:
        return [self.text[unit.start : unit.end] for unit in self.units]


class Selection:
    """The kept units of one passage, and their tokens with those of the lines in the gaps."""

    def __init__(self, passage: Passage, gap_cost: int):
        self.passage = passage
        self.kept: set[int] = set()
        self.cost = gap_cost if passage.units else 0  # everything is one gap
        self._gap = gap_cost

    def price(self, indices: Iterable[int]) -> int:
        """Return the tokens that keeping these units adds; less than 0 where they close gaps."""
        new = [index for index in indices if index not in self.kept]
        return sum(self.passage.costs[index] for index in new) + self._more_gaps(new) * self._gap

    def _more_gaps(self, new: Sequence[int]) -> int:
        """Return how many more gaps there are with these units: those that begin at one or right after it."""
        units, added, count = self.kept, set(new), len(self.passage.units)
        places = {place for index in new for place in (index, index + 1) if place < count}
        more = 0
        for place in places - units:
            began = place == 0 or place - 1 in units
            more += (place not in added and (began or place - 1 in added)) - began
        return more

    def with_needed(self, index: int) -> list[int]:
        return [*self.passage.units[index].needs, index]

    def add(self, indices: Sequence[int], price: int | None = None) -> None:
        """Keep these units; `price`: what that adds, where it is known."""
        self.cost += self.price(indices) if price is None else price
        self.kept.update(indices)


def price_of(passage: Passage, units: frozenset[int], gap_cost: int) -> int:
    """Return the tokens of these units and of the lines in the gaps."""
    selection = Selection(passage, gap_cost)
    return selection.cost + selection.price(units)


def choose(
    passages: Sequence[Passage],
    scores: Sequence[Sequence[float]],
    *,
    room: int,
    gap_cost: int,
    least: float = 0.0,
    neighbours: bool = True,
) -> list[frozenset[int]] | None:
    """Return the kept units of each passage, of `room` tokens in all; None: the forced ones do not fit.

    Best scores first, equal ones in the order of the text. `least`: a score that a unit needs. `neighbours`:
    what is left of the room goes to units beside those that are kept.
    """
    selections = [Selection(passage, gap_cost) for passage in passages]
    for selection in selections:
        for index in sorted(selection.passage.forced):
            selection.add(selection.with_needed(index))
    room -= sum(selection.cost for selection in selections)
    if room < 0:
        return None
    order = sorted(
        (
            (-score, at, index)
            for at, each in enumerate(scores)
            for index, score in enumerate(each)
            if score > 0
        ),
    )
    mass = MASS * sum(-score for score, _, _ in order)
    queue: list[tuple[int, int]] = []
    for score, at, index in order:
        if mass <= 0 or -score < least:
            break
        mass += score
        room -= (taken := _take(selections[at], index, room))
        if taken or index in selections[at].kept:
            queue.append((at, index))
    if neighbours:
        _grow(selections, queue, room)
    return [frozenset(selection.kept) for selection in selections]


def _take(selection: Selection, index: int, room: int) -> int:
    """Keep a unit and what it needs, if it fits; return its tokens."""
    if index in selection.kept:
        return 0
    unit_set = selection.with_needed(index)
    price = selection.price(unit_set)
    if price > room:
        return 0
    selection.add(unit_set, price)
    return price


def _grow(selections: Sequence[Selection], queue: list[tuple[int, int]], room: int) -> None:
    """Give the room that is left to neighbours of the kept units, best units first."""
    for at, index in queue:
        selection = selections[at]
        for beside in (index + 1, index - 1):
            if 0 <= beside < len(selection.passage.units) and beside not in selection.kept:
                room -= _take(selection, beside, room)
                if beside in selection.kept:
                    queue.append((at, beside))


def gap_line(units: Sequence[Unit], text: str) -> str:
    """Return the line that says what was left out."""
    kinds = Counter(NOUNS[unit.kind] for unit in units)
    noun = next(iter(kinds)) if len(kinds) == 1 else "line"
    span = text[units[0].start : units[-1].end]
    count = len(span.strip("\n").splitlines()) if noun == "line" else len(units)
    return f"[... {count} {noun}{'s' if count != 1 else ''} left out ...]"


def kept_text(passage: Passage, indices: Iterable[int], *, gaps: bool = True) -> str:
    """Return the passage with each run of units that are not kept replaced by one line.

    Without `gaps` what is left out at the beginning and the end is not said.
    """
    held = set(indices)
    parts: list[str] = []
    runs = list(_runs(len(passage.units), held.__contains__))
    for at, (keep, start, end) in enumerate(runs):
        units = passage.units[start:end]
        if keep:
            span = passage.text[units[0].start : units[-1].end]
            # The gaps around it are lines of their own; the indent of its first line stays.
            span = span if at == 0 else span.lstrip("\n") if "\n" in span[:1] else _unspaced(span, units[0])
            parts.append(span if at == len(runs) - 1 else span.rstrip())
        elif gaps or 0 < at < len(runs) - 1:
            parts.append(gap_line(units, passage.text))
    return "\n".join(parts)


def _unspaced(span: str, unit: Unit) -> str:
    """Return a sentence without the space that separated it from the one before."""
    return span.lstrip(" ") if unit.kind == "sentence" else span


def _runs(count: int, is_kept: Callable[[int], bool]) -> Iterable[tuple[bool, int, int]]:
    start = 0
    for index in range(1, count + 1):
        if index == count or is_kept(index) != is_kept(start):
            yield is_kept(start), start, index
            start = index
