"""Compares a grown 27B's texts with the pair's on a CPU, and trees with plain decoding, token for token.

    python -m workshop gpu.lossless --data DIR --target GGUF --draft GGUF --out FILE

HumanEval prompts, greedy. Where two texts diverge, the gap between the two likeliest tokens is recorded, and
the comparison continues after the reference's token: every token of the reference is compared once. Another
process generates the CPU's texts meanwhile. Without --target the embedded pair is compared.
"""

import json
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch

from bough.bench.suites import load
from bough.config import DraftConfig, EngineConfig
from bough.engine.engine import Done, Engine, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.engine.stats import RequestStats
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from tests.gpu.texts import NEAR_TIE, TREE, embedded_pair
from workshop.case import DRAFT, TARGET, case
from workshop.report import Report

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


@case(out=Path("lossless.jsonl"))
def main(
    report: Report,
    *,
    data: Annotated[Path, "folder with humaneval/test.jsonl.gz"],
    target: Path = TARGET,
    draft: Path = DRAFT,
    prompts: int = 10,
    n_gen: int = 256,
    threads: Annotated[int, "of the CPU's text"] = 4,
) -> None:
    assert report.out is not None
    cpu_texts = report.out.with_suffix(".cpu.json")
    process = multiprocessing.get_context("spawn").Process(
        target=on_cpu, args=(data, prompts, n_gen, cpu_texts, threads)
    )
    process.start()
    config = EngineConfig(report.device, 4096, speculation=TREE, draft=DraftConfig(draft))
    session = load_session(target, config)
    engine, stops = session.engine, session.tokenizer.stop_ids
    plain = references(engine, prompts_of(session, data, prompts), n_gen, stops)
    lines = [compared("tree against plain", engine, plain, n_gen, stops, None)]
    process.join()
    small = read_references(cpu_texts)
    cpu_texts.unlink()
    same = [a.prompt for a in small] == [b.prompt for b in plain]
    # Ids are the small vocabulary's in both: the grown one only appends fillers.
    lines += [
        compared("plain against the CPU's", engine, small, n_gen, stops, PLAIN),
        compared("tree against the CPU's", engine, small, n_gen, stops, None),
    ]
    speed_up = lines[2]["tok_s"] / lines[1]["tok_s"]
    lines.append(
        {
            "what": "speed-up",
            "tree_over_plain": round(speed_up, 3),
            "share_of_acceptance": round(speed_up / lines[2]["acceptance"], 3),
        }
    )
    facts = {"seconds": round(report.spent, 1), "near_tie": NEAR_TIE, "same_prompts": same}
    for line in lines:
        report.line(**line, **facts)
    passed = same and all(line.get("beyond_a_near_tie", 0) == 0 for line in lines)
    report.check("every divergence is a near tie", passed)
