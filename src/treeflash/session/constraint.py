"""Guide: which tokens may follow at every row of a tree: a limit on reasoning, then a grammar.

Knows no tensors. What it does not limit costs nothing: such rows have no mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from treeflash.text.grammar import Matcher

Mask = np.ndarray  # [vocabulary / 32] int32: a bit for each token that may follow


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidePlan:
    """What a request asks for; `None` and empty: nothing of the kind."""

    vocabulary: int
    ends: frozenset[int] = frozenset()  # tokens that end the text: not while a grammar is still due
    reasoning: Literal["open", "possible", "none"] = "none"  # before the first token
    begin_reasoning: int | None = None  # the token that does
    end_reasoning: int | None = None
    budget: int | None = None  # tokens of reasoning
    closing: Sequence[int] = ()  # that then end it, its end token the last of them
    gap: Sequence[int] = ()  # between reasoning and an answer with a grammar
    answer: Matcher | None = None
    call_token: int | None = None  # begins text that has to match `call`
    call: Matcher | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    phase: Literal["start", "reasoning", "gap", "answer", "call", "free"]
    count: int = 0  # tokens of this phase so far
    matcher: Matcher | None = None


class Guide:
    """One request's way; `accept` moves along it, all else only looks ahead."""

    def __init__(self, plan: GuidePlan):
        self._plan = plan
        phase = {"open": "reasoning", "possible": "start", "none": "answer"}[plan.reasoning]
        self._place = self._answer() if phase == "answer" else _Place(phase)

    @property
    def complete(self) -> bool:
        """Whether nothing more can follow."""
        place = self._place
        return place.phase == "answer" and place.matcher is not None and place.matcher.complete

    def accept(self, tokens: Sequence[int]) -> int | None:
        """Tokens that are decided, in order; a number: so many of them complete the answer."""
        for count, token in enumerate(tokens, 1):
            place, _ = self._next(self._place, token)
            assert place is not None, f"token {token} was drawn against the mask"
            self._place = place
            if self.complete:
                return count
        return None

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Mask | None]:
        """What may follow each row of a tree below the last decided token, row 0; None: anything."""
        found: list[Mask | None] = [None] * len(tokens)

        def see(row: int, place: _Place) -> None:
            found[row] = self._mask(place)

        self._visit(tokens, parents, see)
        return found

    def kept(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The rows of a tree that can come true, in their order."""
        found: list[int] = []
        self._visit(tokens, parents, lambda row, place: found.append(row))
        return sorted(found)

    def forced(self, limit: int) -> list[int]:
        """Tokens that will follow, or very likely so: there is no other text."""
        found: list[int] = []
        moved: list[Matcher] = []
        place: _Place | None = self._place
        while place is not None:
            for token in self._forced_at(place)[: limit - len(found)] or [None]:
                place, matcher = self._next(place, token) if place and token is not None else (None, None)
                if matcher is not None:
                    moved.append(matcher)
                if place is not None and token is not None:
                    found.append(token)
        for matcher in reversed(moved):
            matcher.back()
        return found

    def _forced_at(self, place: _Place) -> list[int]:
        plan = self._plan
        if place.phase == "reasoning" and plan.budget is not None and place.count >= plan.budget:
            return list(plan.closing[place.count - plan.budget :])
        if place.phase == "gap":
            return list(plan.gap[place.count :])
        return place.matcher.forced() if place.matcher is not None else []

    def _mask(self, place: _Place) -> Mask | None:
        plan = self._plan
        if place.phase == "start":
            if plan.answer is None:
                return None
            mask = plan.answer.mask().copy()
            if plan.begin_reasoning is not None:
                mask |= self._only(plan.begin_reasoning)
            return mask
        if place.phase in ("reasoning", "gap"):
            forced = self._forced_at(place)
            if forced:
                return self._only(forced[0])
            return self._no_end if plan.answer is not None and plan.ends else None
        return place.matcher.mask() if place.matcher is not None else None

    def _only(self, *tokens: int) -> Mask:
        mask = np.zeros(-(-self._plan.vocabulary // 32), dtype=np.uint32)
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask.view(np.int32)

    @cached_property
    def _no_end(self) -> Mask:
        return ~self._only(*self._plan.ends)

    def _answer(self) -> _Place:
        plan = self._plan
        return _Place("answer", matcher=plan.answer) if plan.answer is not None else _Place("free")

    def _next(self, place: _Place, token: int) -> tuple[_Place | None, Matcher | None]:
        """The place behind `token`, None where it may not follow; and the matcher that has moved for it."""
        plan = self._plan
        match place.phase:
            case "start":
                if token == plan.begin_reasoning:
                    return _Place("reasoning"), None
                return self._next(self._answer(), token)
            case "reasoning" | "gap":
                forced = self._forced_at(place)
                if (forced and token != forced[0]) or (plan.answer is not None and token in plan.ends):
                    return None, None
                if place.phase == "reasoning" and token == plan.end_reasoning:
                    gap = plan.answer is not None and len(plan.gap) > 0
                    return _Place("gap") if gap else self._answer(), None
                after = replace(place, count=place.count + 1)
                ended = place.phase == "gap" and after.count == len(plan.gap)
                return self._answer() if ended else after, None
            case "free":
                if token == plan.call_token and plan.call is not None:
                    return _Place("call", matcher=plan.call.fork()), None
                return place, None
        matcher = place.matcher
        assert matcher is not None
        if not matcher.advance(token):
            return None, None
        return _Place("free") if place.phase == "call" and matcher.complete else place, matcher

    def _visit(
        self, tokens: Sequence[int], parents: Sequence[int], see: Callable[[int, _Place], None]
    ) -> None:
        """`see(row, place)` for every row that can come true, parents first."""
        children: list[list[int]] = [[] for _ in tokens]
        for row, parent in enumerate(parents):
            if row:
                children[parent].append(row)

        def walk(row: int, place: _Place) -> None:
            see(row, place)
            for child in children[row]:
                after, moved = self._next(place, tokens[child])
                if after is not None:
                    walk(child, after)
                if moved is not None:
                    moved.back()

        walk(0, self._place)
