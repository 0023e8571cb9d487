"""TokenConstraint: which tokens may follow each row of a tree: an end of reasoning, then a grammar, or what
keeps an answer from repeating itself.

Rows without a constraint have no mask and cost nothing. Imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from bough.session.loops import LoopFinder
from bough.session.repeats import Repeats, Written
from bough.text.grammar import Matcher

Mask = np.ndarray  # [vocabulary / 32] int32: a bit for each token that may follow


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSpec:
    """What a request constrains; None or an empty sequence is no constraint."""

    vocabulary: int
    ends: frozenset[int] = frozenset()  # end-of-text tokens, masked while a grammar is still to come
    reasoning: Literal["open", "possible", "none"] = "none"  # before the first token
    begin_reasoning: int | None = None  # the token that begins it
    end_reasoning: int | None = None
    budget: int | None = None  # tokens of reasoning
    break_loops: bool = False  # reasoning that repeats itself ends there as at the end of its budget
    closing: Sequence[int] = ()  # tokens forced at the end of the budget; the last one ends reasoning
    gap: Sequence[int] = ()  # tokens between reasoning and an answer with a grammar
    answer: Matcher | None = None
    call_token: int | None = None  # begins text that has to match `call`
    call: Matcher | None = None
    repeats: Repeats | None = None  # of an answer without a grammar and calls


@dataclass(frozen=True, slots=True)
class _State:
    phase: Literal["start", "reasoning", "gap", "answer", "call", "free"]
    count: int = 0  # tokens of this phase so far
    limit: int | None = None  # of these tokens, in reasoning
    matcher: Matcher | None = None
    written: Written | None = None  # of a free answer that must not repeat itself


class TokenConstraint:
    """The constraint of one request; only `accept` changes its state."""

    def __init__(self, spec: ConstraintSpec):
        self.spec = spec
        self._loops = LoopFinder() if spec.break_loops else None
        self.loops_ended = 0
        begun = {"open": _State("reasoning", limit=spec.budget), "possible": _State("start")}
        self._state = begun.get(spec.reasoning) or self._answer()

    @property
    def complete(self) -> bool:
        """Return whether the answer is complete and nothing may follow."""
        state = self._state
        return state.phase == "answer" and state.matcher is not None and state.matcher.complete

    def accept(self, tokens: Sequence[int]) -> int | None:
        """Advance by committed tokens; return how many of them complete the answer, None if it goes on."""
        for count, token in enumerate(tokens, 1):
            state, _ = self._next(self._state, token)
            assert state is not None, f"token {token} was sampled although the mask excludes it"
            self.loops_ended += state.phase == self._state.phase and state.limit != self._state.limit
            before, self._state = self._state, state
            if self._loops is not None:
                self._loops.commit()
            if self.complete or self._ended(before, token):
                return count
        return None

    def _ended(self, before: _State, token: int) -> bool:
        """Return whether the answer repeats itself with a token, which has been accepted."""
        if self.spec.repeats is None or self._state.written in (None, self.spec.repeats.beginning):
            return False
        return self.spec.repeats.accept(before.written or self.spec.repeats.beginning, token)

    def idle(self, rows: int) -> bool:
        """Return whether any token may follow each row of any tree with `rows` rows."""
        spec, state = self.spec, self._state
        if spec.repeats is not None and not spec.repeats.idle(rows):
            return False
        if spec.answer is not None or spec.call is not None or state.phase not in ("start", "reasoning"):
            return state.phase == "free" and spec.call is None
        limit = state.limit if state.phase == "reasoning" else spec.budget
        if limit is not None and limit - state.count < rows:
            return False
        return self._loops is None or self._loops.distance >= rows

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Mask | None]:
        """Return each row's mask, None for any token; row 0, the root, is the last committed token."""
        masks: list[Mask | None] = [None] * len(tokens)

        def visit(row: int, state: _State) -> None:
            masks[row] = self._mask(state)

        self._traverse(tokens, parents, visit)
        return masks

    def kept(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return the rows of a tree that can be accepted, in order."""
        rows: list[int] = []
        self._traverse(tokens, parents, lambda row, state: rows.append(row))
        return sorted(rows)

    def forced(self, limit: int) -> list[int]:
        """Return tokens of the only text that can follow, which may be tokenised differently."""
        tokens: list[int] = []
        moved: list[Matcher | LoopFinder] = []
        state: _State | None = self._state
        while state is not None:
            for token in self._forced_in(state)[: limit - len(tokens)] or [None]:
                state, matcher = self._next(state, token) if state and token is not None else (None, None)
                if matcher is not None:
                    moved.append(matcher)
                if state is not None and token is not None:
                    tokens.append(token)
        for matcher in reversed(moved):
            matcher.back()
        return tokens

    def _forced_in(self, state: _State) -> list[int]:
        spec = self.spec
        if state.phase == "reasoning" and state.limit is not None and state.count >= state.limit:
            return list(spec.closing[state.count - state.limit :])
        if state.phase == "gap":
            return list(spec.gap[state.count :])
        return state.matcher.forced() if state.matcher is not None else []

    def _mask(self, state: _State) -> Mask | None:
        spec = self.spec
        if state.phase == "start":
            if spec.answer is None:
                return None
            mask = spec.answer.mask().copy()
            if spec.begin_reasoning is not None:
                mask |= self._only(spec.begin_reasoning)
            return mask
        if state.phase in ("reasoning", "gap"):
            forced = self._forced_in(state)
            if forced:
                return self._only(forced[0])
            return self._no_end if spec.answer is not None and spec.ends else None
        if state.matcher is not None:
            return state.matcher.mask()
        return ~self._only(*forbidden) if (forbidden := self._forbidden(state)) else None

    def _forbidden(self, state: _State) -> list[int]:
        """Return the tokens that may not follow a free answer."""
        repeats, written = self.spec.repeats, state.written
        return [] if repeats is None or written is None else repeats.forbidden(written)

    def _only(self, *tokens: int) -> Mask:
        mask = np.zeros(-(-self.spec.vocabulary // 32), dtype=np.uint32)
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask.view(np.int32)

    @cached_property
    def _no_end(self) -> Mask:
        return ~self._only(*self.spec.ends)

    def _answer(self) -> _State:
        spec = self.spec
        if spec.answer is not None:
            return _State("answer", matcher=spec.answer)
        return _State("free", written=None if spec.repeats is None else spec.repeats.beginning)

    def _next(self, state: _State, token: int) -> tuple[_State | None, Matcher | LoopFinder | None]:
        """Return the state after `token`, None where it may not follow, and what has advanced."""
        spec = self.spec
        match state.phase:
            case "start":
                if token == spec.begin_reasoning:
                    return _State("reasoning", limit=spec.budget), None
                return self._next(self._answer(), token)
            case "reasoning" | "gap":
                forced = self._forced_in(state)
                if (forced and token != forced[0]) or (spec.answer is not None and token in spec.ends):
                    return None, None
                if state.phase == "reasoning" and token == spec.end_reasoning:
                    gap = spec.answer is not None and len(spec.gap) > 0
                    return _State("gap") if gap else self._answer(), None
                after = replace(state, count=state.count + 1)
                if state.phase == "reasoning":
                    return (after, None) if forced else self._repeated(after, token)
                return self._answer() if after.count == len(spec.gap) else after, None
            case "free":
                if token == spec.call_token and spec.call is not None:
                    return _State("call", matcher=spec.call.fork()), None
                return self._written(state, token), None
        matcher = state.matcher
        assert matcher is not None
        if not matcher.advance(token):
            return None, None
        return _State("free") if state.phase == "call" and matcher.complete else state, matcher

    def _written(self, state: _State, token: int) -> _State | None:
        if self.spec.repeats is None or state.written is None:
            return state
        written = self.spec.repeats.after(state.written, token)
        return None if written is None else replace(state, written=written)

    def _repeated(self, state: _State, token: int) -> tuple[_State, LoopFinder | None]:
        """Return the state of reasoning after a token, which is its last one if it completes a loop."""
        if self._loops is None:
            return state, None
        self._loops.advance(token)
        return replace(state, limit=state.count) if self._loops.found else state, self._loops

    def _traverse(
        self, tokens: Sequence[int], parents: Sequence[int], visit: Callable[[int, _State], None]
    ) -> None:
        """Call `visit(row, state)` for every row that can be accepted, parents first."""
        children: list[list[int]] = [[] for _ in tokens]
        for row, parent in enumerate(parents):
            if row:
                children[parent].append(row)

        def descend(row: int, state: _State) -> None:
            visit(row, state)
            for child in children[row]:
                after, moved = self._next(state, tokens[child])
                if after is not None:
                    descend(child, after)
                if moved is not None:
                    moved.back()

        descend(0, self._state)
