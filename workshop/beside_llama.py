"""Decoding beside llama.cpp, interleaved in one process, on a CPU (native code, PyTorch) or a GPU.

    python -m workshop beside_llama --llama FOLDER [--model M.gguf --draft D.gguf|none] [--threads 1,2]
        [--device cuda] [--backends native,torch] [--suites humaneval,gsm8k] [--prompts 5] [--n-gen 64]
        [--rounds 3] [--prefill 512,8192] [--users 1,4,8,16] [--data DATA] [--out FILE]

FOLDER: see llama_library.py; for a GPU `package/bins/linux-x64-cuda` of @node-llama-cpp/linux-x64-cuda, which
compiles its PTX when it is first loaded. Without --model the embedded pair is measured. DATA holds the
suites' files (bough.bench.suites); the suite `builtin` needs none, and `edit` asks for a changed copy of a
file. There is a result for each number of threads and each suite. Every round decodes each prompt in every
way; llama.cpp is timed with its choice of the likeliest token, and with its prompt lookup where the model's
memory can be cut back. --users: so many sequences at once; llama.cpp then decodes a token of each in a step,
and its choice of tokens is left out. A step during which the system took the CPU from the process
(involuntary context switches) is dropped and counted; medians and least times are of the rest, tok_s is of
all. `ratios` are of tokens a second: of all, and the range that holds 90% if other prompts had been chosen.
Time with two threads means little on a busy machine: the line has the load.
"""

import random
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from bough.bench import suites
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Request, Tokens
from bough.engine.sequence import Sequence
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from workshop.case import DRAFT, ROOT, TARGET, case
from workshop.llama_library import LlamaCpp
from workshop.report import Report

EDITS = (
    "Rename the variable `text` to `line` everywhere.",
    "Add a docstring to every function.",
    "Turn every list that is only iterated over into a tuple.",
    "Add type hints to every function.",
)
FILE = ROOT / "src/bough/text/stops.py"
RESAMPLES = 400


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

    def add(self, other: "Times") -> None:
        for name in ("wall", "cpu", "tokens", "steps", "seconds", "cpu_seconds", "dropped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

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


@dataclass
class Ways:
    """The ways to decode: sessions by name, and llama.cpp."""

    sessions: dict[str, Session]
    llama: LlamaCpp | None

    def decode(self, prompt: list[int], count: int) -> dict[str, tuple[Times, list[int]]]:
        """Decode a prompt in every way; return the times and the output of each."""
        found = {}
        for name, session in self.sessions.items():
            times = Times()
            found[name] = times, *generate(session, [prompt], count, times)
        if self.llama is not None:
            times = Times()
            found["llama.cpp"] = times, generate_llama(self.llama, prompt, count, times)
            if self.llama.truncate(len(prompt)):  # a recurrent state cannot be cut back
                times = Times()
                found["llama.cpp lookup"] = times, look_up_llama(self.llama, prompt, count, times)
        return found

    def together(self, prompts: list[list[int]], count: int) -> dict[str, Times]:
        """Decode all prompts at once in every way."""
        found = {name: Times() for name in self.sessions}
        for name, times in found.items():
            generate(self.sessions[name], prompts, count, times)
        if self.llama is not None:
            generate_together_llama(self.llama, prompts, count, found.setdefault("llama.cpp", Times()))
        return found

    def prefill(self, prompt: list[int]) -> dict[str, Times]:
        found: dict[str, Times] = {}
        for name in [name for name in self.sessions if name.endswith("plain")]:
            read(self.sessions[name], prompt, found.setdefault(name, Times()))
        if self.llama is not None:
            read_llama(self.llama, prompt, found.setdefault("llama.cpp", Times()))
        return found


@dataclass(frozen=True)
class Options:
    llama: Path | None = None
    model: Path = TARGET
    draft: str = "pair"
    threads: str = "1"
    backends: str = "native,torch"
    suites: str = ""
    data: Path | None = None
    prompts: int = 3
    n_gen: int = 64
    rounds: int = 3
    prefill: str = "512"
    users: str = ""


@case(device="cpu")
def main(report: Report, options: Options) -> None:
    names = (options.suites or ("humaneval" if options.data else "builtin")).split(",")
    for threads in map(int, options.threads.split(",")):
        ways = load(options, threads, report.device)
        for suite in names:
            line = report.head() | {"what": "beside_llama", "model": options.model.name}
            line |= {"threads": threads, "suite": suite}
            report.line(**line, **measure(ways, options, suite))


def load(options: Options, threads: int, device: str) -> Ways:
    torch.set_num_threads(threads)
    model, draft = options.model, {"none": None, "pair": DRAFT}.get(options.draft, Path(options.draft))
    sessions: dict[str, Session] = {}
    users = max([1, *counts(options.users)])
    context = max(4096, 1024 * users, *(length + options.n_gen for length in counts(options.prefill)))
    backends = options.backends.split(",") if device == "cpu" else ["auto"]
    for backend in backends:
        for name, speculation in (("plain", None), ("trees", SpecConfig())):
            config = EngineConfig(
                device=device,
                max_ctx=context,
                parallel=users,
                speculation=speculation,
                draft=DraftConfig(draft) if draft and speculation else None,
                cpu_backend=backend,
                threads=threads,
                prefix_cache=0,
            )
            sessions[f"{backend} {name}" if device == "cpu" else name] = load_session(model, config)
    llama = None
    if options.llama:
        llama = LlamaCpp(options.llama, model, threads=threads, context=context, sequences=users)
    return Ways(sessions, llama)


def counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",") if count]


def measure(ways: Ways, options: Options, suite: str) -> dict[str, Any]:
    first = next(iter(ways.sessions.values()))
    prompts = [first.encode(TextRequest(messages=each)) for each in conversations(options, suite)]
    for prompt in prompts[: max(1, len(prompts) // 4)]:
        ways.decode(prompt, options.n_gen)  # costs of trees are learnt
    runs = [ways.decode(prompt, options.n_gen) for _ in range(options.rounds) for prompt in prompts]
    prefills = []
    for length in counts(options.prefill):
        long = [(prompt * length)[:length] for prompt in prompts[:4]]
        prefills.append(summed([ways.prefill(each) for _ in range(options.rounds) for each in long]))
    users = {}
    for count in counts(options.users):
        asked = [prompts[index % len(prompts)] for index in range(count)]
        users[str(count)] = summed([ways.together(asked, options.n_gen) for _ in range(options.rounds)])
    plain, *others = list(runs[0])
    return {
        "decode": summed([{name: times for name, (times, _) in run.items()} for run in runs]),
        "prefill": prefills[0] if prefills else {},
        "longer_prefill": prefills[1:],
        "users": users,
        "ratios": {f"{name} / {plain}": ratio(runs, name, plain) for name in others}
        | {f"{name} / llama.cpp": ratio(runs, name, "llama.cpp") for name in runs[0] if ways.llama},
        "texts_as_the_first": {
            name: f"{sum(run[name][1] == run[plain][1] for run in runs)} of {len(runs)}" for name in runs[0]
        },
    }


def summed(runs: list[dict[str, Times]]) -> dict[str, Any]:
    """Return the summary of each way over all runs."""
    whole: dict[str, Times] = {}
    for run in runs:
        for name, times in run.items():
            whole.setdefault(name, Times()).add(times)
    return {name: times.summary() for name, times in whole.items()}


def ratio(runs: list[dict[str, tuple[Times, list[int]]]], name: str, other: str) -> dict[str, Any]:
    """Return how many tokens a second one way gives for each of another's, by wall and by CPU time."""

    def of(chosen: list[dict[str, tuple[Times, list[int]]]], clock: str) -> float:
        speeds = []
        for way in (name, other):
            times = [run[way][0] for run in chosen]
            speeds.append(sum(each.tokens for each in times) / sum(getattr(each, clock) for each in times))
        return speeds[0] / speeds[1]

    rng, found = random.Random(0), {}
    for label, clock in (("wall", "seconds"), ("cpu", "cpu_seconds")):
        others = sorted(of(rng.choices(runs, k=len(runs)), clock) for _ in range(RESAMPLES))
        low, high = others[RESAMPLES // 20], others[-RESAMPLES // 20 - 1]
        found[label] = {"all": of(runs, clock), "low": low, "high": high}
    return found


def conversations(options: Options, suite: str) -> list[list[dict[str, Any]]]:
    if suite == "edit":
        text = FILE.read_text()
        asks = [f"{ask} Give the whole file.\n```python\n{text}```" for ask in EDITS]
        return [[{"role": "user", "content": ask}] for ask in asks[: options.prompts]]
    found = suites.load(suite, options.prompts, data=options.data)[: options.prompts]
    return [[dict(message) for message in prompt.messages] for prompt in found]


def generate(session: Session, prompts: list[list[int]], count: int, times: Times) -> list[list[int]]:
    """Decode greedily without end tokens, all at once; steps are timed once all prompts are read."""
    engine = session.engine
    sequences = [engine.add(Request(prompt=prompt, max_tokens=count)) for prompt in prompts]
    tokens: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}

    def step() -> int:
        before = sum(map(len, tokens.values()))
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                tokens[sequence].extend(event.ids)
        return sum(map(len, tokens.values())) - before

    try:
        while not all(tokens.values()):
            step()
        while not all(sequence.finished for sequence in sequences):
            times.step(step)
    finally:
        for sequence in sequences:
            engine.release(sequence)
    return [*tokens.values()]


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


def generate_together_llama(llama: LlamaCpp, prompts: list[list[int]], count: int, times: Times) -> None:
    llama.clear()
    for place, prompt in enumerate(prompts):
        llama.decode(prompt, sequence=place)

    def step() -> int:
        llama.decode_each([prompt[0] for prompt in prompts])
        return len(prompts)

    while times.steps < count:
        times.step(step)


def look_up_llama(llama: LlamaCpp, prompt: list[int], count: int, times: Times) -> list[int]:
    """Decode greedily with llama.cpp's prompt lookup: a step verifies what it proposes."""
    llama.clear()
    llama.decode(prompt)
    tokens = [*prompt, llama.best()]

    def step() -> int:
        begin = llama.length
        proposal = llama.look_up(tokens)
        llama.decode([tokens[-1], *proposal], every_logit=True)
        sampled = [llama.best(row) for row in range(len(proposal) + 1)]
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(proposal, sampled, strict=False))
        accepted = 1 + len(list(pairs))
        tokens.extend(sampled[:accepted])
        llama.truncate(begin + accepted)
        return accepted

    while len(tokens) < len(prompt) + count:
        times.step(step)
    return tokens[len(prompt) :][:count]


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
