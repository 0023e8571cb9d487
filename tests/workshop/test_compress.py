"""The benchmark of compression: its tasks are what they claim, and words keep what shares words."""

from dataclasses import replace
from pathlib import Path

import pytest

from bough.compress.words import WordScorer, terms
from bough.config import EngineConfig
from bough.gguf.reader import GGUFFile
from bough.hub.catalog import named
from bough.session.loading import load_session
from bough.text.tokenizer import Tokenizer
from workshop.compression import answers as compress_answers
from workshop.compression import run as compress_run
from workshop.compression import texts as compress_texts
from workshop.compression.measure import RandomScorer, measure
from workshop.compression.texts import CHOSEN_ON, TESTED, aggregation, contexts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    with GGUFFile.open(found[0].pair.target) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.mark.parametrize("templates", [CHOSEN_ON, TESTED])
def test_a_paraphrase_shares_no_word_with_its_fact(templates: compress_texts.Templates) -> None:
    for fact, question, answer in templates.paraphrases:
        assert not set(terms(fact)) & set(terms(question)) and answer.lower() in fact.lower(), fact


def test_what_is_tested_is_not_what_was_chosen_on() -> None:
    for name in ("single", "multikey", "chains", "paraphrases", "constants", "meanings"):
        assert not set(getattr(CHOSEN_ON, name)) & set(getattr(TESTED, name))


def test_facts_are_planted_once(tokenizer: Tokenizer) -> None:
    for context in [*contexts(4, 2000, tokenizer), *contexts(2, 2000, tokenizer, templates=CHOSEN_ON)]:
        assert 2000 <= context.tokens < 3000
        for question in context.questions:
            assert all(context.text.count(fact) == 1 for fact in question.facts), question


def test_words_keep_what_shares_words_and_nothing_keeps_everything(tokenizer: Tokenizer) -> None:
    scorers = [WordScorer(), RandomScorer()]
    found = [
        each
        for context in contexts(4, 3000, tokenizer)
        for each in measure(context, scorers, tokenizer, chunks=WordScorer())
    ]
    found += measure(aggregation(1500, tokenizer), scorers, tokenizer)

    def kept(rule: str, *tasks: str) -> float:
        chosen = [
            each.kept for each in found if each.rule == rule and each.task in tasks and each.keep == 0.1
        ]
        return sum(chosen) / len(chosen)

    assert kept("words", "single", "multikey", "chain", "code-name") == 1
    assert (
        kept("random", "single", "multikey", "chain", "paraphrase") < 0.4
        and kept("words", "paraphrase") < 0.5
    )
    assert kept("words", compress_texts.FAILING) == 0
    ours = [each for each in found if each.rule == "words" and each.read < 1]
    assert all(each.read <= each.keep for each in ours)
    # PFlash's rule reads more than it says.
    theirs = [each.read for each in found if each.rule == "PFlash's rule" and each.keep == 0.05]
    assert sum(theirs) / len(theirs) > 0.08


def test_rows_and_pictures(tokenizer: Tokenizer, tmp_path: Path) -> None:
    scorers = [compress_run.Remembered(WordScorer(), compress_run.OURS), RandomScorer()]
    found = [
        each for context in contexts(2, 1500, tokenizer) for each in measure(context, scorers, tokenizer)
    ]
    rows = compress_run.summary(found, 1500)
    [ours] = [row for row in rows if (row["rule"], row["task"]) == (compress_run.OURS, "all")]
    by_depth = ours["by_depth"]["0.1"]
    assert len(by_depth) == 10 and sum(count for _, count in by_depth) == ours["questions"] == 13
    assert sum(kept for kept, _ in by_depth) == ours["kept"]["0.1"]
    compress_run.plot(rows, tmp_path / "compress.svg", "words")
    assert "depth of the first fact" in (tmp_path / "compress.svg").read_text()


def test_answers_from_compressed_and_full_prompts() -> None:
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    session = load_session(found[0].pair.target, EngineConfig(device="cpu", max_ctx=1024))
    context = next(contexts(1, 700, session.tokenizer))
    asked = replace(context, questions=(context.questions[0], replace(context.questions[1], answer="")))
    [single, other, both] = compress_answers.table(list(compress_answers.answers(session, [asked], 0.3)))
    assert (single["task"], other["task"], both["task"]) == ("multikey", "single", "all")
    assert both["kept"] == both["questions"] == 2 and both["both_right"] >= 1
