"""Compares two versions of the source on one machine: step times, throughput, and whether text is the same.

    python -m workshop compare --before FOLDER --after src --data DATA --out compare.jsonl [--device cuda]
        [--target T.gguf --draft D.gguf] [--prompts 10] [--n-gen 256] [--rounds 2] [--label NAME]
        [--budget 23] [--sizes 1 8 24]

FOLDER holds the package `bough` of the other version (`git worktree add ../before REF`: ../before/src).
Every round runs before, after, after, before in processes of their own. DATA holds humaneval/test.jsonl.gz.
Without --target the embedded pair is measured. Greedy and sampled text, plain and with trees, is compared
token for token.
"""

import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from workshop.case import DRAFT, ROOT, TARGET, case
from workshop.report import Report

SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True)
class Options:
    data: Path
    before: Path = ROOT / "src"
    after: Path = ROOT / "src"
    target: Path = TARGET
    draft: Path = DRAFT
    prompts: int = 10
    n_gen: int = 256
    repeats: int = 25
    budget: Annotated[int, "nodes of a tree"] = 23
    sizes: Annotated[Sequence[int], "rows of the timed steps"] = (1, 8, 24)
    rounds: int = 2
    label: str = ""


@case(device="cpu")
def main(report: Report, options: Options, *, worker: bool = False) -> bool:
    if worker:
        print(json.dumps(measure(options, report.device)), flush=True)
        return False
    return compare(report, options)


def compare(report: Report, options: Options) -> bool:
    runs: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for _ in range(options.rounds):
        for version in ("before", "after", "after", "before"):
            source = str((options.before if version == "before" else options.after).resolve())
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "workshop", *sys.argv[1:], "--worker"],
                env={**os.environ, "PYTHONPATH": f"{source}:{ROOT}"},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            runs[version].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{version}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    line = {"what": "compare", "label": options.label, **summary(runs)}
    report.line(**line)
    return line["texts_differ"] > 0


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    texts = [run["texts"] for version in runs.values() for run in version]
    differing = sum(any(other[index] != text for other in texts) for index, text in enumerate(texts[0]))
    times = {}
    for name in runs["before"][0]["times"]:
        found = {version: [run["times"][name] for run in each] for version, each in runs.items()}
        middle = {version: statistics.median(values) for version, values in found.items()}
        times[name] = {**found, "after_over_before": round(middle["after"] / middle["before"], 4)}
    facts = {key: runs["after"][0][key] for key in ("device", "torch", "graphs")}
    count = sum(len(text) for text in texts[0])
    return {**facts, "texts": len(texts[0]), "tokens": count, "texts_differ": differing, "times": times}


def measure(options: Options, device: str) -> dict[str, Any]:
    import torch

    from bough.bench.step import measure_steps
    from bough.config import DraftConfig, EngineConfig, SpecConfig
    from bough.engine.sampler import SamplingParams
    from bough.session.loading import load_session
    from bough.session.requests import TextRequest

    draft = DraftConfig(options.draft)
    speculation = SpecConfig(budget=options.budget, adaptive=False)
    config = EngineConfig(device, 4096, speculation=speculation, draft=draft, prefix_cache=0)
    session = load_session(options.target, config)
    times: dict[str, float] = {}
    texts: list[list[int]] = []
    prompts = read_prompts(options.data, options.prompts)
    samplings = {"greedy": SamplingParams(seed=1), "sampled": SamplingParams(**SAMPLED, seed=2)}
    for kind, sampling in samplings.items():
        for name, budget in (("plain", 0), ("tree", None)):
            seconds = tokens = steps = 0
            for prompt in prompts * (3 if name == "tree" else 1):
                request = TextRequest(
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=options.n_gen,
                    sampling=sampling,
                    draft_budget=budget,
                )
                finished: Any = list(session.generate(request))[-1]
                texts.append(finished.tokens)
                stats = finished.stats
                if stats.generated_tokens > 1:
                    seconds += (stats.generated_tokens - 1) / stats.decode_tok_s
                    tokens, steps = tokens + stats.generated_tokens - 1, steps + stats.steps
            times[f"{kind} {name}, ms per step"] = 1000 * seconds / steps
            times[f"{kind} {name}, ms per token"] = 1000 * seconds / tokens
    steps = measure_steps(session, context=256, repeats=options.repeats, sizes=options.sizes)
    for row in steps["sizes"]:
        for part in ("draft_ms", "verify_ms", "walk_ms", "step_ms"):
            times[f"{row['rows']} rows, {part}"] = row[part]
    return {
        "times": times,
        "texts": texts,
        "device": steps["device"],
        "graphs": steps["graphs"],
        "torch": torch.__version__,
    }


def read_prompts(data: Path, count: int) -> list[str]:
    with gzip.open(data / "humaneval" / "test.jsonl.gz", "rt") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    return prompts[:: max(1, len(prompts) // count)][:count]
