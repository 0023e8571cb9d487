"""The prefix cache on a GPU: the text after a hit in any tier is that after a miss."""

from pathlib import Path

import pytest
import torch

from bough.session.events import Finished
from bough.session.requests import TextRequest
from bough.session.session import Session
from tests.gpu.conversation import (
    HELLO,
    SYSTEM,
    assistant,
    evict_to_host,
    raise_context_length,
    second_turns,
    user,
)
from tests.gpu.fresh_process import run_in_fresh_process
from tests.gpu.inputs import KV_FORMATS
from tests.gpu.texts import (
    GREEDY_WITH_LOGPROBS,
    Messages,
    assert_same_text_as,
    embedded_pair,
    generate,
    load_session,
)

pytestmark = pytest.mark.gpu


def without_cache(session: Session, messages: Messages) -> Finished:
    session.engine.prefixes.clear()
    return generate(session, messages, sampling=GREEDY_WITH_LOGPROBS)


def test_hits_of_a_conversation_give_the_texts_of_misses() -> None:
    session = load_session(*embedded_pair())
    messages, cached, prompt = [SYSTEM], 0, 0
    for question in ("def fibonacci(n):", "Count the vowels in a string.", "Why?", "Once more, please."):
        messages = [*messages, user(question)]
        found = generate(session, messages)
        cached, prompt = cached + found.stats.cached_tokens, prompt + found.stats.prompt_tokens
        assert_same_text_as(found, without_cache(session, messages))
        messages = [*messages, assistant(session.tokenizer.decode(found.tokens))]
    # The first prompt misses; each of the others hits what the one before left.
    assert cached > prompt / 2, f"{cached} of {prompt} prompt tokens were cached"


def test_a_text_that_was_read_ahead_is_found() -> None:
    session = load_session(*embedded_pair(), prefill_chunk=128)
    text = "The harbour master counts the boats every morning, and nobody knows why. " * 30
    *_, read = session.generate(TextRequest(messages=[user(text)], prefill_for_s=60.0))
    assert isinstance(read, Finished) and not read.tokens
    found = generate(session, [user(f"{text} Why?")])
    assert found.stats.cached_tokens >= 256
    assert_same_text_as(found, without_cache(session, [user(f"{text} Why?")]))


@pytest.mark.parametrize("format", KV_FORMATS)
def test_pages_of_every_format_come_back_from_host_memory(format: str) -> None:
    session = load_session(*embedded_pair(), graphs=False, kv_k=format, kv_v=format)
    generate(session, HELLO)
    evict_to_host(session)
    usage = session.engine.prefixes.usage
    assert usage.device_bytes == 0 and usage.host_bytes > 0, usage
    again = generate(session, HELLO)
    assert again.stats.cached_tokens > 0
    assert_same_text_as(again, without_cache(session, HELLO))


def test_a_restored_state_has_the_bits_of_the_saved_one() -> None:
    session = load_session(*embedded_pair())
    generate(session, HELLO)
    assert_restores_bits(session, HELLO)


def assert_restores_bits(session: Session, messages: Messages) -> None:
    engine, ids = session.engine, session.encode(TextRequest(messages=messages))
    store = engine.prefixes.store
    with torch.inference_mode():
        for _ in range(8):
            slot = engine.states.open()
            found = engine.prefixes.restore(slot, ids, range(len(ids)))
            assert found is not None
            again = store.save(slot)
            store.synchronize()
            for old, new in zip(found.state.layers, again.layers, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
            assert found.state.pages == again.pages
            store.release(again)
            engine.states.close(slot)


def check_second_turns(target: Path, draft: Path, folder: Path, tokens: int) -> None:
    session = load_session(
        target, draft, prefix_cache_dir=folder, max_ctx=tokens + 2048, prefix_cache=24 << 30
    )
    turns = second_turns(session, folder, tokens, assert_restores_bits)
    assert_same_text_as(turns["pool"], turns["none"])
    for tier in ("pool", "rewritten", "host", "disk"):
        cached = turns[tier].stats.cached_tokens
        assert cached > tokens / 2, f"{tier}: {cached} cached tokens"


def test_a_second_turn_is_the_same_from_every_tier(tmp_path: Path) -> None:
    # The embedded pair has 2048 positions.
    target, draft = embedded_pair()
    session = load_session(target, draft, prefix_cache_dir=tmp_path, prefix_cache=1 << 30)
    turns = second_turns(session, tmp_path, 700, assert_restores_bits)
    for tier in ("pool", "host", "disk"):
        assert_same_text_as(turns[tier], turns["none"])
        assert turns[tier].stats.cached_tokens > 700


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_turn_of_24000_tokens_at_27b_size(grown_27b: Path, tmp_path: Path) -> None:
    target, draft = grown_27b / "target.gguf", grown_27b / "draft.gguf"
    for file in (target, draft):
        raise_context_length(file, 24_000 + 2048)
    run_in_fresh_process(check_second_turns, target, draft, tmp_path, 24_000)
