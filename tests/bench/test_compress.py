"""The benchmark of compression: its tasks are what they claim, and words keep what shares words."""

import pytest

from treeflash.bench import compress
from treeflash.bench.compress import PARAPHRASES, RandomScorer, aggregation, contexts, measure
from treeflash.compress.words import WordScorer, terms
from treeflash.gguf.reader import GGUFFile
from treeflash.hub.catalog import named
from treeflash.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = named("treeflash-40m")
    assert found is not None and found[0].pair is not None
    with GGUFFile.open(found[0].pair.target) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.mark.parametrize(("fact", "question"), PARAPHRASES)
def test_a_paraphrase_shares_no_word_with_its_fact(fact: str, question: str) -> None:
    assert not set(terms(fact)) & set(terms(question))


def test_facts_are_planted_once(tokenizer: Tokenizer) -> None:
    for context in contexts(4, 2000, tokenizer):
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
    assert kept("random", *compress.PROSE_TASKS) < 0.4 and kept("words", "paraphrase") < 0.5
    assert kept("words", compress.FAILING) == 0
    ours = [each for each in found if each.rule == "words" and each.read < 1]
    assert all(each.read <= each.keep for each in ours)
    # PFlash's rule reads more than it says.
    theirs = [each.read for each in found if each.rule == "PFlash's rule" and each.keep == 0.05]
    assert sum(theirs) / len(theirs) > 0.08
