"""Compressor: a conversation in, the same conversation with less of its long texts out.

Whatever goes wrong, the prompt is read exactly. The same conversations in the same order give the same texts.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from bough.compress.conversation import (
    CHARACTERS,
    INSTRUCTION,
    Message,
    Place,
    Wanted,
    bodies,
    candidates,
    edged,
    needs_whole,
    queries,
    question_spans,
    with_note,
    with_texts,
)
from bough.compress.history import CompressedTurn, Document, History
from bough.compress.scorer import Query, Scorer, ScoringFailed, never, scaled
from bough.compress.selection import Passage, choose, gap_line, kept_text, price_of
from bough.compress.units import Unit, split_units

EDGE = 512  # tokens kept at both ends of a last message that holds its own question
EDGE_SHARE = 8  # ... and at most this part of the room
NEAR_EDGE = 8  # units; instructions so near to the ends of a text are kept
ATTEMPTS = 6  # to meet the budget, which counts the tokens of the whole prompt
WHOLE_UNITS = 4  # a function is divided if fewer of its size would fit
MIN_DIVIDED = 200  # characters of a function that is never divided
ADDED_SCORE = 0.5  # of the best unit's score: a later question needs units above it
NOTE = "From the document above, left out before:"

Measure = Callable[[Sequence[Message]], int]  # tokens of the whole prompt
Count = Callable[[Sequence[str]], Sequence[int]]  # tokens of each text


@dataclass(frozen=True, slots=True)
class Report:
    """What compression did to a prompt."""

    sent_tokens: int
    kept_tokens: int
    score_s: float = 0.0  # of scoring and choosing
    scorer: str = ""
    reason: str = ""  # why the prompt is read exactly, if it is

    @property
    def exact(self) -> bool:
        # A text that is read whole after all still has its earlier additions.
        return self.kept_tokens >= self.sent_tokens

    @property
    def approximate(self) -> str:
        """Return the words in which answers name it."""
        share = 100 * self.kept_tokens / max(1, self.sent_tokens)
        return "" if self.exact else f"prompt compressed to {share:.3g}%"


@dataclass(frozen=True, slots=True)
class Compressed:
    messages: Sequence[Message]
    report: Report
    documents: Mapping[Place, Document]


class _Exact(Exception):
    """The prompt is to be read exactly; the reason is for the answer."""


class Compressor:
    def __init__(self, scorer: Scorer, count: Count):
        self.scorer = scorer
        self._count = count
        self._history = History()
        self._cancelled: Callable[[], bool] = never

    def compress(
        self,
        messages: Sequence[Message],
        settings: Wanted,
        measure: Measure,
        cancelled: Callable[[], bool] = never,
    ) -> Compressed | None:
        """Return what to read instead of the messages; None: nothing to do, and nothing to say."""
        if settings.mode == "off":
            return None
        sent = measure(messages)
        began, self._cancelled = time.perf_counter(), cancelled
        earlier = self._history.find(messages, settings)
        again = earlier is not None and earlier.messages == len(messages) and earlier.reason
        if not again and (earlier is None or not earlier.documents):
            read = earlier.sent if earlier is not None else 0
            if sent - read <= settings.above:
                # Nothing is to be won: short, or its beginning is in the prefix cache.
                self._history.store(
                    messages, settings, CompressedTurn(len(messages), sent, sent, settings.asked())
                )
                return None
        turn = self._turn(messages, settings, measure, sent, earlier)
        read_as = _apply(messages, turn)
        tokens_after = measure(read_as) if turn.documents else sent
        self._history.store(messages, settings, replace(turn, kept=tokens_after))
        spent = time.perf_counter() - began
        return Compressed(
            read_as, Report(sent, tokens_after, spent, self.scorer.name, turn.reason), turn.documents
        )

    def _turn(
        self,
        messages: Sequence[Message],
        settings: Wanted,
        measure: Measure,
        sent: int,
        earlier: CompressedTurn | None,
    ) -> CompressedTurn:
        if earlier is not None and earlier.messages == len(messages):
            return earlier
        turn = replace(
            earlier or CompressedTurn(0, 0, 0),
            messages=len(messages),
            sent=sent,
            asked=settings.asked(),
            reason="",
        )
        before = earlier.sent if earlier is not None else 0
        try:
            if earlier is not None and earlier.documents:
                turn = self._add(messages, settings, turn, earlier)
            if sent - before > settings.above:
                since = earlier.messages if earlier is not None else 0
                turn = self._shorten(messages, settings, measure, turn, since=since)
        except (_Exact, ScoringFailed) as error:
            # What is new is read exactly; what was shortened before stays as it was.
            turn = replace(turn, reason="" if turn.documents else str(error))
        return turn

    def _shorten(
        self,
        messages: Sequence[Message],
        settings: Wanted,
        measure: Measure,
        turn: CompressedTurn,
        *,
        since: int,
    ) -> CompressedTurn:
        """Shorten the long texts among the messages from `since` on; raise _Exact if that cannot be."""
        if settings.exact:
            raise _Exact(settings.exact)
        bodies = candidates(messages, settings, since=since)
        if not bodies:
            raise _Exact("there is no document or tool result that may be shortened")
        asked = queries(messages, settings, bodies)
        if settings.mode != "on" and (words := needs_whole(asked)):
            raise _Exact(f"the question needs the whole text ({words!r})")
        base = _apply(messages, turn)
        sent = measure(base) if turn.documents else turn.sent
        # What was read before has had its own budget.
        read = turn.kept if since else 0
        budget = settings.budget(sent - read)
        most = max(MIN_DIVIDED, budget * CHARACTERS // WHOLE_UNITS)
        passages = self._passages([body.text for body in bodies], most=most)
        room = budget - (sent - read - sum(sum(passage.costs) for passage in passages))
        if room <= 0:
            raise _Exact(f"what is always kept has {budget - room} tokens, the budget is {budget}")
        asking = edged(messages)
        passages = [
            replace(passage, forced=_forced(passage, settings, room, edges=body.message == asking))
            for body, passage in zip(bodies, passages, strict=True)
        ]
        scores, gap = self._scores(passages, asked), self._gap_cost()
        for _ in range(ATTEMPTS):
            selected = choose(passages, scores, room=room, gap_cost=gap)
            if selected is None or not any(selected):
                break
            documents = {
                body.place: Document(passage, units)
                for body, passage, units in zip(bodies, passages, selected, strict=True)
            }
            new = replace(turn, documents={**turn.documents, **documents})
            excess = measure(_apply(messages, new)) - read - budget
            if excess <= 0:
                return new
            # Less than this choice takes, not only less room: it may have left more than the excess.
            taken = sum(
                price_of(passage, units, gap) for passage, units in zip(passages, selected, strict=True)
            )
            room = min(room, taken) - excess
        raise _Exact(f"the budget of {budget} tokens is too small")

    def _add(
        self, messages: Sequence[Message], settings: Wanted, turn: CompressedTurn, earlier: CompressedTurn
    ) -> CompressedTurn:
        """Add what a later question needs of the texts that were shortened before, in front of it."""
        last = len(messages) - 1
        shortened = {place: document for place, document in earlier.documents.items() if not document.whole}
        if (
            not shortened
            or messages[last].get("role") != "user"
            or not any(body.message == last for body in bodies(messages))
        ):
            return turn
        asked = queries(
            messages, settings, [body for body in bodies(messages) if body.place in turn.documents]
        )
        if settings.mode != "on" and needs_whole(asked):
            return replace(
                turn,
                documents={**turn.documents, **{p: replace(d, whole=True) for p, d in shortened.items()}},
            )
        passages = [replace(document.passage, forced=frozenset()) for document in shortened.values()]
        try:
            scores = self._scores(passages, asked)
        except _Exact:
            return turn  # nothing in the texts has to do with the question
        gap = self._gap_cost()
        # Gaps at both ends of what is added are not written.
        room = sum(
            2 * gap + sum(document.passage.costs[index] for index in document.kept)
            for document in shortened.values()
        )
        selected = choose(
            passages,
            scores,
            room=room,
            gap_cost=gap,
            least=ADDED_SCORE * max(max(document, default=0.0) for document in scores),
            neighbours=False,
        )
        documents = dict(turn.documents)
        texts = []
        for (place, document), units in zip(shortened.items(), selected or (), strict=False):
            new = units - document.kept - document.added
            if not new:
                continue
            grown = replace(document, added=document.added | new)
            grown = replace(grown, whole=2 * grown.added_tokens > grown.tokens)
            documents[place] = grown
            if not grown.whole:
                texts.append(kept_text(document.passage, new, gaps=False))
        notes = dict(turn.notes) | ({last: "\n".join([NOTE, *texts])} if texts else {})
        return replace(turn, documents=documents, notes=notes)

    def _scores(self, passages: Sequence[Passage], asked: Sequence[Query]) -> list[list[float]]:
        if not asked:
            raise _Exact("there is no question")
        units = [text for passage in passages for text in passage.unit_texts()]
        scores = scaled(self.scorer.score(units, asked, self._cancelled))
        if not any(scores):
            raise _Exact("nothing in the text has to do with the question")
        out, start = [], 0
        for passage in passages:
            out.append(scores[start : start + len(passage.units)])
            start += len(passage.units)
        return out

    def _passages(self, texts: Sequence[str], *, most: int) -> list[Passage]:
        """Divide texts into units of at most `most` characters; the scorer gets the same units at once."""
        split = [(text, tuple(split_units(text, most=most))) for text in texts]
        costs = iter(self._count([text[unit.start : unit.end] for text, units in split for unit in units]))
        return [Passage(text, units, tuple(islice(costs, len(units)))) for text, units in split]

    def _gap_cost(self) -> int:
        line = gap_line([Unit(0, 1, "sentence")] * 10, "x")
        return self._count([f"\n{line}\n"])[0]


def _apply(messages: Sequence[Message], turn: CompressedTurn) -> Sequence[Message]:
    """Return the messages as this turn reads them."""
    texts = {
        place: kept_text(each.passage, each.kept) for place, each in turn.documents.items() if not each.whole
    }
    out: Sequence[Message] = with_texts(messages, texts) if texts else messages
    for index, note in sorted(turn.notes.items()):
        out = with_note(out, index, note)
    return out


def _forced(passage: Passage, settings: Wanted, room: int, *, edges: bool) -> frozenset[int]:
    """Return the units that are kept whatever their score; `edges`: the question may be among them."""
    forced = _named(passage, settings) | _instructions(passage, room // EDGE_SHARE)
    if edges:
        forced |= _edges(passage, min(EDGE, room // EDGE_SHARE))
        asked = [(at, at + len(settings.query)) for at in _occurrences(passage.text, settings.query)]
        forced |= _within(passage, asked or question_spans(passage.text))
    return frozenset(forced)


def _named(passage: Passage, settings: Wanted) -> set[int]:
    """Return the units that hold a text which the caller names."""
    named = [text for text in settings.keep if isinstance(text, str) and text]
    return _within(
        passage, [(at, at + len(text)) for text in named for at in _occurrences(passage.text, text)]
    )


def _within(passage: Passage, spans: Sequence[tuple[int, int]]) -> set[int]:
    """Return the units that have a part of these spans."""
    ends = [unit.end for unit in passage.units]
    starts = [unit.start for unit in passage.units]
    return {
        index for start, end in spans for index in range(bisect_right(ends, start), bisect_left(starts, end))
    }


def _occurrences(text: str, part: str) -> list[int]:
    places, at = [], text.find(part) if part else -1
    while at >= 0:
        places.append(at)
        at = text.find(part, at + len(part))
    return places


def _instructions(passage: Passage, most: int) -> set[int]:
    """Return units near both ends that tell what to do, up to `most` tokens."""
    count = len(passage.units)
    near = {*range(min(NEAR_EDGE, count)), *range(max(0, count - NEAR_EDGE), count)}
    numbers: set[int] = set()
    for index in sorted(near):
        unit = passage.units[index]
        text = passage.text[unit.start : unit.end]
        if unit.kind in ("sentence", "line") and INSTRUCTION.match(text) and passage.costs[index] <= most:
            most -= passage.costs[index]
            numbers.add(index)
    return numbers


def _edges(passage: Passage, most: int) -> set[int]:
    """Return units at the beginning and the end, up to `most` tokens on each side."""
    numbers: set[int] = set()
    for order in (range(len(passage.units)), reversed(range(len(passage.units)))):
        left = most
        for index in order:
            left -= passage.costs[index]
            if left < 0:
                break
            numbers.add(index)
    return numbers
