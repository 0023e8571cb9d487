"""Masks for every row of a tree: what a lone walk along the row's path would allow, and nothing is moved."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.vocabulary import trained
from treeflash.session.constraint import Guide, GuidePlan, Mask
from treeflash.text.grammar import Grammar, GrammarCompiler
from treeflash.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_metadata(trained("qwen35")[0])
COMPILER = GrammarCompiler(TOKENIZER)
VOCABULARY = TOKENIZER.vocab_size
THINK, END_THINK, CALL = (TOKENIZER.id_of(tag) for tag in ("<think>", "</think>", "<tool_call>"))
LETTERS = [TOKENIZER.encode(letter)[0] for letter in "abcx"]
A, B, C, X = LETTERS
CLOSING = [X, END_THINK]
GAP = TOKENIZER.encode("\n\n")


def plan(**options) -> GuidePlan:
    return GuidePlan(
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


def mask(guide: Guide) -> set[int] | None:
    return bits(guide.masks([0], [-1])[0])


OPTIONS = {
    "grammar": lambda: plan(answer=grammar()),
    "after reasoning": lambda: plan(reasoning="open", budget=3, answer=grammar()),
    "maybe reasoning": lambda: plan(reasoning="possible", budget=2, answer=grammar()),
    "reasoning alone": lambda: plan(reasoning="open", budget=4),
    "calls": lambda: plan(call_token=CALL, call=grammar("ab|cx")),
}
tokens = st.sampled_from([*LETTERS, THINK, END_THINK, CALL, *GAP, *sorted(TOKENIZER.stop_ids)])


def alone(name: str, text: list[int]) -> Guide | None:
    """A guide that went along `text`; None where it may not."""
    guide = Guide(OPTIONS[name]())
    for token in text:
        legal = mask(guide)
        if (legal is not None and token not in legal) or guide.complete:
            return None
        guide.accept([token])
    return guide


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(OPTIONS)))
def test_every_row_sees_its_own_path(data: st.DataObject, name: str) -> None:
    before = data.draw(st.lists(tokens, max_size=6))
    while (guide := alone(name, before)) is None:
        before.pop()
    count = data.draw(st.integers(1, 14))
    parents = [-1] + [data.draw(st.integers(max(0, row - 3), row - 1)) for row in range(1, count)]
    rows = [0] + [data.draw(tokens) for _ in range(1, count)]
    paths: list[list[int]] = [before]
    for row in range(1, count):
        paths.append([*paths[parents[row]], rows[row]])
    expected = [alone(name, path) for path in paths]
    now = mask(guide)
    assert guide.kept(rows, parents) == [row for row, each in enumerate(expected) if each is not None]
    found = guide.masks(rows, parents)
    for row, each in enumerate(expected):
        assert bits(found[row]) == (None if each is None else mask(each))
    assert mask(guide) == now


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(OPTIONS)))
def test_forced_text_can_come_and_moves_nothing(data: st.DataObject, name: str) -> None:
    before = data.draw(st.lists(tokens, max_size=6))
    while (guide := alone(name, before)) is None:
        before.pop()
    now = mask(guide)
    forced = guide.forced(5)
    assert len(forced) <= 5 and mask(guide) == now
    assert alone(name, before + forced) is not None


def test_reasoning_is_closed_at_its_budget_and_the_grammar_follows() -> None:
    guide = Guide(plan(reasoning="open", budget=2, answer=grammar("ab")))
    # Anything but an end, which would leave the grammar without its text.
    assert mask(guide) == set(range(VOCABULARY)) - TOKENIZER.stop_ids and guide.forced(9) == []
    assert mask(Guide(plan(reasoning="open", budget=2))) is None
    guide.accept([A, A])
    assert mask(guide) == {X}
    assert guide.forced(9) == [*CLOSING, *GAP, *guide.forced(9)[len(CLOSING) + len(GAP) :]]
    assert TOKENIZER.decode(guide.forced(9)[len(CLOSING) + len(GAP) :]) == "ab"
    assert guide.accept([*CLOSING, *GAP, A]) is None
    assert not guide.complete
    assert guide.accept([B, B]) == 1
    assert guide.complete


def test_reasoning_may_end_before_its_budget() -> None:
    guide = Guide(plan(reasoning="possible", budget=5))
    guide.accept([THINK, A, END_THINK])
    assert mask(guide) is None
    guide.accept([A] * 20)
    assert mask(guide) is None and not guide.complete


def test_an_answer_that_may_begin_with_reasoning() -> None:
    guide = Guide(plan(reasoning="possible", answer=grammar("ab")))
    assert mask(guide) >= {THINK, A} and B not in mask(guide)
    assert guide.accept([A, B]) == 2


def test_a_call_is_free_text_before_and_after() -> None:
    guide = Guide(plan(call_token=CALL, call=grammar("ab|cx")))
    guide.accept([X, X])
    assert mask(guide) is None
    guide.accept([CALL])
    assert {A, C} <= mask(guide) and X not in mask(guide)
    guide.accept([C, X, B])
    assert mask(guide) is None
    guide.accept([CALL, A])
    assert B in mask(guide) and X not in mask(guide)
