"""Runs the paths of other cards on this one (BOUGH_PRETEND_CARD): kernel checks, bits of texts, steps.

    PYTHONPATH=src:. python workshop/gpu/cards.py --data DIR --out FILE [--cards sm_86,sm_89,sm_75]
        [--model FOLDER] [--only texts,steps,checks] [--workers 4]

checks: the tests of kernels in tests/gpu without the slow ones, in --workers processes a card; --all: all of
tests/gpu. texts: 20 prompts of the embedded pair, whose trees must have all bits of that path's own plain
decoding (exact.py). These two for all cards at a time. steps: time by rows and share of the read bandwidth of
the model in --model (target.gguf and draft.gguf, as `bough grow` writes). sm_75 has no CUDA C++ kernels
and no bfloat16; it gets checks and texts only.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workshop.gpu.report import Report

ROOT = Path(__file__).parents[2]
TOO_LONG = 124  # exit code
TO_END_S = 10.0
KERNELS = (
    *("attention", "delta_rule", "embedding", "experts", "int8", "kv_cache", "norm_rope", "partial_sums"),
    *("quant_matmul", "sampler", "sampling", "slot_mapping", "tree"),
)


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
    try:
        text, _ = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest still says what has passed
        try:
            text, _ = process.communicate(timeout=TO_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        return TOO_LONG, text
    return process.returncode, text


def checks(report: Report, arch: str, options: argparse.Namespace) -> None:
    tests = ["tests/gpu"] if options.all else [f"tests/gpu/test_{name}.py" for name in KERNELS]
    command = ["-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "gpu and not slow", *tests]
    command += options.pytest

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


def texts(report: Report, arch: str, options: argparse.Namespace) -> None:
    lines = options.out.with_suffix(f".{arch}.jsonl")
    command = ["workshop/gpu/exact.py", "--data", str(options.data), "--out", str(lines)]
    command += ["--kv", "f16:20,q8_0:20", "--long", "7000", "--n-gen", "128"]
    code, text = run(arch, command, report.left - TO_END_S)
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    facts = {line["check"]: line for line in found if "check" in line}
    report.check(f"{arch}: texts in all bits", code == 0 and bool(facts), **{"of": facts})
    if code:
        print(text[-4000:], flush=True)


def steps(report: Report, arch: str, options: argparse.Namespace) -> None:
    if options.model is None or arch == "sm_75":
        report.log(f"{arch}: no steps")
        return
    result = options.out.with_suffix(f".{arch}.json")
    files = [str(options.model / "target.gguf"), "--draft", str(options.model / "draft.gguf")]
    command = ["-m", "bough", "bench", "step", *files, "--max-ctx", "4k", "--json", str(result)]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cards", default="sm_86,sm_89,sm_75")
    parser.add_argument("--only", default="texts,steps,checks")
    parser.add_argument("--data", type=Path, required=True, help="as for exact.py")
    parser.add_argument("--model", type=Path, help="folder of target.gguf and draft.gguf")
    parser.add_argument("--workers", type=int, default=4, help="processes of a card")
    parser.add_argument("--all", action="store_true", help="all tests of tests/gpu")
    parser.add_argument("--pytest", type=shlex.split, default=[], help="more arguments, as one")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out, options.data = options.out.resolve(), options.data.resolve()
    options.model = options.model and options.model.resolve()
    report = Report(options.out, options.seconds)
    cards, only = options.cards.split(","), options.only.split(",")

    def work(arch: str, part: str) -> None:
        begin = time.perf_counter()
        PARTS[part](report, arch, options)
        report.log(f"{arch}: {part}", seconds=round(time.perf_counter() - begin, 1))

    for part in only:
        # Others would change the times of steps.
        with ThreadPoolExecutor(1 if part == "steps" else len(cards)) as pool:
            list(pool.map(lambda arch, part=part: work(arch, part), cards))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
