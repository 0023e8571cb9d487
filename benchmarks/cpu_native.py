"""Decoding on a CPU: native code, PyTorch and llama.cpp, interleaved in one process.

    python benchmarks/cpu_native.py --llama FOLDER [--model M.gguf --draft D.gguf|none] [--threads 1,2]
        [--backends native,torch] [--prompts 5] [--n-gen 64] [--rounds 3] [--data DATA] [--out FILE]

FOLDER: see llama_library.py. Without --model the embedded pair is measured. DATA holds
humaneval/test.jsonl.gz; without it a few prompts of our own are used. Every round decodes each prompt in
every way; llama.cpp is timed with its choice of the likeliest token. A step during which the system took the
CPU from the process (involuntary context switches) is dropped and counted; medians and least times are of
the rest, tok_s is of all. Time with two threads means little on a busy machine: the line has the load.
"""

import argparse
import gzip
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llama_library import LlamaCpp

import treeflash
from treeflash.bench.machine import head
from treeflash.config import DraftConfig, EngineConfig, SpecConfig
from treeflash.engine.engine import Request, Tokens
from treeflash.session.loading import load_session
from treeflash.session.requests import TextRequest
from treeflash.session.session import Session

PROMPTS = [
    "Write a Python function that counts the vowels in a string.",
    "Tom has 3 boxes with 12 apples each. He gives away 10 apples. How many apples does he have left?",
    "def fibonacci(n):",
]


@dataclass
class Times:
    """Seconds of steps, wall and CPU time of the calling thread, and the tokens they gave."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    dropped: int = 0

    def step(self, run: Callable[[], int]) -> None:
        """Time a step that returns how many tokens it gave."""
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        cpu, wall = time.thread_time(), time.perf_counter()
        self.tokens += run()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.steps += 1
        self.seconds += wall
        self.cpu_seconds += cpu
        if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw > switches:
            self.dropped += 1
        else:
            self.wall.append(wall)
            self.cpu.append(cpu)

    def summary(self) -> dict[str, Any]:
        def ms(values: list[float]) -> dict[str, float]:
            if not values:
                return {}
            return {"median_ms": 1000 * statistics.median(values), "least_ms": 1000 * min(values)}

        return {
            "tokens": self.tokens,
            "tokens_per_step": self.tokens / self.steps,
            "tok_s": self.tokens / self.seconds,
            "tok_per_cpu_s": self.tokens / self.cpu_seconds,
            "step_wall": ms(self.wall),
            "step_cpu": ms(self.cpu),
            "steps": self.steps,
            "dropped": self.dropped,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", default="")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--backends", default="native,torch")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--n-gen", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for threads in map(int, options.threads.split(",")):
        line = {**head(vars_of(options), " ".join(sys.argv)), "what": "cpu_native", "threads": threads}
        line |= measure(options, threads)
        print(json.dumps(line, indent=1), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                print(json.dumps(line), file=file)
    return 0


def vars_of(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if isinstance(value, int | str)}


def measure(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    pair = Path(str(treeflash.__file__)).parent / "pair"
    model = options.model or pair / "target.gguf"
    draft = None if options.draft == "none" else Path(options.draft or pair / "draft.gguf")
    ways: dict[str, Session] = {}
    for backend in options.backends.split(","):
        for name, speculation in (("plain", None), ("trees", SpecConfig())):
            config = EngineConfig(
                device="cpu",
                max_ctx=4096,
                speculation=speculation,
                draft=DraftConfig(draft) if draft and speculation else None,
                cpu_backend=backend,
                threads=threads,
                prefix_cache=0,
            )
            ways[f"{backend} {name}"] = load_session(model, config)
    llama = LlamaCpp(options.llama, model, threads=threads) if options.llama else None
    first = next(iter(ways.values()))
    prompts = [
        first.encode(TextRequest(messages=[{"role": "user", "content": text}])) for text in texts(options)
    ]
    times: dict[str, Times] = {}
    prefill: dict[str, Times] = {}
    outputs: dict[str, list[list[int]]] = {}
    for number in range(options.rounds + 1):
        if number == 1:
            times, outputs = {}, {}  # the first round warms up: costs of trees are learnt in it
        for prompt in prompts:
            for name, session in ways.items():
                found = generate(session, prompt, options.n_gen, times.setdefault(name, Times()))
                outputs.setdefault(name, []).append(found)
            if llama is not None:
                found = generate_llama(llama, prompt, options.n_gen, times.setdefault("llama.cpp", Times()))
                outputs.setdefault("llama.cpp", []).append(found)
    long = (prompts[0] * options.prefill)[: options.prefill]
    for _ in range(options.rounds):
        for name in [name for name in ways if name.endswith("plain")]:
            read(ways[name], long, prefill.setdefault(name, Times()))
        if llama is not None:
            read_llama(llama, long, prefill.setdefault("llama.cpp", Times()))
    plain = outputs[next(iter(ways))]
    return {
        "decode": {name: each.summary() for name, each in times.items()},
        "prefill": {name: each.summary() for name, each in prefill.items()},
        "texts_as_the_first": {
            name: f"{sum(a == b for a, b in zip(plain, found, strict=True))} of {len(plain)}"
            for name, found in outputs.items()
        },
    }


def texts(options: argparse.Namespace) -> list[str]:
    if options.data is None:
        return PROMPTS[: options.prompts]
    with gzip.open(options.data / "humaneval" / "test.jsonl.gz", "rt") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    return prompts[:: max(1, len(prompts) // options.prompts)][: options.prompts]


def generate(session: Session, prompt: list[int], count: int, times: Times) -> list[int]:
    """Decode greedily without end tokens; only the decode steps are timed."""
    engine, tokens = session.engine, []
    sequence = engine.add(Request(prompt=prompt, max_tokens=count))

    def step() -> int:
        before = len(tokens)
        for _, event in engine.step():
            if isinstance(event, Tokens):
                tokens.extend(event.ids)
        return len(tokens) - before

    try:
        while not tokens:
            step()
        while not sequence.finished:
            times.step(step)
    finally:
        engine.release(sequence)
    return tokens


def generate_llama(llama: LlamaCpp, prompt: list[int], count: int, times: Times) -> list[int]:
    llama.clear()
    llama.decode(prompt)
    tokens = [llama.best()]

    def step() -> int:
        llama.decode(tokens[-1:])
        tokens.append(llama.best())
        return 1

    while len(tokens) < count:
        times.step(step)
    return tokens


def read(session: Session, prompt: list[int], times: Times) -> None:
    engine = session.engine
    sequence = engine.add(Request(prompt=prompt, max_tokens=1))

    def whole() -> int:
        while not sequence.finished:
            engine.step()
        return len(prompt)

    try:
        times.step(whole)
    finally:
        engine.release(sequence)


def read_llama(llama: LlamaCpp, prompt: list[int], times: Times) -> None:
    llama.clear()

    def whole() -> int:
        llama.decode(prompt)
        llama.best()
        return len(prompt)

    times.step(whole)


if __name__ == "__main__":
    sys.exit(main())
