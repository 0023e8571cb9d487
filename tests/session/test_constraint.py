"""TokenConstraint: a row's mask equals the mask after accepting its path, and masks change no state."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.session.constraint import ConstraintSpec, Mask, TokenConstraint
from bough.text.grammar import Grammar, GrammarCompiler
from bough.text.tokenizer import Tokenizer
from tests.text.vocabulary import trained

TOKENIZER = Tokenizer.from_metadata(trained("qwen35")[0])
COMPILER = GrammarCompiler(TOKENIZER)
VOCABULARY = TOKENIZER.vocab_size
THINK, END_THINK, CALL = (TOKENIZER.id_of(tag) for tag in ("<think>", "</think>", "<tool_call>"))
LETTERS = [TOKENIZER.encode(letter)[0] for letter in "abcx"]
A, B, C, X = LETTERS
CLOSING = [X, END_THINK]
GAP = TOKENIZER.encode("\n\n")


def spec(**options) -> ConstraintSpec:
    return ConstraintSpec(
        vocabulary=VOCABULARY,
        ends=TOKENIZER.stop_ids,
        begin_reasoning=THINK,
        end_reasoning=END_THINK,
        closing=CLOSING,
        gap=GAP,
        **options,
    )


def grammar(expression: str = "(ab|ac|bca)+"):
    return COMPILER.compile(Grammar("regex", expression))


def bits(mask: Mask | None) -> set[int] | None:
    if mask is None:
        return None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY]).tolist())


def mask(constraint: TokenConstraint) -> set[int] | None:
    return bits(constraint.masks([0], [-1])[0])


OPTIONS = {
    "grammar": lambda: spec(answer=grammar()),
    "after reasoning": lambda: spec(reasoning="open", budget=3, answer=grammar()),
    "maybe reasoning": lambda: spec(reasoning="possible", budget=2, answer=grammar()),
    "reasoning alone": lambda: spec(reasoning="open", budget=4),
    "calls": lambda: spec(call_token=CALL, call=grammar("ab|cx")),
}
tokens = st.sampled_from([*LETTERS, THINK, END_THINK, CALL, *GAP, *sorted(TOKENIZER.stop_ids)])


def after(name: str, text: list[int]) -> TokenConstraint | None:
    """Return a constraint that has accepted `text`, None where it may not."""
    constraint = TokenConstraint(OPTIONS[name]())
    for token in text:
        legal = mask(constraint)
        if (legal is not None and token not in legal) or constraint.complete:
            return None
        constraint.accept([token])
    return constraint


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(OPTIONS)))
def test_masks_of_rows_follow_their_paths(data: st.DataObject, name: str) -> None:
    before = data.draw(st.lists(tokens, max_size=6))
    while (constraint := after(name, before)) is None:
        before.pop()
    count = data.draw(st.integers(1, 14))
    parents = [-1] + [data.draw(st.integers(max(0, row - 3), row - 1)) for row in range(1, count)]
    rows = [0] + [data.draw(tokens) for _ in range(1, count)]
    paths: list[list[int]] = [before]
    for row in range(1, count):
        paths.append([*paths[parents[row]], rows[row]])
    expected = [after(name, path) for path in paths]
    now = mask(constraint)
    assert constraint.kept(rows, parents) == [row for row, each in enumerate(expected) if each is not None]
    found = constraint.masks(rows, parents)
    for row, each in enumerate(expected):
        assert bits(found[row]) == (None if each is None else mask(each))
    assert mask(constraint) == now


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(OPTIONS)))
def test_forced_tokens_are_allowed_and_change_no_state(data: st.DataObject, name: str) -> None:
    before = data.draw(st.lists(tokens, max_size=6))
    while (constraint := after(name, before)) is None:
        before.pop()
    now = mask(constraint)
    forced = constraint.forced(5)
    assert len(forced) <= 5 and mask(constraint) == now
    assert after(name, before + forced) is not None


def test_reasoning_is_closed_at_its_budget_and_the_grammar_follows() -> None:
    constraint = TokenConstraint(spec(reasoning="open", budget=2, answer=grammar("ab")))
    # Any token but an end token: the grammar is still to come.
    assert mask(constraint) == set(range(VOCABULARY)) - TOKENIZER.stop_ids and constraint.forced(9) == []
    assert mask(TokenConstraint(spec(reasoning="open", budget=2))) is None
    constraint.accept([A, A])
    assert mask(constraint) == {X}
    assert constraint.forced(9) == [*CLOSING, *GAP, *constraint.forced(9)[len(CLOSING) + len(GAP) :]]
    assert TOKENIZER.decode(constraint.forced(9)[len(CLOSING) + len(GAP) :]) == "ab"
    assert constraint.accept([*CLOSING, *GAP, A]) is None
    assert not constraint.complete
    assert constraint.accept([B, B]) == 1
    assert constraint.complete


def test_reasoning_may_end_before_its_budget() -> None:
    constraint = TokenConstraint(spec(reasoning="possible", budget=5))
    constraint.accept([THINK, A, END_THINK])
    assert mask(constraint) is None
    constraint.accept([A] * 20)
    assert mask(constraint) is None and not constraint.complete


def test_an_answer_that_may_begin_with_reasoning() -> None:
    constraint = TokenConstraint(spec(reasoning="possible", answer=grammar("ab")))
    assert mask(constraint) >= {THINK, A} and B not in mask(constraint)
    assert constraint.accept([A, B]) == 2


def test_a_call_is_free_text_before_and_after() -> None:
    constraint = TokenConstraint(spec(call_token=CALL, call=grammar("ab|cx")))
    constraint.accept([X, X])
    assert mask(constraint) is None
    constraint.accept([CALL])
    assert {A, C} <= mask(constraint) and X not in mask(constraint)
    constraint.accept([C, X, B])
    assert mask(constraint) is None
    constraint.accept([CALL, A])
    assert B in mask(constraint) and X not in mask(constraint)
