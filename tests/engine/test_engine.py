"""The engine's loop on a tiny random model: what it delivers, where it ends, what it leaves behind."""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from pathlib import Path

import pytest
import torch

from bough.engine.engine import Done, Engine, Progress, Request, Sequence, Tokens
from bough.engine.sampler import SamplingParams
from bough.errors import PromptTooLong, UsageError
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.step import Step
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.spec.drafter import NoDrafter, Turn
from bough.spec.tree import Tree
from bough.state.sequences import SequenceStates
from tests.engine.driving import cut_after
from tests.engine.driving import run as driven

PROMPT = [5, 17, 99, 3, 42, 8, 61]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model()) as file:
        return Decoder.load(file)


def run(engine: Engine, **options) -> tuple[list[int], Done]:
    driving = {name: options.pop(name) for name in ("cut", "cancelled") if name in options}
    return driven(engine, Request(**{"prompt": PROMPT, **options}), **driving)


def plain_greedy(target: Decoder, count: int) -> list[int]:
    """Without the engine: the whole text anew for every token."""
    ids = list(PROMPT)
    for _ in range(count):
        states = SequenceStates(target.spec, max_ctx=512)
        slots = torch.tensor([states.open()])
        states.reserve(0, len(ids))
        step = Step.chunk(slots, torch.tensor([ids]), states.buffers.lengths[slots])
        ids.append(int(target.logits(target.forward(step, states.buffers).hidden[0, -1]).argmax()))
    return ids[len(PROMPT) :]


class Oracle(NoDrafter):
    """Proposes the true continuation, wrong at every `period`-th place, with wrong siblings beside it."""

    def __init__(self, text: list[int], period: int, vocabulary: int):
        super().__init__()
        self._text, self._period, self._vocabulary = text, period, vocabulary

    def plain_steps(self, turns: Sequences[Turn]) -> int:
        return 0

    def trees(self, turns: Sequences[Turn], prompts: Sequences[int] = ()) -> list[Tree]:
        return [self._tree(turn.anchor, turn.position, turn.max_rows) for turn in turns]

    def _tree(self, anchor: int, position: int, max_rows: int) -> Tree:
        tokens, parents, spine = [anchor], [-1], 0
        start = position - len(PROMPT) + 1
        for place in range(start, len(self._text)):
            if len(tokens) + 2 > max_rows:
                break
            true, other = self._text[place], (self._text[place] + 1) % self._vocabulary
            tokens += [other, (other + 1) % self._vocabulary if place % self._period == 0 else true]
            parents += [spine, spine]
            spine = len(tokens) - 1
        return Tree.of(tokens, parents)


def test_greedy_text_is_the_argmax_of_plain_forwards(target: Decoder) -> None:
    tokens, done = run(Engine(target, max_ctx=512), max_tokens=40)
    assert tokens == plain_greedy(target, 40)
    assert len(set(tokens)) > 3  # a model that repeats one token would prove nothing
    stats = done.stats.as_dict()
    assert (done.reason, stats["generated_tokens"], stats["steps"]) == ("length", 40, 39)
    assert stats["plain_steps"] == 39
    assert stats["acceptance_length"] == 1.0


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=7)])
@pytest.mark.parametrize("period", [3, 1000])
def test_a_tree_gives_the_text_of_plain_decoding(
    target: Decoder, sampling: SamplingParams, period: int
) -> None:
    plain, _ = run(Engine(target, max_ctx=512), max_tokens=120, sampling=sampling)
    oracle = Oracle(plain, period, target.spec.vocab_size)
    tokens, done = run(
        Engine(target, max_ctx=512, drafter=oracle, max_rows=23), max_tokens=120, sampling=sampling
    )
    assert tokens == plain
    assert done.stats.acceptance_length > (1.5 if period == 3 else 8)


def test_prefill_chunks_report_progress_and_do_not_change_the_text(target: Decoder) -> None:
    prompt = [(7 * i) % 250 for i in range(100)]
    whole, _ = run(Engine(target, max_ctx=512), prompt=prompt, max_tokens=20)
    engine = Engine(target, max_ctx=512, prefill_chunk=33)
    events = list(engine.generate(Request(prompt=prompt, max_tokens=20)))
    assert [event for event in events if isinstance(event, Progress)] == [
        Progress(0, 100),
        Progress(33, 100),
        Progress(66, 100),
        Progress(99, 100),
        Progress(100, 100),
    ]
    assert [token for event in events if isinstance(event, Tokens) for token in event.ids] == whole


def test_end_tokens_stop_and_are_not_delivered(target: Decoder) -> None:
    engine = Engine(target, max_ctx=512)
    plain, _ = run(engine, max_tokens=30)
    end = plain[12]
    tokens, done = run(engine, max_tokens=30, stop_ids=frozenset([end]))
    assert tokens == plain[: plain.index(end)]
    assert done.reason == "stop"


def test_a_cut_inside_a_block_ends_where_plain_decoding_would(target: Decoder) -> None:
    plain, _ = run(Engine(target, max_ctx=512), max_tokens=60)
    engine = Engine(target, max_ctx=512, drafter=Oracle(plain, 1000, target.spec.vocab_size), max_rows=31)
    for limit in (1, 2, 17, 41):
        tokens, done = run(engine, max_tokens=limit)
        assert (tokens, done.reason, done.stats.generated_tokens) == (plain[:limit], "length", limit)
        # Prefill gave the first token, steps the others.
        assert done.stats.step_tokens == limit - 1
    end = plain[25]
    tokens, done = run(engine, max_tokens=60, stop_ids=frozenset([end]))
    assert (tokens, done.reason) == (plain[: plain.index(end)], "stop")
    tokens, done = run(engine, max_tokens=60, cut=cut_after(19)[0])
    assert (tokens, done.reason) == (plain[:19], "stop")
    # What was revoked counts nowhere.
    assert (done.stats.generated_tokens, done.stats.step_tokens) == (19, 18)
    assert sum(done.stats.accepted_by_position) + done.stats.steps == 18


def test_the_context_limit_ends_the_text(target: Decoder) -> None:
    long, _ = run(Engine(target, max_ctx=512), max_tokens=60)
    tokens, done = run(Engine(target, max_ctx=20), max_tokens=60)
    # 20 places hold the prompt and 13 tokens; the one behind them is still known.
    assert (tokens, done.reason) == (long[:14], "length")
    tree = Engine(target, max_ctx=20, drafter=Oracle(long, 1000, target.spec.vocab_size), max_rows=31)
    assert run(tree, max_tokens=60)[0] == tokens
    with pytest.raises(PromptTooLong, match="7 tokens, the context holds 6") as caught:
        run(Engine(target, max_ctx=6))
    assert caught.value.raisable and caught.value.hint == "shorten the prompt or raise `max_ctx`"
    assert len(run(Engine(target, max_ctx=7))[0]) == 1


def test_a_context_that_is_the_models_own_cannot_be_raised(target: Decoder) -> None:
    longest = target.spec.context_length
    with pytest.raises(PromptTooLong) as caught:
        run(Engine(target, max_ctx=longest), prompt=[1] * (longest + 1))
    assert not caught.value.raisable
    assert caught.value.hint == "shorten the prompt: the model was made for no more tokens"


def test_cancelling_stops_at_the_next_chunk_or_step(target: Decoder) -> None:
    engine = Engine(target, max_ctx=512, prefill_chunk=2)
    asked = iter([False, False, True])
    tokens, done = run(engine, cancelled=lambda: next(asked))
    assert (tokens, done.reason) == ([], "cancelled")
    answers = iter([False] * 6 + [True])  # four chunks, the last with the first token, and two steps
    tokens, done = run(engine, cancelled=lambda: next(answers))
    assert (len(tokens), done.reason) == (3, "cancelled")
    fresh, _ = run(Engine(target, max_ctx=512, prefill_chunk=2), max_tokens=20)
    assert run(engine, max_tokens=20)[0] == fresh


def test_a_closed_or_failed_request_frees_its_slot(target: Decoder) -> None:
    engine = Engine(target, max_ctx=512)
    before, _ = run(engine, max_tokens=10)
    for _ in range(3):
        events = engine.generate(Request(prompt=PROMPT))
        next(events)
        events.close()

    def fail(tokens: list[int]) -> None:
        raise RuntimeError("a consumer broke")

    with pytest.raises(RuntimeError, match="a consumer broke"):
        run(engine, cut=fail)
    assert run(engine, max_tokens=10)[0] == before


def test_sequences_wait_for_the_slot_and_run_in_order(target: Decoder) -> None:
    engine = Engine(target, max_ctx=512)
    alone = [run(engine, prompt=prompt, max_tokens=12)[0] for prompt in (PROMPT, PROMPT[::-1])]
    first, second = (engine.add(Request(prompt=prompt, max_tokens=12)) for prompt in (PROMPT, PROMPT[::-1]))
    order: list[Sequence] = []
    tokens: dict[int, list[int]] = {id(first): [], id(second): []}
    while step := engine.step():
        for sequence, event in step:
            order += [sequence] if isinstance(event, Done) else []
            tokens[id(sequence)] += event.ids if isinstance(event, Tokens) else []
    assert order == [first, second]
    assert [tokens[id(first)], tokens[id(second)]] == alone


def test_a_sequence_that_was_cancelled_while_it_waited_never_runs(target: Decoder) -> None:
    engine = Engine(target, max_ctx=512)
    first, second, third = (engine.add(Request(prompt=PROMPT, max_tokens=4)) for _ in range(3))
    engine.step()
    assert engine.cancel(second).reason == "cancelled"
    seen = {id(sequence) for _ in range(20) for sequence, _ in engine.step()}
    assert seen == {id(first), id(third)}
    assert first.finished and third.finished and second.stats.generated_tokens == 0


def test_a_prefix_cache_that_fails_does_not_lose_the_slot(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, max_ctx=512, prefix_cache=PrefixCacheConfig(1 << 30))
    before, _ = run(engine, max_tokens=6)

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no memory for a snapshot")

    monkeypatch.setattr(engine.prefixes, "insert", fail)
    with pytest.raises(RuntimeError, match="no memory for a snapshot"):
        list(engine.generate(Request(prompt=PROMPT, max_tokens=6, boundaries={})))
    monkeypatch.undo()
    assert run(engine, max_tokens=6)[0] == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": [1, 9_999_999]}, "token 9999999 in the prompt, the vocabulary has ids 0 to"),
        ({"max_tokens": 0}, "max_tokens is 0, needed at least 1"),
    ],
)
def test_bad_requests_name_the_value(target: Decoder, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(Engine(target, max_ctx=512), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, needed between 0 and 100"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0, needed above 0 and at most 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_bad_sampling_names_the_value(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options)


def test_seeds_repeat_and_differ(target: Decoder) -> None:
    engine = Engine(target, max_ctx=512)
    texts = {
        seed: run(engine, max_tokens=30, sampling=SamplingParams(temperature=1.0, seed=seed))[0]
        for seed in (1, 2)
    }
    assert texts[1] != texts[2]
    assert run(engine, max_tokens=30, sampling=SamplingParams(temperature=1.0, seed=1))[0] == texts[1]
    fresh, done = run(engine, max_tokens=30, sampling=SamplingParams(temperature=1.0))
    repeat = SamplingParams(temperature=1.0, seed=done.stats.seed)
    assert run(engine, max_tokens=30, sampling=repeat)[0] == fresh


@pytest.mark.parametrize("count", [1, 7, 8, 9, 30, 64, 65, 450])
def test_short_prompts_by_decode_steps_give_the_text_of_chunks(target: Decoder, count: int) -> None:
    """As on a GPU, where a chunk of few tokens is all launches."""
    prompt = [(7 * i) % 250 for i in range(count)]
    expected, _ = run(Engine(target, max_ctx=512), prompt=prompt, max_tokens=20)
    oracle = Oracle(expected, 1000, target.spec.vocab_size)
    engine = Engine(target, max_ctx=512, drafter=oracle, max_rows=8, runner="graph", prefill_chunk=300)
    engine.prompts.short, reads = 256, []
    read = engine.runner.read
    engine.runner.read = lambda slot, tokens: (reads.append(len(tokens)), read(slot, tokens))[1]
    tokens, done = run(engine, prompt=prompt, max_tokens=20)
    assert tokens == expected and done.stats.prompt_tokens == count
    short = count if count <= 256 else count - 300
    assert sum(reads) == short and all(size <= 16 for size in reads)
