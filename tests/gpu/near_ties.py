"""Where texts diverge, and whether only at near ties: every token of a reference is compared once.

After a divergence the comparison goes on from the reference's token; the gap between its two likeliest tokens
is recorded. The CPU's texts come from another process.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from bough.bench.suites import load
from bough.config import EngineConfig
from bough.engine.engine import Done, Engine, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.engine.stats import RequestStats
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from tests.gpu.texts import NEAR_TIE, embedded_pair

PLAIN = 0  # draft budget


@dataclass(frozen=True, slots=True)
class Reference:
    """A text, and the gap between the two highest logits at each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    ended: bool  # by an end token, which `gaps` counts and `tokens` does not


def decode(
    engine: Engine,
    prompt: Sequence[int],
    count: int,
    stops: frozenset[int],
    *,
    budget: int | None,
    gaps: bool,
) -> tuple[list[int], list[float], bool, RequestStats]:
    sampling = SamplingParams(seed=1, logprobs=2 if gaps else None)
    tokens: list[int] = []
    found: list[float] = []
    request = Request(list(prompt), count, sampling, stops, may_stop=False, draft_budget=budget)
    for event in engine.generate(request):
        if isinstance(event, Tokens):
            tokens += event.ids
            for each in event.logprobs or []:
                first, second = (logprob for _, logprob in each.top[:2])
                found.append(first - second)
        elif isinstance(event, Done):
            return tokens, found, event.reason == "stop", event.stats
    raise AssertionError("no end")


def references(
    engine: Engine, prompts: Sequence[list[int]], count: int, stops: frozenset[int]
) -> list[Reference]:
    return [
        Reference(prompt, *decode(engine, prompt, count, stops, budget=PLAIN, gaps=True)[:3])
        for prompt in prompts
    ]


def divergences(
    engine: Engine, reference: Reference, count: int, stops: frozenset[int], *, budget: int | None
) -> tuple[list[tuple[int, float | None]], RequestStats]:
    """Return where this engine's next token differs from the reference's, with the reference's gap there."""
    found: list[tuple[int, float | None]] = []
    first: RequestStats | None = None
    done = 0
    wanted = [*reference.tokens, None] if reference.ended else list(reference.tokens)
    while done < len(wanted):
        prompt = [*reference.prompt, *reference.tokens[:done]]
        tokens, _, _, stats = decode(engine, prompt, count - done, stops, budget=budget, gaps=False)
        first = first or stats
        ours = [*tokens, None] if len(tokens) < count - done else tokens
        pairs = zip_longest(ours, wanted[done:], fillvalue=-1)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if index is None or done + index >= len(wanted):
            break
        done += index
        found.append((done, reference.gaps[done] if done < len(reference.gaps) else None))
        done += 1
    assert first is not None
    return found, first


def prompts_of(session: Session, data: Path, count: int) -> list[list[int]]:
    suite = load("humaneval", count, data=data, offline=True)
    return [session.encode(TextRequest(messages=list(prompt.messages))) for prompt in suite]


def on_cpu(data: Path, prompts: int, count: int, out: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    session = load_session(embedded_pair()[0], EngineConfig("cpu", 2048, speculation=None))
    ids, stops = prompts_of(session, data, prompts), session.tokenizer.stop_ids
    found = references(session.engine, ids, count, stops)
    out.write_text(json.dumps([[r.prompt, r.tokens, r.gaps, r.ended] for r in found]))


def read_references(path: Path) -> list[Reference]:
    return [Reference(*each) for each in json.loads(path.read_text())]


def compared(
    name: str,
    engine: Engine,
    texts: Sequence[Reference],
    count: int,
    stops: frozenset[int],
    budget: int | None,
) -> dict[str, Any]:
    found, speeds, steps, committed = [], [], 0, 0
    for text in texts:
        diverging, stats = divergences(engine, text, count, stops, budget=budget)
        found += diverging
        speeds.append(stats.decode_tok_s)
        steps, committed = steps + stats.steps, committed + stats.step_tokens
    tokens = sum(len(text.tokens) + text.ended for text in texts)
    far = [gap for _, gap in found if gap is None or gap >= NEAR_TIE]
    return {
        "what": name,
        "tokens": tokens,
        "partings": len(found),
        "per_10000": round(1e4 * len(found) / tokens, 2),
        "gaps": [None if gap is None else round(gap, 5) for _, gap in found],
        "beyond_a_near_tie": len(far),
        "tok_s": round(statistics.median(speeds), 1),
        "acceptance": round(committed / max(1, steps), 3),
    }
