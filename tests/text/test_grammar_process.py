"""Grammars that would kill the server, hold it up or fill its memory: refused before or in their process."""

import threading
import time
from collections.abc import Iterator

import pytest

from bough.errors import Cancelled, UsageError
from bough.text import grammar_process
from bough.text.grammar import Grammar, GrammarCompiler
from bough.text.grammar_jobs import GrammarJob, Grammars
from bough.text.grammar_process import GrammarProcesses
from bough.text.tokenizer import Tokenizer
from tests.text.vocabulary import trained
from workshop.attack.bodies import any_of, chain, expressions, grammars, property_of, schemas

TOKENIZER = Tokenizer.from_metadata(trained("qwen35")[0])
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.fixture(scope="module")
def compiling() -> Iterator[Grammars]:
    processes = GrammarProcesses(TOKENIZER)
    yield Grammars(GrammarCompiler(TOKENIZER), processes.resolve)
    if processes._spare is not None:
        processes._spare.end()


def job(kind: str, value: object) -> GrammarJob:
    return GrammarJob(Grammar(kind, value, "a field"))  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", chain(1000, property_of), "1001 definitions; at most 1000"),
        ("json_schema", chain(250, property_of), "references in a row; at most 200"),
        ("json_schema", chain(500, any_of), "references in a row"),
        ("json_schema", schemas()["references to references"](), "references in a row"),
        ("json_schema", schemas()["100,000 enumerated"](), "at most (50000|1048576)"),
        ("json_schema", schemas()["a name of 2 MB"](), "at most 1048576"),
        ("json_schema", schemas()["a constant nested 99 deep"]() | {"a": [[]]}, None),
        ("gbnf", grammars()["4,000 rules in a row"](), "rules; at most 4000|in a row"),
        ("gbnf", grammars()["10 MB"](), "characters; at most"),
        ("gbnf", grammars()["brackets 5,000 deep"](), "levels of nested brackets"),
        ("lark", grammars()["lark, 4,000 rules in a row"](), "rules"),
        ("regex", expressions()["brackets 300 deep"](), "levels of nested brackets"),
    ],
)
def test_bounds_have_the_limit_and_the_value(kind: str, value: object, reason: str | None) -> None:
    begin = time.process_time()
    if reason is None:
        job(kind, value).check()
    else:
        with pytest.raises(UsageError, match=reason) as caught:
            job(kind, value).check()
        assert caught.value.param == "a field" and len(caught.value.message) < 200
    assert time.process_time() - begin < 2


def test_a_process_that_overflows_ends_alone(compiling: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bounds, the process that compiles dies or refuses; the next grammar gets another one."""
    monkeypatch.setattr(GrammarJob, "check", lambda job: None)
    with pytest.raises(UsageError):
        compiling.compiled(job("gbnf", grammars()["50,000 rules in a row"]()))
    assert compiling.compiled(job("json_schema", PERSON)).matcher().mask().any()


def test_time_is_limited(compiling: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "WALL_S", 0.5)
    begin = time.monotonic()
    with pytest.raises(UsageError, match=r"takes over|larger|cannot be used|memory"):
        compiling.compiled(job("gbnf", grammars()["2^60 by doubling"]()))
    assert time.monotonic() - begin < 20


def test_who_leaves_ends_the_process(compiling: Grammars) -> None:
    left, errors = threading.Event(), []

    def ask() -> None:
        try:
            compiling.compiled(job("gbnf", grammars()["2^60 by doubling"]() + "# 2"), left.is_set)
        except (Cancelled, UsageError) as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    left.set()
    thread.join(10)
    assert not thread.is_alive() and isinstance(errors[0], Cancelled)
    assert compiling.compiled(job("json_schema", PERSON | {"title": "b"})) is not None


def test_compiled_grammars_are_kept_by_bytes(compiling: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiling.compiled(job("json_schema", PERSON))
    assert compiling.compiled(job("json_schema", dict(PERSON))) is first
    monkeypatch.setattr("bough.text.grammar_jobs.MAX_KEPT", first.bytes)
    compiling.compiled(job("json_schema", PERSON | {"title": "c"}))
    assert compiling._bytes <= first.bytes and len(compiling._kept) <= 1
    refused = job("json_schema", {"type": "banana"})
    for _ in range(2):
        with pytest.raises(UsageError, match="banana"):
            compiling.compiled(refused)
