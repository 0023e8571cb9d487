"""The grown 27B's text against the pair's on a CPU, and trees against plain steps, token for token.

PYTHONPATH=src python benchmarks/gpu/lossless.py --data DATA --target T.gguf --draft D.gguf --out out.jsonl

HumanEval prompts, greedy. Where two texts part, how near the two likeliest tokens were is written down, and
the comparison goes on behind the reference's token: every token of the reference is compared once. The
CPU's text is made in another process meanwhile. Without --target the pair itself is looked at.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from treeflash.bench.suites import load
from treeflash.config import DraftConfig, EngineConfig, SpecConfig
from treeflash.engine.engine import Done, Engine, Request, Tokens
from treeflash.engine.sampler import SamplingParams
from treeflash.engine.stats import RequestStats
from treeflash.hub.catalog import named
from treeflash.session.loading import load_session
from treeflash.session.requests import TextRequest
from treeflash.session.session import Session

NEAR_TIE = 0.05  # a gap between the two likeliest logits that rounding may close
PLAIN = 0


@dataclass(frozen=True, slots=True)
class Reference:
    """A text, and how far the likeliest token was ahead of the next at each of its places."""

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
    request = Request(list(prompt), count, sampling, stops, may_cut=False, draft_budget=budget)
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


def partings(
    engine: Engine, reference: Reference, count: int, stops: frozenset[int], *, budget: int | None
) -> tuple[list[tuple[int, float | None]], RequestStats]:
    """Places where this engine's next token is another than the reference's, with the reference's gap."""
    places: list[tuple[int, float | None]] = []
    first: RequestStats | None = None
    done = 0
    wanted = [*reference.tokens, None] if reference.ended else list(reference.tokens)
    while done < len(wanted):
        prompt = [*reference.prompt, *reference.tokens[:done]]
        tokens, _, _, stats = decode(engine, prompt, count - done, stops, budget=budget, gaps=False)
        first = first or stats
        ours = [*tokens, None] if len(tokens) < count - done else tokens
        pairs = zip_longest(ours, wanted[done:], fillvalue=-1)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None or done + place >= len(wanted):
            break
        done += place
        places.append((done, reference.gaps[done] if done < len(reference.gaps) else None))
        done += 1
    assert first is not None
    return places, first


def pair() -> Any:
    found = named("treeflash-40m")
    assert found is not None and found[0].pair is not None
    return found[0].pair


def prompts_of(session: Session, data: Path, count: int) -> list[list[int]]:
    suite = load("humaneval", count, data=data, offline=True)
    return [session.encode(TextRequest(messages=list(prompt.messages))) for prompt in suite]


def on_cpu(data: Path, prompts: int, count: int, out: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    session = load_session(pair().target, EngineConfig("cpu", 2048, speculation=None))
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
    places, speeds, steps, committed = [], [], 0, 0
    for text in texts:
        parted, stats = partings(engine, text, count, stops, budget=budget)
        places += parted
        speeds.append(stats.decode_tok_s)
        steps, committed = steps + stats.steps, committed + stats.step_tokens
    tokens = sum(len(text.tokens) + text.ended for text in texts)
    far = [gap for _, gap in places if gap is None or gap >= NEAR_TIE]
    return {
        "what": name,
        "tokens": tokens,
        "partings": len(places),
        "per_10000": round(1e4 * len(places) / tokens, 2),
        "gaps": [None if gap is None else round(gap, 5) for _, gap in places],
        "beyond_a_near_tie": len(far),
        "tok_s": round(statistics.median(speeds), 1),
        "acceptance": round(committed / max(1, steps), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with humaneval/test.jsonl.gz")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--n-gen", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=4, help="of the CPU's text")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begin, aside = time.perf_counter(), options.out.with_suffix(".cpu.json")
    process = multiprocessing.get_context("spawn").Process(
        target=on_cpu, args=(options.data, options.prompts, options.n_gen, aside, options.threads)
    )
    process.start()
    target, draft = options.target or pair().target, options.draft or pair().draft
    config = EngineConfig(
        options.device,
        4096,
        speculation=SpecConfig(adaptive=False),
        draft=DraftConfig(draft),
    )
    session = load_session(target, config)
    engine, stops = session.engine, session.tokenizer.stop_ids
    plain = references(engine, prompts_of(session, options.data, options.prompts), options.n_gen, stops)
    lines = [compared("tree against plain", engine, plain, options.n_gen, stops, None)]
    process.join()
    small = read_references(aside)
    aside.unlink()
    same = [a.prompt for a in small] == [b.prompt for b in plain]
    # Ids are the small vocabulary's in both: the grown one only adds fillers behind them.
    lines += [
        compared("plain against the CPU's", engine, small, options.n_gen, stops, PLAIN),
        compared("tree against the CPU's", engine, small, options.n_gen, stops, None),
    ]
    speed_up = lines[2]["tok_s"] / lines[1]["tok_s"]
    lines.append(
        {
            "what": "speed-up",
            "tree_over_plain": round(speed_up, 3),
            "share_of_acceptance": round(speed_up / lines[2]["acceptance"], 3),
        }
    )
    facts = {"seconds": round(time.perf_counter() - begin, 1), "near_tie": NEAR_TIE, "same_prompts": same}
    with options.out.open("w") as file:
        for line in lines:
            print(json.dumps(line | facts), flush=True)
            print(json.dumps(line | facts), file=file)
    passed = same and all(line.get("beyond_a_near_tie", 0) == 0 for line in lines)
    print("PASS" if passed else "FAIL", "every parting is a near tie", flush=True)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
