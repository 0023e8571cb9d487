"""Runs the paths of other cards on this one (BOUGH_PRETEND_CARD): kernel checks, bits of texts, steps.

    python -m workshop gpu.cards --data DIR --out FILE [--cards sm_86,sm_89,sm_75]
        [--model FOLDER] [--only texts,steps,checks] [--workers 4]

checks: the tests of kernels in tests/gpu without the slow ones, in --workers processes a card; --all: all of
tests/gpu. texts: 20 prompts of the embedded pair, whose trees must have all bits of that path's own plain
decoding (exact.py). These two for all cards at a time. steps: time by rows and share of the read bandwidth of
the model in --model (target.gguf and draft.gguf, as `bough grow` writes). sm_75 has no CUDA C++ kernels
and no bfloat16; it gets checks and texts only.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from workshop.case import ROOT, case, output_of
from workshop.report import Report

TOO_LONG = 124  # exit code
TO_END_S = 10.0
KERNELS = (
    *("attention", "delta_rule", "embedding", "experts", "int8", "kv_cache", "norm_rope", "partial_sums"),
    *("quant_matmul", "sampler", "sampling", "slot_mapping", "tree"),
)


@dataclass(frozen=True)
class Options:
    data: Annotated[Path, "as for exact.py"]
    cards: str = "sm_86,sm_89,sm_75"
    only: str = "texts,steps,checks"
    model: Annotated[Path | None, "folder of target.gguf and draft.gguf"] = None
    workers: Annotated[int, "processes of a card"] = 4
    all: Annotated[bool, "all tests of tests/gpu"] = False
    pytest: Annotated[str, "more arguments, as one"] = ""


def run(arch: str, command: list[str], seconds: float) -> tuple[int, str]:
    """Run a command on the card that acts as `arch`; return its exit code and what it printed."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, *given)))
    environment = {**os.environ, "BOUGH_PRETEND_CARD": arch, "PYTHONPATH": paths}
    process = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    text, _, late = output_of(process, max(1.0, seconds), TO_END_S)
    return TOO_LONG if late else process.returncode, text


def checks(report: Report, arch: str, options: Options) -> None:
    tests = ["tests/gpu"] if options.all else [f"tests/gpu/test_{name}.py" for name in KERNELS]
    command = ["-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "gpu and not slow", *tests]
    command += shlex.split(options.pytest)

    def part(number: int) -> tuple[int, str]:
        return run(arch, [*command, "--shard", f"{number}/{options.workers}"], report.left - TO_END_S)

    with ThreadPoolExecutor(options.workers) as pool:
        parts = list(pool.map(part, range(options.workers)))
    text = "\n".join(each for _, each in parts)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    counts = Counter[str]()
    for _, each in parts:
        last = each.strip().splitlines()[-1:] or [""]
        for number, what in re.findall(r"(\d+) (passed|failed|error|skipped)", last[0]):
            counts[what] += int(number)
    late = sum(code == TOO_LONG for code, _ in parts)
    good = all(code == 0 for code, _ in parts)
    report.check(f"{arch}: kernel checks", good, tests=dict(counts), not_finished=late, names=failed[:40])
    for code, each in parts:
        if code:
            print(each[-2500:], flush=True)


def texts(report: Report, arch: str, options: Options) -> None:
    lines = report.out.with_suffix(f".{arch}.jsonl")
    command = ["-m", "workshop", "gpu.exact", "--data", str(options.data), "--out", str(lines)]
    command += ["--kv", "f16:20,q8_0:20", "--long", "7000", "--n-gen", "128"]
    code, text = run(arch, command, report.left - TO_END_S)
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    facts = {line["check"]: line for line in found if "check" in line}
    report.check(f"{arch}: texts in all bits", code == 0 and bool(facts), **{"of": facts})
    if code:
        print(text[-4000:], flush=True)


def steps(report: Report, arch: str, options: Options) -> None:
    if options.model is None or arch == "sm_75":
        report.log(f"{arch}: no steps")
        return
    result = report.out.with_suffix(f".{arch}.json")
    files = [str(options.model / "target.gguf"), "--draft", str(options.model / "draft.gguf")]
    command = ["-m", "bough", "step", *files, "--max-ctx", "4k", "--json", str(result)]
    code, text = run(arch, command, report.left - TO_END_S)
    report.check(f"{arch}: steps ran", code == 0)
    if code:
        print(text[-4000:], flush=True)
        return
    measured = json.loads(result.read_text())
    report.log(f"{arch}: steps", **{key: measured[key] for key in ("device", "graphs", "read_gb_s")})
    for row in measured["sizes"]:
        facts = {"forward_ms": round(row["verify_ms"], 3), "share": round(row["bandwidth_share"], 3)}
        report.log(f"{arch}: step", rows=row["rows"], **facts)


PARTS = {"checks": checks, "texts": texts, "steps": steps}


@case(seconds=560, out=Path("cards.jsonl"))
def main(report: Report, options: Options) -> None:
    assert report.out is not None
    report.out = report.out.resolve()
    model = options.model and options.model.resolve()
    options = replace(options, data=options.data.resolve(), model=model)
    cards, only = options.cards.split(","), options.only.split(",")

    def work(arch: str, part: str) -> None:
        begin = time.perf_counter()
        PARTS[part](report, arch, options)
        report.log(f"{arch}: {part}", seconds=round(time.perf_counter() - begin, 1))

    for part in only:
        # Others would change the times of steps.
        with ThreadPoolExecutor(1 if part == "steps" else len(cards)) as pool:
            list(pool.map(lambda arch, part=part: work(arch, part), cards))
