import math

from hypothesis import given
from hypothesis import strategies as st

from bough.spec.prompt_lookup import LookupAccuracy, PromptLookup


def test_continues_from_the_longest_agreement() -> None:
    lookup = PromptLookup()
    #                 one place that agrees on three tokens, one that agrees on five
    lookup.append([1, 2, 3, 70, 71, 9, 8, 1, 2, 3, 60, 61, 62, 5, 9, 8, 1, 2, 3])
    tokens, score = lookup.propose(4)
    assert tokens == [60, 61, 62, 5]
    assert score < 0


def test_a_repetition_goes_on_repeating() -> None:
    lookup = PromptLookup()
    lookup.append([1, 2, 3, 4, 1, 2, 3, 4, 1])
    assert lookup.propose(7)[0] == [2, 3, 4, 1, 2, 3, 4]


def test_nothing_to_copy() -> None:
    lookup = PromptLookup()
    assert lookup.propose(5) == ([], 0.0)
    lookup.append([1, 2, 3, 4, 5])
    assert lookup.propose(5) == ([], 0.0)


def test_confidence_follows_the_outcomes() -> None:
    right, wrong = PromptLookup(), PromptLookup()
    pattern = [1, 2, 3, 4, 5, 6, 7]
    for lookup in (right, wrong):
        lookup.append(pattern * 3)
    before = right.propose(5)[1]
    for turn in range(40):
        tokens, _ = right.propose(5)
        right.append(tokens[:3])
        wrong.propose(5)
        wrong.append([100 + turn, *pattern])
    assert math.exp(right.propose(5)[1]) > 0.97 > math.exp(before)
    wrong.append(pattern)
    assert math.exp(wrong.propose(5)[1]) < 0.5


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 5), max_size=20))
def test_what_is_proposed_stood_in_the_text(text: list[int], sizes: list[int]) -> None:
    """Any split of the text into batches gives the same index."""
    lookup, whole = PromptLookup(), PromptLookup()
    whole.append(text)
    rest = text
    for size in sizes:
        lookup.append(rest[:size])
        rest = rest[size:]
    lookup.append(rest)
    tokens, _ = lookup.propose(6)
    assert tokens == whole.propose(6)[0]
    if tokens:
        places = [i for i in range(3, len(text)) if text[i - 3 : i] == text[-3:]]
        assert any(text[i] == tokens[0] for i in places)


def test_a_new_text_begins_with_what_is_usual() -> None:
    """Copies after short matches that were wrong in other texts promise little; longer ones are unchanged."""
    usual = LookupAccuracy()
    before = math.exp(LookupAccuracy(usual).log_probability(3))
    for _ in range(40):
        LookupAccuracy(usual).observe(3, False)
    new = LookupAccuracy(usual)
    assert math.exp(new.log_probability(3)) < before / 3
    assert new.log_probability(8) == LookupAccuracy().log_probability(8)
    for _ in range(20):
        new.observe(3, True)
    assert math.exp(new.log_probability(3)) > 0.7  # what this text shows counts for more


def test_a_copy_ends_before_an_image() -> None:
    """Ids below 0 stand for an image's rows: no token of it can be sampled."""
    lookup = PromptLookup()
    lookup.append([1, 2, 3, 4, 5, -7, -7, 6, 9, 1, 2, 3])
    assert lookup.propose(6)[0] == [4, 5]
