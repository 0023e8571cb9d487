"""The words scorer finds what shares words with the question, and what is linked to it by names."""

from collections.abc import Callable
from itertools import count

import pytest

from bough.compress import words
from bough.compress.scorer import MixedScorer, Query, ScoringFailed, scaled
from bough.compress.words import WordScorer, names, terms

UNITS = [
    "The harbour of Lund was built in 1904.",
    "VAR QX41 = 77120.",
    "Nobody counts the boats in winter.",
    "VAR LM7 = VAR QX41.",
    "The value of the market is disputed.",
    "VAR ZZ9 = VAR LM7.",
]


def order(query: str) -> list[int]:
    scores = WordScorer().score(UNITS, [Query(query)])
    return [index for index in sorted(range(len(UNITS)), key=lambda i: (-scores[i], i)) if scores[index]]


def test_words_in_common_rank_first() -> None:
    assert order("When was the harbour built?")[0] == 0
    assert order("Which boat is counted?")[0] == 2
    assert order("Shall we?") == []


def test_hops_follow_names_through_the_text() -> None:
    assert set(order("Which variable holds 77120 in the end?")[:3]) == {1, 3, 5}


def test_names_are_taken_apart() -> None:
    assert terms("parseHTTPHeader read_all_files") == ["parse", "http", "header", "read", "fil"]
    assert names("The value of max_ctx in LM7 is 1024.") == {"max_ctx", "LM7", "1024"}


def test_equal_scores_are_given_twice() -> None:
    queries = [Query("harbour boats"), Query("market", 0.5)]
    assert WordScorer().score(UNITS, queries) == WordScorer().score(list(UNITS), list(queries))


def test_words_are_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a GPU scores; what is left is read when it is needed, also after another text."""
    monkeypatch.setattr(words, "STEP", 2)
    query = [Query("Which variable holds 77120 in the end?")]
    expected = WordScorer().score(UNITS, query)
    for done in range(6):
        stepped = WordScorer()
        for _ in zip(range(done), stepped.indexing(UNITS), strict=False):
            pass
        assert stepped.score(UNITS, query) == expected
        next(stepped.indexing([*UNITS, "More."]), None)
        assert stepped.score(UNITS, query) == expected


def test_an_interrupted_index_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    query, scorer = [Query("Which variable holds 77120 in the end?")], WordScorer()
    expected = WordScorer().score(UNITS, query)
    for owner, name, fails_at in ((words.Postings, "add", 3), (words.Links, "__init__", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), at=fails_at))
            with pytest.raises(MemoryError):
                scorer.score(UNITS, query)
        assert scorer.score(UNITS, query) == expected
        scorer.score(["Another text."], query)


def failing(method: Callable[..., None], *, at: int) -> Callable[..., None]:
    calls = count(1)

    def called(self: object, *given: object) -> None:
        if next(calls) == at:
            raise MemoryError
        method(self, *given)

    return called


class Slow:
    """Asks whether it is cancelled, as a model does between its chunks."""

    name = "slow"
    any_thread = True

    def __init__(self, words: WordScorer):
        self.words, self.read = words, []

    def score(self, units, queries, cancelled):
        for _ in range(2):
            assert not cancelled()
            self.read.append(len(self.words._last.postings._lengths))
        return [0.0] * len(units)


def test_words_are_read_while_a_model_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "STEP", 2)
    scorer = WordScorer()
    model = Slow(scorer)
    query = [Query("harbour")]
    scores = MixedScorer(model, scorer).score(UNITS, query)
    assert model.read == [2, 4] and scores == MixedScorer(Slow(scorer), WordScorer()).score(UNITS, query)


class Broken:
    name = "broken"
    any_thread = True

    def score(self, units, queries, cancelled=None):
        return [float("nan")] * len(units)


def test_numbers_that_are_no_scores_are_refused() -> None:
    with pytest.raises(ScoringFailed):
        MixedScorer(Broken(), WordScorer()).score(UNITS, [Query("harbour")])
    with pytest.raises(ScoringFailed):
        scaled([0.5, -1.0])


def test_hops_follow_people_through_the_text() -> None:
    units = [
        "The parcel 4471 was brought to Birgit.",
        "Nobody saw the parcel again.",
        "Whatever Birgit receives is passed on to Corin.",
        "Rain fell on the roofs.",
        "Whatever Corin receives is passed on to Dagny.",
    ]
    scores = WordScorer().score(units, [Query("Through whose hands does parcel 4471 go?")])
    assert sorted(range(5), key=lambda index: -scores[index])[:3] == [0, 2, 4]


def test_a_name_in_the_question_weighs_more_than_its_words() -> None:
    units = ["The value of a variable is assigned.", "VAR QX41 = 77120.", "A value is a value."]
    scores = WordScorer().score(units, [Query("Which variables are assigned the value 77120?")])
    assert scores[1] == max(scores)


class Meaning:
    """A model to which the third unit answers the question."""

    name = "meaning"
    any_thread = True

    def score(self, units, queries, cancelled=None):
        return [1.0 if index == 3 else 0.01 for index in range(len(units))]


def test_hops_start_from_what_the_model_finds() -> None:
    scores = MixedScorer(Meaning(), WordScorer()).score(UNITS, [Query("Xyzzy?")])
    assert sorted(range(len(UNITS)), key=lambda index: -scores[index])[:3] == [3, 1, 5]


def test_words_count_by_the_share_of_the_question_that_a_unit_has() -> None:
    units = ["The function of a list.", "It rotates.", "SPIN_LIMIT = 4", "Rain fell.", "Snow fell."]
    found = WordScorer().matches(units, [Query("Which function rotates a list by SPIN_LIMIT?")])
    assert found.shares[2] == 1.0  # a name of the question
    assert 0 < found.shares[1] < found.shares[0] < 1 and found.shares[3:] == [0, 0]
    assert max(found.scores) == 1.0


class Unsure:
    """A model that finds the fifth unit, and little in the others."""

    name = "unsure"
    any_thread = True

    def score(self, units, queries, cancelled=None):
        return [1.0 if index == 4 else 0.2 if index == 3 else 0.1 for index in range(len(units))]


def test_a_number_inside_another_is_not_that_of_the_question() -> None:
    units = ["The checksum is 1404055.", "Error 404 means that nothing was found.", "See lib.v404."]
    assert WordScorer().matches(units, [Query("What does error 404 mean?")]).shares[:2] == [0.0, 1.0]
    assert WordScorer().matches(units, [Query("Who wrote lib.v404?")]).shares[1:] == [
        pytest.approx(0.3, abs=0.2),
        1.0,
    ]


def test_one_common_word_does_not_outweigh_the_model() -> None:
    units = ["This function is old.", "A function.", "No function at all.", "a = b[::-1]", "return spin(a)"]
    scores = MixedScorer(Unsure(), WordScorer()).score(units, [Query("Which function reverses sequences?")])
    assert sorted(range(5), key=lambda index: -scores[index])[:2] == [4, 3]
