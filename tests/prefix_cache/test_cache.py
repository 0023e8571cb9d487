"""Sessions with a prefix cache: the same text with fewer tokens to prefill, also after cancellations."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from bough.session.events import Finished, Progress
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from tests.tiny_draft import draft_config, save_draft

SYSTEM = {"role": "system", "content": "You are a careful assistant who writes short answers. " * 3}
CHUNK = 64
GENERATION_PROMPT = 20  # tokens after the last message, at most
GREEDY = SamplingParams(seed=1)
WARM = SamplingParams(temperature=0.9, top_p=0.95, seed=4)


@pytest.fixture(scope="module")
def load(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Session]:
    """A session with the tiny model and a random draft."""
    path = tiny_model()
    with GGUFFile.open(path) as file:
        config = draft_config(ModelSpec.from_gguf(file))
    draft = tmp_path_factory.mktemp("draft")
    save_draft(draft, config)

    def make(*, cache: int = 1 << 30, max_ctx: int = 2048, folder: Path | None = None) -> Session:
        return load_session(
            path,
            EngineConfig(
                device="cpu",
                max_ctx=max_ctx,
                prefill_chunk=CHUNK,
                speculation=SpecConfig(budget=7, adaptive=False),
                draft=DraftConfig(draft),
                prefix_cache=cache,
                prefix_cache_dir=folder,
            ),
        )

    return make


def answer(session: Session, messages: list[dict[str, str]], **options) -> tuple[list[int], Finished]:
    request = {"max_tokens": 24, "sampling": GREEDY, "thinking": False, **options}
    *_, last = session.generate(TextRequest(messages=messages, **request))
    assert isinstance(last, Finished)
    return last.tokens, last


def nearly_all(last: Finished) -> int:
    """Return how many tokens the next prompt finds cached at least, rounded down to a chunk end."""
    length = last.stats.prompt_tokens
    return length - GENERATION_PROMPT - max(CHUNK // 16, length // 16)


def turns(session: Session, questions: list[str], **options) -> list[Finished]:
    """Run a conversation whose answers are sent back unchanged."""
    messages, found = [SYSTEM], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        tokens, last = answer(session, messages, **options)
        found.append(last)
        messages.append({"role": "assistant", "content": session.tokenizer.decode(tokens)})
    return found


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_hit_and_a_miss_give_the_same_text(load: Callable[..., Session], sampling: SamplingParams) -> None:
    questions = ["What is a tree?", "And a forest?", "Why?", "Thanks " * 40]
    warm, cold = (turns(load(cache=kept), questions, sampling=sampling) for kept in (1 << 30, 0))
    assert [last.tokens for last in warm] == [last.tokens for last in cold]
    assert all(last.stats.cached_tokens == 0 for last in cold)
    assert warm[0].stats.cached_tokens == 0
    for before, after in pairwise(warm):
        assert after.stats.cached_tokens >= nearly_all(before)
        assert after.stats.cached_tokens < after.stats.prompt_tokens


def test_interleaved_conversations_share_a_system_prompt(load: Callable[..., Session]) -> None:
    session, cold = load(), load(cache=0)
    asked = {name: [SYSTEM, {"role": "user", "content": f"{name} question"}] for name in "ab"}
    answer(session, asked["a"])
    _, other = answer(session, asked["b"])
    # Another user message after the same system message.
    assert 0 < other.stats.cached_tokens < other.stats.prompt_tokens - 5
    for name in "abab":
        again, last = answer(session, asked[name])
        assert again == answer(cold, asked[name])[0]
        assert last.stats.cached_tokens >= nearly_all(last)
    progress = next(iter(session.generate(TextRequest(messages=asked["a"], max_tokens=2))))
    assert isinstance(progress, Progress) and progress.cached == progress.done > 0


def test_snapshots_are_valid_after_a_cancellation_at_any_time(load: Callable[..., Session]) -> None:
    session, cold = load(), load(cache=0)
    messages = [SYSTEM, {"role": "user", "content": "Tell me a long story. " * 8}]
    follow = [*messages, {"role": "assistant", "content": "Once"}, {"role": "user", "content": "Go on"}]
    expected = [answer(cold, asked, max_tokens=12)[0] for asked in (messages, follow)]
    # The prompt has seven chunks; decode steps follow.
    for moment in (1, 2, 3, 5, 7, 8, 9, 12):
        session.engine.prefixes.clear()
        asked = 0

        def cancelled(moment: int = moment) -> bool:
            nonlocal asked
            asked += 1
            return asked >= moment

        _, stopped = answer(session, messages, cancelled=cancelled, max_tokens=40)
        assert stopped.reason == "cancelled"
        assert [answer(session, asked, max_tokens=12)[0] for asked in (messages, follow)] == expected


def test_an_abandoned_generator_frees_its_slot(load: Callable[..., Session]) -> None:
    session = load()
    messages = [SYSTEM, {"role": "user", "content": "Hello " * 50}]
    for leave_after in range(1, 8):
        events = session.generate(TextRequest(messages=messages, max_tokens=20, sampling=GREEDY))
        for _ in range(leave_after):
            next(events)
        events.close()
    assert answer(session, messages)[0] == answer(load(cache=0), messages)[0]


def test_the_running_request_evicts_snapshots(load: Callable[..., Session]) -> None:
    session, cold = load(max_ctx=320), load(cache=0, max_ctx=320)
    long = [{"role": "user", "content": f"{'word ' * 50}"}]
    length = len(session.encode(TextRequest(messages=long, thinking=False)))
    assert 150 < length < 300
    for name in "abcd":
        messages = [{"role": "user", "content": f"{name} {'word ' * 50}"}]
        assert answer(session, messages)[0] == answer(cold, messages)[0]
    session.engine.prefixes.clear()
    states = session.engine.states
    slot = states.open()
    assert states.shortage(slot, states.max_ctx) == 0


def test_long_raw_prompts_are_cached(load: Callable[..., Session]) -> None:
    session = load()
    found = []
    for prompt in ("short", "long " * 200, "long " * 200, "long " * 200 + "er"):
        *_, last = session.generate(TextRequest(prompt=prompt, max_tokens=4, sampling=GREEDY))
        assert isinstance(last, Finished)
        found.append((last.stats.cached_tokens, last.stats.prompt_tokens))
    assert [cached for cached, _ in found[:2]] == [0, 0]
    assert [cached for cached, _ in found[2:]] == [(found[1][1] - 1) // CHUNK * CHUNK] * 2
