"""Runs the paths of other cards on this one (TREEFLASH_PRETEND_CARD): kernel checks, bits of texts, steps.

    PYTHONPATH=src:. python benchmarks/gpu/cards.py --data DIR --out FILE [--cards sm_86,sm_89,sm_75]
        [--model FOLDER] [--only checks,texts,steps]

checks: `pytest -m gpu tests/gpu` without the slow tests. texts: 20 prompts of the embedded pair, whose trees
must have all bits of that path's own plain decoding (exact.py). steps: time by rows and share of the read
bandwidth of the model in --model (target.gguf and draft.gguf, as `treeflash grow --random` writes). sm_75
has no CUDA C++ kernels and no bfloat16; it gets checks and texts only.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.report import Report

ROOT = Path(__file__).parents[2]


def run(arch: str, command: list[str], seconds: float) -> tuple[int, str]:
    """Run a command on the card that acts as `arch`; return its exit code and what it printed."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    environment = {**os.environ, "TREEFLASH_PRETEND_CARD": arch, "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return 124, f"took more than {seconds:.0f} s"
    return done.returncode, done.stdout + done.stderr


def checks(report: Report, arch: str, options: argparse.Namespace) -> None:
    command = ["-m", "pytest", "-q", "-m", "gpu and not slow", "tests/gpu", *options.pytest]
    code, text = run(arch, command, report.left)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    summary = text.strip().splitlines()[-1:] or ["nothing was printed"]
    report.check(f"{arch}: kernel checks", code == 0, summary=summary[0], failed=failed[:40])
    if code:
        print(text[-4000:], flush=True)


def texts(report: Report, arch: str, options: argparse.Namespace) -> None:
    lines = options.out.with_suffix(f".{arch}.jsonl")
    command = ["benchmarks/gpu/exact.py", "--data", str(options.data), "--out", str(lines)]
    command += ["--kv", "f16:20,q8_0:20", "--long", "8150", "--n-gen", "128"]
    code, text = run(arch, command, report.left)
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
    command = ["-m", "treeflash", "bench", "step", *files, "--max-ctx", "4k", "--json", str(result)]
    code, text = run(arch, command, report.left)
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
    parser.add_argument("--only", default="checks,texts,steps")
    parser.add_argument("--data", type=Path, required=True, help="as for exact.py")
    parser.add_argument("--model", type=Path, help="folder of target.gguf and draft.gguf")
    parser.add_argument("--pytest", type=shlex.split, default=[], help="more arguments, as one")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out, options.data = options.out.resolve(), options.data.resolve()
    options.model = options.model and options.model.resolve()
    report = Report(options.out, options.seconds)
    for arch in options.cards.split(","):
        for part in options.only.split(","):
            begin = time.perf_counter()
            PARTS[part](report, arch, options)
            report.log(f"{arch}: {part}", seconds=round(time.perf_counter() - begin, 1))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
