"""The CPU path on two pinned cores of a GPU machine's host, against llama.cpp; takes one to two minutes.

    python -m workshop gpu.cpu_host [--llama FOLDER] [--model M.gguf] [--data DATA] [--cores 2,3]
        [--out FILE]

Compiles the native library, pins itself to the cores and runs cpu_native.py with one thread and with two: the
embedded pair with trees, then, with --model, that model without a draft. Nothing is downloaded. FOLDER: see
llama_library.py; without --data the prompts are the built-in ones.
"""

import os
import subprocess
import sys
from pathlib import Path

from workshop.case import ROOT, case, command, environment
from workshop.report import Report

NATIVE = ROOT / "src/bough/kernels/native"
PAIR = ["--prompts", "6", "--rounds", "2", "--threads", "1,2", "--host"]
MODEL = ["--prompts", "2", "--n-gen", "32", "--rounds", "1", "--threads", "1,2", "--draft", "none"]


@case()
def main(
    report: Report,
    *,
    llama: Path | None = None,
    model: Path | None = None,
    data: Path | None = None,
    cores: str = "2,3",
) -> int:
    subprocess.run([sys.executable, str(NATIVE / "build.py")], check=True)
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    common = ["--backends", "native"]
    for name, path in (("llama", llama), ("data", data), ("out", report.out)):
        common += [f"--{name}", str(path)] if path is not None else []
    runs = [PAIR, [*MODEL, "--model", str(model)]] if model else [PAIR]
    one_thread = environment() | {"OMP_NUM_THREADS": "1"}
    codes = [subprocess.run(command("cpu_native", *common, *run), env=one_thread).returncode for run in runs]
    return max(codes)
