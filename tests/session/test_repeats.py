"""Answers of chats by the recommended sampling do not repeat themselves; trees and company change nothing."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.events import Failed
from bough.engine.sampler import SamplingParams
from bough.hub.catalog import named
from bough.session.constraint import ConstraintSpec, TokenConstraint
from bough.session.events import Finished
from bough.session.loading import load_session
from bough.session.prompts import Prompts
from bough.session.repeats import Repeats
from bough.session.requests import Grammar, TextRequest
from bough.session.session import ANSWER_LOOPED, Session
from bough.text.tokenizer import Tokenizer
from tests.session.test_constrained import session

SAID = "The function returns the number of vowels in the string."


@cache
def tokenizer() -> Tokenizer:
    return session("plain").tokenizer


def chat(*answers: str, ask: str = "And now?") -> list[dict[str, str]]:
    pairs = [({"role": "user", "content": ask}, {"role": "assistant", "content": each}) for each in answers]
    return [*(message for pair in pairs for message in pair), {"role": "user", "content": ask}]


def constraint(messages: list[dict[str, str]], *, most: int = 3, begun: bool = False) -> TokenConstraint:
    rule = Repeats(tokenizer(), messages, most, begun=begun)
    return TokenConstraint(ConstraintSpec(vocabulary=tokenizer().vocab_size, repeats=rule))


def written(messages: list[dict[str, str]], text: str, **options: Any) -> tuple[str, TokenConstraint]:
    """Return what of a text an answer can have before a token of it is forbidden, or ends the answer."""
    whole, ids = constraint(messages, **options), tokenizer().encode(text)
    for at, token in enumerate(ids):
        [mask] = whole.masks([ids[at - 1]], [-1])
        if mask is not None and not mask[token // 32] >> token % 32 & 1:
            return tokenizer().decode(ids[:at]), whole
        if whole.accept([token]) is not None:
            return tokenizer().decode(ids[: at + 1]), whole
    return text, whole


def test_a_sentence_is_not_written_a_fourth_time() -> None:
    three = chat(SAID, f"Well. {SAID} So it is.", f"Yes!\n{SAID}")
    start, whole = written(three, SAID)
    assert SAID.startswith(start) and len(SAID) / 2 <= len(start) < 0.8 * len(SAID)
    # Another text of the same beginning may follow, however the forbidden one is cut into tokens.
    rest = SAID[len(start) :].encode()
    [mask] = whole.masks([0], [-1])
    assert mask is not None
    for token in range(tokenizer().vocab_size):
        piece = tokenizer().token_bytes(token)
        allowed = bool(mask[token // 32] >> token % 32 & 1)
        begins = piece != b"" and (rest.startswith(piece) or rest.lstrip().startswith(piece))
        assert allowed is not begins, piece
    assert written(three[2:], SAID)[0] == SAID
    assert written(three, SAID, most=0)[0] == SAID


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (chat(*[f"```\n{SAID}\n```"] * 5), SAID),
        (chat(*[SAID] * 5), f"```\n{SAID}\n```\n"),
        (chat(*[SAID] * 5, ask=f"Write: '{SAID}'"), SAID),
        (chat(*["Yes, it is.", "| a | b | c | d |"] * 4), "Yes, it is.\n| a | b | c | d |\n"),
    ],
    ids=["said in code", "written as code", "asked for", "short sentences and tables"],
)
def test_code_and_what_others_wrote_may_be_repeated(messages: list[dict[str, str]], text: str) -> None:
    assert written(messages, text)[0] == text


def test_a_sentence_counts_where_no_tree_reaches_it() -> None:
    """A tree's rows have no bans of their own: a sentence counts from 64 tokens after its end."""
    other = "One more line of text stands here, and it is another one each time, as it has the number"
    text = "".join(f"{SAID} {other} {at}. {other} {at}{at}. {other} 1{at}.\n" for at in range(6))
    start, whole = written(chat(), text)
    assert start.count(SAID) == 3 and not whole.idle(1)
    near = "".join(f"{SAID} {at}\n" for at in "abcdefgh")
    assert 3 < written(chat(), near)[0].count(SAID) < 8


@pytest.mark.parametrize("words", [9, 30])
def test_an_answer_ends_with_its_third_period(words: int) -> None:
    period = " ".join(f"{chr(97 + at % 26)}{at}" for at in range(words)) + "\n"
    assert len(tokenizer().encode(period)) >= 16
    start, whole = written(chat(), period * 5)
    assert whole.spec.repeats is not None and whole.spec.repeats.ended
    assert len(tokenizer().encode(start)) == 3 * len(tokenizer().encode(period))
    asked = chat(ask=f"Write this five times: {period}")
    assert written(asked, period * 5)[0] == period * 5


@pytest.mark.parametrize("most", [3, 0])
def test_an_answer_that_counts_on_and_on_ends_with_a_small_model(most: int) -> None:
    years = range(1000, 1099)
    lines = [f"- Louis {at}: A French politician who led France from {at} to {at + 1}.\n" for at in years]
    start, whole = written(chat(), "".join(lines), most=most)
    assert whole.spec.repeats is not None and whole.spec.repeats.ended is bool(most)
    ids = tokenizer().encode(start)
    period = len(tokenizer().encode(lines[1]))
    assert (1024 <= len(ids) <= 1024 + 2 * period) if most else start == "".join(lines)


def test_idle_means_that_no_row_has_a_mask_and_none_ends_the_answer() -> None:
    text = (SAID + " It does so by looking at each letter, one after the other.\n") * 5
    ids, rows = tokenizer().encode(text), 24
    whole, ended = constraint(chat(SAID)), False
    for at in range(len(ids) - rows):
        chain = [ids[at - 1] if at else 0, *ids[at : at + rows - 1]]
        if whole.idle(rows):
            assert whole.masks(chain, range(-1, rows - 1)) == [None] * rows
            idle_until = at + rows
        ended = whole.accept([ids[at]]) is not None
        if ended:
            assert at >= idle_until - 1
            return
    raise AssertionError("the answer was not ended")


def test_the_masks_of_a_tree_are_those_of_its_paths() -> None:
    ids = tokenizer().encode(f"Yes. {SAID}")
    in_a_chain = constraint(chat(*[SAID] * 3)).masks([0, *ids], range(-1, len(ids)))
    alone = constraint(chat(*[SAID] * 3))
    for mask, token in zip(in_a_chain, ids, strict=False):
        [expected] = alone.masks([0], [-1])
        assert (mask is None) == (expected is None)
        if mask is not None:
            assert (mask == expected).all()
            return
        alone.accept([token])
    raise AssertionError("no row had a mask")


LIST = "A list in Python is an ordered collection of values that can be changed."
AGAIN = "Let me check the numbers again: one, two, three and four are right. "


def usual(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.3, seed=seed, recommended=True)


def requests(**options: Any) -> list[TextRequest]:
    """Return eight chats: four whose next answer is a copy, four that go on with a text that may loop."""
    copied = [{"messages": chat(*[LIST] * 3, ask="What is a list?")}] * 4
    begun = {"role": "assistant", "content": AGAIN * 2}
    looping = [{"messages": [*chat(ask="Add 3 and 4."), begun], "continue_final": True}] * 4
    return [
        TextRequest(**{"sampling": usual(1 + at % 4), "max_tokens": 100, **request, **options})
        for at, request in enumerate([*copied, *looping])
    ]


def alone(made: Session, request: TextRequest) -> Finished:
    return next(event for event in made.generate(request) if isinstance(event, Finished))


def together(made: Session, asked: list[TextRequest]) -> list[Finished]:
    generations = [made.begin(request) for request in asked]
    ends: dict[int, Finished] = {}
    while len(ends) < len(asked):
        for owner, event in made.step():
            assert not isinstance(event, Failed)
            if isinstance(event, Finished):
                ends[generations.index(owner)] = event
    return [ends[index] for index in range(len(asked))]


@cache
def plain() -> list[Finished]:
    return [alone(session("plain"), request) for request in requests()]


@pytest.mark.parametrize("budget", [22, 63])
def test_the_pairs_chats_are_the_same_with_trees_and_in_company(budget: int) -> None:
    expected = [end.tokens for end in plain()]
    model = named("bough-40m")
    assert model is not None and model[0].pair is not None
    pair = model[0].pair
    speculation = SpecConfig(budget=budget, adaptive=False)
    config = EngineConfig(
        device="cpu", max_ctx=768, parallel=8, speculation=speculation, draft=DraftConfig(pair.draft)
    )
    made = load_session(pair.target, config)
    assert [alone(made, request).tokens for request in requests()] == expected
    ends = together(made, requests())
    assert [end.tokens for end in ends] == expected
    for end, single in zip(ends, plain(), strict=True):
        counts = [(stats.answer_loops, stats.avoided_sentences) for stats in (end.stats, single.stats)]
        assert counts[0] == counts[1]
    assert sum(end.stats.verified_rows for end in ends) > sum(end.stats.steps for end in ends)


def test_what_is_counted_and_said() -> None:
    copies, loops = plain()[:4], plain()[4:]
    assert sum(end.stats.avoided_sentences for end in copies) >= 4
    looped = [end for end in loops if end.stats.answer_loops]
    assert looped and all(ANSWER_LOOPED in end.stats.notes and end.reason == "stop" for end in looped)
    said = tokenizer().encode(LIST)
    assert not any(end.tokens[: len(said)] == said for end in copies)
    free = [alone(session("plain"), request) for request in requests(break_loops=False)]
    assert any(end.tokens[: len(said)] == said for end in free[:4])
    longer = [len(one.tokens) > len(end.tokens) for one, end in zip(free[4:], loops, strict=True)]
    assert longer == [end in looped for end in loops]


def as_asked() -> dict[str, dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    return {
        "another temperature": {"sampling": usual(1).changed({"temperature": 0.3})},
        "greedy": {"sampling": replace(usual(1), temperature=0.0)},
        "no template": {"messages": None, "prompt": "A list"},
        "tools": {"tools": tools},
        "a grammar": {"grammar": Grammar("regex", "[a-z]+")},
        "ignore_eos": {"ignore_eos": True},
        "break_loops": {"break_loops": False},
    }


@pytest.mark.parametrize("name", as_asked())
def test_what_a_request_asks_for_is_done(name: str) -> None:
    prompts = Prompts(tokenizer(), session("plain").template, sentences=3)
    request = requests()[0]
    found = prompts.constraint(request, prompts.encode(request))
    assert found is not None and found.spec.repeats is not None
    request = replace(request, **as_asked()[name])
    found = prompts.constraint(request, prompts.encode(request))
    assert found is None or found.spec.repeats is None
    assert usual(1).changed({"seed": 7, "logprobs": 2}).recommended
