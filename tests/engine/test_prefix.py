"""Earlier conversations are gone on from: same text, less work, and nothing unsound is ever kept."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.tiny_draft import draft_config, save_draft
from treeflash.config import DraftConfig, EngineConfig, SpecConfig
from treeflash.engine.prefix import Kind, PrefixCache, Snapshot
from treeflash.engine.requests import Finished, Progress, TextRequest
from treeflash.engine.sampler import SamplingParams
from treeflash.engine.session import Session
from treeflash.gguf.reader import GGUFFile
from treeflash.models.spec import ModelSpec
from treeflash.state.sequences import SavedSequence

SYSTEM = {"role": "system", "content": "You are a careful assistant who writes short answers. " * 3}
INVITATION = 20  # tokens, at most, that ask for an answer behind the last message
GREEDY = SamplingParams(seed=1)
WARM = SamplingParams(temperature=0.9, top_p=0.95, seed=4)


class Cache:
    """A cache of made-up snapshots, and what it let go of."""

    def __init__(self, conversations: int = 2):
        self.forgotten: list[SavedSequence] = []
        self.cache = PrefixCache(self.forgotten.append, conversations=conversations)

    def put(self, tokens: list[int], kind: Kind) -> Snapshot:
        state = SavedSequence(len(tokens), [], (None, None), [], 0)  # ty: ignore[invalid-argument-type]
        snapshot = Snapshot(tokens, kind, state, None)
        self.cache.put(snapshot)
        return snapshot


def test_the_longest_exact_beginning_is_found() -> None:
    made = Cache()
    head, short, long = (
        made.put([1, 2], "head"),
        made.put([1, 2, 3], "question"),
        made.put([1, 2, 3, 4, 5], "answer"),
    )
    match = made.cache.match
    assert match([1, 2, 3, 4, 5, 6]) is long
    # Something has to be left to compute.
    assert match([1, 2, 3, 4, 5]) is short
    assert match([1, 2, 3, 9, 9, 9]) is short
    assert match([1, 2, 9]) is head
    assert match([1]) is None and match([2, 2, 3, 4]) is None


def test_two_conversations_are_kept_with_the_newest_of_each_kind() -> None:
    made = Cache()
    for start in (10, 20):
        made.put([1, start], "question")
        made.put([1, start, 5], "answer")
        made.put([1, start, 5, 6], "turn")
    assert len(made.cache) == 6 and not made.forgotten
    newer = made.put([1, 10, 5, 6, 7], "turn")
    assert [saved.length for saved in made.forgotten] == [4] and len(made.cache) == 6
    made.put([1, 30], "question")  # a third one: the second was used longest ago
    assert made.cache.match([1, 20, 5, 6, 0]) is None
    assert made.cache.match([1, 10, 5, 6, 7, 0]) is newer
    made.put([1, 40], "question")  # the first was just asked for
    assert made.cache.match([1, 30, 0]) is None
    assert made.cache.match([1, 10, 5, 6, 7, 0]) is newer
    made.cache.clear()
    assert len(made.cache) == 0 and len(made.forgotten) == 9


def test_heads_are_shared_by_conversations() -> None:
    made = Cache()
    head = made.put([1, 2], "head")
    for start in range(5):
        made.put([1, 2, start], "question")
        assert made.cache.match([1, 2, 77, 78]) is head
    made.put([3, 4], "head")
    made.cache.match([1, 2, 9])
    made.put([5, 6], "head")
    assert made.cache.match([3, 4, 9]) is None and made.cache.match([1, 2, 9]) is head


def test_nothing_is_kept_where_nothing_shall_be() -> None:
    made = Cache(conversations=0)
    made.put([1], "answer")
    assert len(made.cache) == 0 and len(made.forgotten) == 1 and not made.cache.evict()


@pytest.fixture(scope="module")
def load(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Session]:
    """A session with the tiny model and a random draft."""
    path = tiny_model()
    with GGUFFile.open(path) as file:
        config = draft_config(ModelSpec.from_gguf(file))
    draft = tmp_path_factory.mktemp("draft")
    save_draft(draft, config)

    def make(*, conversations: int = 2, max_ctx: int = 2048) -> Session:
        return Session.load(
            path,
            EngineConfig(
                device="cpu",
                max_ctx=max_ctx,
                prefill_chunk=64,
                speculation=SpecConfig(budget=7, adaptive=False),
                draft=DraftConfig(draft),
                conversations=conversations,
            ),
        )

    return make


def answer(session: Session, messages: list[dict[str, str]], **options) -> tuple[list[int], Finished]:
    request = {"max_tokens": 24, "sampling": GREEDY, "thinking": False, **options}
    *_, last = session.generate(TextRequest(messages=messages, **request))
    assert isinstance(last, Finished)
    return last.tokens, last


def turns(session: Session, questions: list[str], **options) -> list[Finished]:
    """A conversation in which every answer is sent back as it came."""
    messages, found = [SYSTEM], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        tokens, last = answer(session, messages, **options)
        found.append(last)
        messages.append({"role": "assistant", "content": session.tokenizer.decode(tokens)})
    return found


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_hit_gives_the_text_of_a_miss(load: Callable[..., Session], sampling: SamplingParams) -> None:
    questions = ["What is a tree?", "And a forest?", "Why?", "Thanks " * 40]
    warm, cold = (turns(load(conversations=kept), questions, sampling=sampling) for kept in (2, 0))
    assert [last.tokens for last in warm] == [last.tokens for last in cold]
    assert all(last.stats.cached_tokens == 0 for last in cold)
    assert warm[0].stats.cached_tokens == 0
    for before, after in pairwise(warm):
        # At least all of the last prompt but its invitation to answer.
        assert after.stats.cached_tokens >= before.stats.prompt_tokens - INVITATION
        assert after.stats.cached_tokens < after.stats.prompt_tokens


def test_conversations_take_turns_and_share_a_head(load: Callable[..., Session]) -> None:
    session, cold = load(), load(conversations=0)
    asked = {name: [SYSTEM, {"role": "user", "content": f"{name} question"}] for name in "abc"}
    answer(session, asked["a"])
    _, other = answer(session, asked["b"])
    # Another question behind the same system message.
    assert 0 < other.stats.cached_tokens < other.stats.prompt_tokens - 5
    for name in "abab":
        again, last = answer(session, asked[name])
        assert again == answer(cold, asked[name])[0]
        assert last.stats.cached_tokens >= last.stats.prompt_tokens - INVITATION
    progress = next(iter(session.generate(TextRequest(messages=asked["a"], max_tokens=2))))
    assert isinstance(progress, Progress) and progress.cached == progress.done > 0
    answer(session, asked["c"])
    _, forgotten = answer(session, asked["b"])
    assert forgotten.stats.cached_tokens == other.stats.cached_tokens


def test_cancelling_at_any_moment_leaves_sound_states(load: Callable[..., Session]) -> None:
    session, cold = load(), load(conversations=0)
    messages = [SYSTEM, {"role": "user", "content": "Tell me a long story. " * 8}]
    follow = [*messages, {"role": "assistant", "content": "Once"}, {"role": "user", "content": "Go on"}]
    expected = [answer(cold, asked, max_tokens=12)[0] for asked in (messages, follow)]
    # The prompt is read in seven chunks; then come steps.
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


def test_a_reader_that_leaves_keeps_nothing_open(load: Callable[..., Session]) -> None:
    session = load()
    messages = [SYSTEM, {"role": "user", "content": "Hello " * 50}]
    for leave_after in range(1, 8):
        events = session.generate(TextRequest(messages=messages, max_tokens=20, sampling=GREEDY))
        for _ in range(leave_after):
            next(events)
        events.close()
    assert answer(session, messages)[0] == answer(load(conversations=0), messages)[0]


def test_memory_goes_to_the_request_at_hand(load: Callable[..., Session]) -> None:
    session, cold = load(max_ctx=320), load(conversations=0, max_ctx=320)
    long = [{"role": "user", "content": f"{'word ' * 50}"}]
    length = len(session.encode(TextRequest(messages=long, thinking=False)))
    assert 150 < length < 300
    for name in "abcd":
        messages = [{"role": "user", "content": f"{name} {'word ' * 50}"}]
        assert answer(session, messages)[0] == answer(cold, messages)[0]
    session.engine.prefixes.clear()
    states = session.engine.states
    slot = states.open()
    assert states.has_room(slot, states.max_ctx)


def test_raw_prompts_are_remembered_when_long(load: Callable[..., Session]) -> None:
    session = load()
    found = []
    for prompt in ("short", "long " * 200, "long " * 200, "long " * 200 + "er"):
        *_, last = session.generate(TextRequest(prompt=prompt, max_tokens=4, sampling=GREEDY))
        assert isinstance(last, Finished)
        found.append((last.stats.cached_tokens, last.stats.prompt_tokens))
    assert [cached for cached, _ in found[:2]] == [0, 0]
    assert found[2][0] == found[2][1] - 1
    assert found[3][0] > 0
