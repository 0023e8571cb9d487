"""Generation of training text: many prompts through one engine, whose slots are always full.

A prompt that is asked at several temperatures is processed once: the requests after the first one follow it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bough.engine.engine import Done, Engine, Request, Tokens
from bough.engine.events import Failed
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Sequence as Running
from bough.errors import UsageError
from bough.models.decoder import Decoder

SLOTS = {"cuda": 64, "cpu": 16}  # sequences that run at once: a step holds 64 at most
_ROWS = 16  # of a prompt that one step reads beside others
# Prompts whose requests wait at a time. Their first requests come before all others of theirs, which then
# find the prompt processed.
_GROUP = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to answer, in one way."""

    prompt: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    index: int  # of what was asked
    tokens: list[int]  # without the end token
    ended: bool  # by an end token


def many_engine(target: Decoder, *, max_ctx: int) -> Engine:
    """Return an engine for many requests of plain decoding."""
    engine = Engine(target, max_ctx=max_ctx, slots=SLOTS[target.device.type], max_rows=_ROWS)
    if target.device.type == "cuda":
        engine.warmup.capture()
    return engine


def generate_batch(
    engine: Engine,
    asked: Sequence[Asked],
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[GeneratedTokens]:
    """Yield outputs as sequences finish, in no particular order.

    A sampled token depends on the seed of its request and the position, not on the other requests.
    """
    if any(not each.prompt for each in asked):
        raise UsageError("a prompt has no tokens")
    return _run(engine, asked, max_tokens, stop_ids, progress)


def _run(
    engine: Engine,
    asked: Sequence[Asked],
    max_tokens: int,
    stop_ids: frozenset[int],
    progress: Callable[[int, int], None] | None,
) -> Iterator[GeneratedTokens]:
    order = _ordered(asked)
    leaders: dict[tuple[int, ...], Running] = {}  # of the prompts that may be asked again
    indices: dict[Running, int] = {}
    outputs: dict[int, list[int]] = {}
    ended: list[Running] = []  # in the last step
    done = 0
    try:
        while order or indices:
            while order and len(indices) < engine.slots + _GROUP:
                index, last = order.popleft()
                one, key = asked[index], tuple(asked[index].prompt)
                request = Request(one.prompt, max_tokens, one.sampling, stop_ids, may_stop=False)
                sequence = engine.add(request, leader=leaders.get(key))
                leaders.setdefault(key, sequence)
                if last:
                    del leaders[key]
                indices[sequence], outputs[index] = index, []
            ended = []
            for sequence, event in engine.step():
                if isinstance(event, Tokens):
                    outputs[indices[sequence]] += event.ids
                elif isinstance(event, Failed):
                    raise event.error
                elif isinstance(event, Done):
                    ended.append(sequence)
            for sequence in ended:
                done, index = done + 1, indices.pop(sequence)
                yield GeneratedTokens(index, outputs.pop(index), sequence.reason == "stop")
            if progress is not None and ended:
                progress(done, len(asked))
    finally:
        for sequence in indices:
            engine.cancel(sequence)
        for sequence in (*indices, *ended):
            engine.release(sequence)


def _ordered(asked: Sequence[Asked]) -> deque[tuple[int, bool]]:
    """Return the indices in the order of their start, and whether a prompt is asked for the last time.

    Groups of prompts in the order given; in a group first every prompt once, then all again.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(asked):
        by_prompt.setdefault(tuple(request.prompt), []).append(index)
    prompts = list(by_prompt.values())
    order: deque[tuple[int, bool]] = deque()
    for start in range(0, len(prompts), _GROUP):
        group = prompts[start : start + _GROUP]
        for turn in range(max(map(len, group))):
            order += [(turns[turn], turn + 1 == len(turns)) for turns in group if turn < len(turns)]
    return order
