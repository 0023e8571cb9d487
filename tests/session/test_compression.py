"""Compression in a session: off is off, the budget is of the rendered prompt, turns share their prefix."""

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bough.config import CompressConfig, EngineConfig
from bough.engine.sampler import SamplingParams
from bough.errors import Cancelled, PromptTooLong
from bough.session.attention_scorer import AttentionScorer
from bough.session.compression import Compression, PromptCompression
from bough.session.events import Finished
from bough.session.loading import load_session
from bough.session.prompts import Prompts
from bough.session.requests import CompressOptions, Prompt, TextRequest
from bough.session.session import Session
from bough.session.worker import EngineWorker
from bough.text.grammar import Grammar
from bough.text.tokenizer import EncodeLimit
from tests.compress.conversations import prose

FACT = "The password of the harbour office is KESTREL-4471."
QUESTION = "What is the password of the harbour office?"
AUTO = CompressConfig("auto", above=800, to=0.2)


def text(seed: int = 1, sentences: int = 60) -> str:
    parts = prose(random.Random(seed), sentences).split("\n\n")
    parts.insert(len(parts) // 2, FACT)
    return "\n\n".join(parts)


def asking(question: str = QUESTION, document: str | None = None) -> list[dict]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": document or text()},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": question},
    ]


@pytest.fixture(scope="module")
def session(tiny_model: Callable[..., Path]) -> Session:
    return load_session(tiny_model(context=8192), EngineConfig(max_ctx=8192, device="cpu", compress=AUTO))


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., Path]) -> Session:
    return load_session(tiny_model(context=8192), EngineConfig(max_ctx=8192, device="cpu"))


def finished(session: Session, request: TextRequest, max_tokens: int | None = 3) -> Finished:
    *_, last = session.generate(replace(request, max_tokens=max_tokens, sampling=SamplingParams()))
    assert isinstance(last, Finished)
    return last


def test_off_is_off(session: Session, plain: Session) -> None:
    for request in (
        TextRequest(messages=asking(), max_tokens=3),
        TextRequest(prompt=f"{text()}\n\n{QUESTION}", max_tokens=3),
    ):
        before = plain.check(request).encoded
        assert before is not None and before.compressed is None and len(before.ids) > 2000
        off = session.check(replace(request, compress=CompressOptions("off"))).encoded
        assert off == before
        stats = finished(plain, request).stats
        assert "compression" not in stats.as_dict() and stats.sent_tokens == stats.prompt_tokens
        assert (
            finished(session, replace(request, compress=CompressOptions("off"))).tokens
            == finished(plain, request).tokens
        )


def test_short_prompts_are_read_as_they_are(session: Session, plain: Session) -> None:
    request = TextRequest(messages=[{"role": "user", "content": "hello " * 100}])
    assert session.check(request).encoded == plain.check(request).encoded


def test_the_budget_counts_the_whole_prompt(session: Session) -> None:
    request = TextRequest(messages=asking())
    prompt = session.check(request).encoded
    assert prompt is not None and prompt.compressed is not None
    report = prompt.compressed.report
    assert report.kept_tokens == len(prompt.ids) <= 0.2 * report.sent_tokens
    assert FACT in session.tokenizer.decode(prompt.ids)
    stats = finished(session, request).stats
    assert stats.prompt_tokens == report.kept_tokens and stats.sent_tokens == report.sent_tokens
    found = stats.as_dict()
    assert found["compression"]["kept_tokens"] == report.kept_tokens
    assert found["compression"]["scorer"] == "words" and found["compression"]["score_ms"] > 0
    assert found["approximate"] == [report.approximate] and "compressed to" in report.approximate
    assert stats.ttft_s >= stats.prefill_s + stats.compression.score_s > stats.prefill_s > 0


def test_a_raw_prompt_is_compressed_too(session: Session) -> None:
    prompt = session.check(TextRequest(prompt=f"{text(sentences=90)}\n\n{QUESTION}")).encoded
    assert prompt is not None and prompt.compressed is not None and not prompt.compressed.report.exact
    shown = session.tokenizer.decode(prompt.ids)
    assert shown.endswith(QUESTION) and FACT in shown
    assert (
        session.check(TextRequest(prompt=[5] * 1500)).encoded
        == session.check(TextRequest(prompt=[5] * 1500, compress=CompressOptions("off"))).encoded
    )


def test_a_prompt_beyond_the_context_fits_after_compression(tiny_model: Callable[..., Path]) -> None:
    small = load_session(tiny_model(), EngineConfig(max_ctx=2048, device="cpu", compress=AUTO))
    prompt = small.check(TextRequest(messages=asking())).encoded
    assert prompt is not None and prompt.compressed is not None
    assert prompt.compressed.report.sent_tokens > 2048 > len(prompt.ids)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"grammar": Grammar("regex", "[0-9]+", "grammar")}, "grammar"),
        ({"messages": asking("Please translate what is said of the harbour office.")}, "whole text"),
    ],
)
def test_what_needs_the_whole_text_is_read_exactly(session: Session, options, reason: str) -> None:
    request = TextRequest(**{"messages": asking(), **options})
    last = finished(session, request)
    assert last.stats.compression is not None and reason in last.stats.compression.reason
    assert last.stats.prompt_tokens == last.stats.sent_tokens and not last.stats.approximate
    assert any("not compressed" in note for note in last.stats.notes)
    asked = finished(session, replace(request, compress=CompressOptions(to=0.3)))
    assert asked.stats.prompt_tokens <= 0.3 * asked.stats.sent_tokens


class Broken:
    name = "broken"
    any_thread = True

    def score(self, units, queries, cancelled):
        raise RuntimeError("CUDA out of memory")


def test_a_scorer_that_breaks_leaves_the_prompt_exact(session: Session) -> None:
    prompts = Prompts(session.tokenizer, session.template)
    broken = PromptCompression(prompts, session.tokenizer, Compression(AUTO, Broken()))
    request = TextRequest(messages=asking())
    found = broken.encode(request, None)
    assert (
        found.compressed is not None and found.compressed.report.reason == "compression failed (RuntimeError)"
    )
    assert found.ids == prompts.encode(request).ids


@pytest.mark.parametrize("asked", [asking(), asking("Summarise it.")])
def test_no_prompt_is_tokenised_twice(
    session: Session, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, str]]
) -> None:
    prompts = Prompts(session.tokenizer, session.template)
    request, seen = TextRequest(messages=asked), []
    encode = prompts.encode

    def counted(request: TextRequest, limit: EncodeLimit | None = None) -> Prompt:
        seen.append(request.messages)
        return encode(request, limit)

    monkeypatch.setattr(prompts, "encode", counted)
    compression = PromptCompression(prompts, session.tokenizer, Compression(AUTO))
    found = compression.encode(request, EncodeLimit(8192))
    assert found.compressed is not None and seen and all(seen.count(each) == 1 for each in seen)
    read_as = replace(request, messages=found.compressed.messages)
    assert (found.ids, found.boundaries) == ((whole := encode(read_as)).ids, whole.boundaries)
    with pytest.raises(PromptTooLong):
        PromptCompression(prompts, session.tokenizer, Compression(AUTO)).encode(request, EncodeLimit(20))
    with pytest.raises(Cancelled):
        compression.encode(request, EncodeLimit(8192, lambda: True))


def test_turns_share_their_prefix_and_get_what_they_need(tiny_model: Callable[..., Path]) -> None:
    session = load_session(
        tiny_model("qwen3", context=8192), EngineConfig(max_ctx=8192, device="cpu", compress=AUTO)
    )
    second = "The lighthouse keeper was called Amundsen-Vahl."
    messages = asking(document=f"{text(3)}\n\n{second} {prose(random.Random(9), 10)}")
    first = finished(session, TextRequest(messages=messages)).stats
    assert first.cached_tokens == 0 and first.compression is not None
    messages += [{"role": "assistant", "content": "KESTREL"}]
    messages += [{"role": "user", "content": "What was the lighthouse keeper called?"}]
    prompt = session.check(TextRequest(messages=messages)).encoded
    assert prompt is not None and prompt.compressed is not None
    shown = session.tokenizer.decode(prompt.ids)
    assert second in shown.split("left out before:")[1] and FACT in shown.split("left out before:")[0]
    later = finished(session, TextRequest(messages=messages)).stats
    assert later.cached_tokens > 0.8 * first.prompt_tokens
    assert later.compression is not None and later.compression.kept_tokens < 0.5 * later.sent_tokens


def test_where_a_device_has_one_thread_its_scorer_waits_for_it(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    config = replace(AUTO, scorer=tiny_model("qwen3"))
    session = load_session(
        tiny_model(context=8192), EngineConfig(max_ctx=8192, device="cpu", compress=config)
    )
    request = TextRequest(messages=asking(document=text(sentences=40)))
    monkeypatch.setattr(session._compression._compressor.scorer._model, "any_thread", False)
    assert session.check(request).encoded is None
    short = TextRequest(messages=[{"role": "user", "content": "hello"}])
    assert session.check(short).encoded is not None
    stats = finished(session, request).stats
    assert stats.compression is not None and stats.compression.scorer.endswith(" + words")
    assert stats.prompt_tokens <= 0.2 * stats.sent_tokens
    left = session.generate(replace(request, messages=asking("Where?"), cancelled=lambda: True))
    assert [event.reason for event in left if isinstance(event, Finished)] == ["cancelled"]


def test_compressed_requests_run_beside_others(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a model scores in the thread of its request; each text is that of a run alone."""
    config = EngineConfig(
        max_ctx=8192, device="cpu", compress=replace(AUTO, scorer=tiny_model("qwen3")), parallel=3
    )
    requests = [
        TextRequest(messages=asking(document=text(sentences=40)), max_tokens=6),
        TextRequest(messages=asking("Hello?", "A short text."), max_tokens=12),
    ]
    alone = load_session(tiny_model(context=8192), config)
    expected = [finished(alone, each, max_tokens=each.max_tokens).tokens for each in requests]
    threads: list[str] = []
    score = AttentionScorer.score

    def seen(self, *args):
        threads.append(threading.current_thread().name)
        return score(self, *args)

    monkeypatch.setattr(AttentionScorer, "score", seen)
    worker = EngineWorker(lambda progress: load_session(tiny_model(context=8192), config))
    worker.start()
    assert worker.ready.wait(60)

    async def all_of(*given: TextRequest) -> list[Finished]:
        checked = await asyncio.to_thread(lambda: [worker.session.check(each) for each in given])
        job = worker.submit(*checked)
        return [event async for batch in job.batches() for _, event in batch if isinstance(event, Finished)]

    async def run() -> list[list[Finished]]:
        return await asyncio.gather(all_of(requests[0], requests[0]), all_of(requests[1]))

    try:
        (first, second), (other,) = asyncio.run(run())
    finally:
        worker.close()
    assert first.tokens == second.tokens == expected[0] and other.tokens == expected[1]
    assert first.stats.compression is not None and other.stats.compression is None
    assert first.stats.prompt_tokens == second.stats.prompt_tokens < first.stats.sent_tokens
    # The second choice is the same conversation again.
    assert len(threads) == 1 and "engine" not in threads
