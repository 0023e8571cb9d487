"""The CPU path on two pinned cores of a GPU machine's host, against llama.cpp; takes one to two minutes.

    python workshop/gpu/cpu_host.py [--llama FOLDER] [--model M.gguf] [--data DATA] [--cores 2,3]
        [--out FILE]

Compiles the native library, pins itself to the cores and runs cpu_native.py with one thread and with two: the
embedded pair with trees, then, with --model, that model without a draft. Nothing is downloaded. FOLDER: see
llama_library.py; without --data the prompts are the built-in ones.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/bough/kernels/native"
PAIR = ["--prompts", "6", "--rounds", "2", "--threads", "1,2", "--host"]
MODEL = ["--prompts", "2", "--n-gen", "32", "--rounds", "1", "--threads", "1,2", "--draft", "none"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cores", default="2,3")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    subprocess.run([sys.executable, str(NATIVE / "build.py")], check=True)
    os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    common = ["--backends", "native"]
    for name in ("llama", "data", "out"):
        if (path := getattr(options, name)) is not None:
            common += [f"--{name}", str(path)]
    runs = [PAIR, [*MODEL, "--model", str(options.model)]] if options.model else [PAIR]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    codes = [
        subprocess.run(
            [sys.executable, str(ROOT / "workshop/cpu_native.py"), *common, *run], env=environment
        ).returncode
        for run in runs
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
