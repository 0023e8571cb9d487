"""Peak memory and time of loading a model on a CPU, in this fresh process.

    python workshop/cpu_memory.py [--model M.gguf] [--threads 2] [--max-ctx 2048] [--out FILE]

Without --model the embedded target is measured. A tiny model is loaded and run first: what the process takes
then (PyTorch, imports, native code) is the baseline. `over_baseline` is the peak (VmHWM) beyond it after a
load and a text of 64 tokens; `ratio` is that without the KV cache, as a multiple of the file, and
`ratio_without_text` also without the tokenizer and the template.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import bough
from bough.bench.machine import head
from bough.config import EngineConfig
from bough.convert.tiny import make_tiny
from bough.engine.engine import Request
from bough.gguf.reader import GGUFFile
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.text.tokenizer import Tokenizer

PROMPT = "Count the words of this sentence. " * 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-ctx", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = options.model or Path(str(bough.__file__)).parent / "pair" / "target.gguf"
    with tempfile.TemporaryDirectory() as folder:
        run(load(make_tiny(Path(folder, "tiny.gguf")), options))
    settings = {name: value for name, value in vars(options).items() if isinstance(value, int | str)}
    line = {**head(settings, " ".join(sys.argv)), "what": "cpu_memory", **measure(model, options)}
    print(json.dumps(line, indent=1))
    if options.out is not None:
        with options.out.open("a") as file:
            print(json.dumps(line), file=file)
    return 0


def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    model.read_bytes()  # from the page cache from now on
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    baseline = resident("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    session = load(model, options)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    loaded = resident("VmHWM") - baseline
    run(session)
    over, size = resident("VmHWM") - baseline, model.stat().st_size / 2**20
    text = resident("VmRSS")
    with GGUFFile.open(model) as file:
        kept = Tokenizer.from_metadata(file.metadata)  # a second one, after the peak was read
    text = resident("VmRSS") - text
    del kept
    cache = sum(plane.nbytes for plane in session.engine.states.planes) / 2**20
    return {
        "load_s": seconds,
        "load_cpu_s": cpu,
        "baseline_mib": baseline,
        "loaded_mib": loaded,
        "over_baseline_mib": over,
        "text_mib": text,
        "file_mib": size,
        "cache_mib": cache,
        "ratio": (over - cache) / size,
        "ratio_without_text": (over - cache - text) / size,
    }


def load(model: Path, options: argparse.Namespace) -> Session:
    config = EngineConfig(
        device="cpu",
        max_ctx=options.max_ctx,
        speculation=None,
        cpu_backend="native",
        threads=options.threads,
        prefix_cache=0,
    )
    return load_session(model, config)


def run(session: Session) -> None:
    prompt = session.encode(TextRequest(messages=[{"role": "user", "content": PROMPT}]))
    for _ in session.engine.generate(Request(prompt=prompt, max_tokens=64)):
        pass


def resident(field: str) -> float:
    """Return a line of the process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    sys.exit(main())
