"""Trains a draft of every kind of the embedded target, or of another, with equal data, and compares them.

    python -m workshop gpu.drafts --prompts prompts.jsonl --data DATA --out FOLDER
    python -m workshop gpu.drafts --target FILE --tokens FOLDER --no-times --data DATA --out FOLDER
    python -m workshop gpu.drafts --toy --data DATA --out FOLDER     a trial run on a CPU

prompts.jsonl is that of workshop/training/prepare.py; DATA holds humaneval/test.jsonl.gz and so on. Four
parts, each in processes of its own: the target answers the prompts, or --tokens has its answers, as
gpu.real_pair leaves them; drafts of all kinds are trained at once, those of fewer parameters than the DFlash2
one with a wider feed-forward (the MTP block is smaller, and of the embedded target only); acceptance at
budgets 8, 22 and 63 on three suites, greedy, at T 0.8 and 1; the time of a draft call of every kind beside a
random 27B (draft_kinds.py), which is grown meanwhile. A part that fails or runs out of time leaves out those
that need it; --no-times leaves out the last one. Results are lines in FOLDER/results.jsonl; logs and drafts
lie beside it.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from bough.gguf.reader import GGUFFile
from bough.models.draft_spec import DraftSpec
from bough.models.spec import ModelSpec
from bough.train.draft_model import TrainedDraft, new_spec
from bough.train.draft_settings import TrainConfig
from tests.gpu.texts import embedded_pair
from workshop.case import case
from workshop.gpu.stages import Stages, scratch_folder
from workshop.grow.grow import grow
from workshop.report import Report

GROWING_CORES = 6
ANSWER_MINUTES = 2.0


@dataclass(frozen=True)
class Shape:
    """Of the drafts; 0: by the target's width."""

    kinds: tuple[str, ...]
    rank: int  # of DFlash2's selector
    inner: int  # of the MLP over candidates
    layers: int = 3
    kv_heads: int = 0
    feed_forward: int = 0
    block: int = 16
    head_tokens: int = 1 << 20


EMBEDDED = Shape(("dflash2", "dflash", "mlp", "mtp"), rank=58, inner=512)
OTHER = Shape(("dflash2", "dflash", "mlp"), 32, 1024, 2, 2, 1280, 12, 49_152)


@dataclass(frozen=True)
class Sizes:
    """How much of everything; the second set is for trial runs."""

    prompts: int
    n_gen: int
    length: int
    steps: int
    batch: int
    anchors: int
    measured: int  # prompts of a suite
    measured_tokens: int
    budgets: tuple[int, ...]
    repeats: int


FULL = Sizes(6144, 192, 384, 600, 48, 96, 12, 128, (8, 22, 63), 25)
TOY = Sizes(8, 16, 96, 2, 2, 4, 1, 8, (8, 22), 1)


@dataclass(frozen=True)
class Options:
    data: Path
    out: Path
    prompts: Annotated[Path | None, "JSONL, as workshop/training/prepare.py writes it"] = None
    target: Annotated[Path | None, "default: the embedded one"] = None
    tokens: Annotated[Path | None, "its answers, in place of prompts"] = None
    seconds: float = 470
    device: str = "cuda"
    no_times: Annotated[bool, "without the times of draft calls"] = False
    toy: Annotated[bool, "everything small, on a CPU"] = False
    grow: Annotated[Path | None, "grow a 27B there, for the times"] = None


class Run(Stages):
    def __init__(self, options: Options):
        super().__init__(options.out / "results.jsonl", options.out, options.seconds)
        self.sizes = TOY if options.toy else FULL
        self.device = "cpu" if options.toy else options.device
        self.toy, self.data, self.out = options.toy, options.data, options.out
        self.prompts, self.target = options.prompts, options.target or embedded_pair()[0]
        self.tokens = options.tokens or self.out / "answers" / "tokens"
        self.shape = EMBEDDED if options.target is None else OTHER
        self.timed = not options.no_times

    def together(self, commands: dict[str, list[Any]], *, reserve: float) -> bool:
        """Run scripts at the same time, in a trial run one after the other."""
        if self.toy:
            return all([self.wait({name: self.start(name, *each)}) for name, each in commands.items()])
        return self.wait({name: self.start(name, *each) for name, each in commands.items()}, reserve=reserve)


def answers(run: Run) -> bool:
    """Have the target answer the prompts once at each temperature, as many as there is time for."""
    sizes, some = run.sizes, run.out / "prompts.jsonl"
    if run.prompts is None:
        asked = ["Count to ten.", "What is 3 + 4?", "def add(a, b):", "Name a colour."] * 2
        lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in asked]
    else:
        lines = run.prompts.read_text().splitlines()
    some.write_text("\n".join(lines[: sizes.prompts]) + "\n")
    command = ["training.draft", run.target, "--prompts", some, "--output", run.out / "answers"]
    command += ["--data-only", "--n-gen", sizes.n_gen, "--seq", sizes.length, "--device", run.device]
    command += ["--answer-minutes", ANSWER_MINUTES]
    return run.wait({"answers": run.start("answers", *command)})


def train(run: Run) -> bool:
    sizes, shape, processes = run.sizes, run.shape, dict[str, list[Any]]()
    widths = {kind: spec.feed_forward for kind, spec in specs(run).items()}
    for kind in shape.kinds:
        command = ["training.draft", run.target, "--tokens", run.tokens, "--block", shape.block]
        command += ["--output", run.out / kind, "--kind", kind, "--steps", sizes.steps, "--seq", sizes.length]
        command += ["--batch", sizes.batch, "--anchors", sizes.anchors, "--device", run.device]
        command += ["--layers", shape.layers, "--head-tokens", shape.head_tokens]
        command += ["--kv-heads", shape.kv_heads] if shape.kv_heads else []
        rank = {"dflash2": shape.rank, "mlp": shape.inner}.get(kind)
        command += ["--rank", rank] if rank else []
        command += ["--feed-forward", widths[kind]] if kind in widths else []
        processes[f"train-{kind}"] = command
    return run.together(processes, reserve=200 if run.timed else 90)


def measure(run: Run) -> bool:
    sizes, processes = run.sizes, dict[str, list[Any]]()
    for kind in run.shape.kinds:
        own = ["--model", run.target, "--draft", run.out / kind]
        if kind == "mtp":
            own = ["--model", run.out / kind / "target-mtp.gguf"]
        command = ["acceptance", *own, "--data", run.data, "--label", kind, "--no-plain"]
        command += ["--no-lookup", "--prompts", sizes.measured, "--n-gen", sizes.measured_tokens]
        command += ["--budget", *sizes.budgets, "--temperature", 0.0, 0.8, 1.0, "--device", run.device]
        command += ["--lines", run.out / f"lines-{kind}.jsonl", "--out", run.out / "acceptance.jsonl"]
        processes[f"acceptance-{kind}"] = command
    good = run.together(processes, reserve=110 if run.timed else 0)
    compare(run)
    return good


def compare(run: Run) -> None:
    """Log the acceptance of each kind, and that of each over DFlash's."""
    found: dict[tuple[str, float, int], dict[str, float]] = {}
    for kind in run.shape.kinds:
        for text in (run.out / f"acceptance-{kind}.log").read_text(errors="replace").splitlines():
            if text.startswith("{") and "acceptance_length" in text:
                row = json.loads(text)
                key = (row["suite"], row["temperature"], row["budget"])
                found.setdefault(key, {})[kind] = round(row["acceptance_length"]["mean"], 3)
    for (suite, temperature, budget), by_kind in found.items():
        plain = by_kind.get("dflash")
        gain = {f"{kind}_over_dflash": round(each / plain, 3) for kind, each in by_kind.items() if plain}
        run.log("acceptance", suite=suite, temperature=temperature, budget=budget, acceptance=by_kind, **gain)


def times(run: Run, growing: subprocess.Popen[bytes] | None, folder: Path) -> bool:
    """Time a draft call of every kind beside a 27B, or beside the embedded target in a trial run."""
    models: Sequence[object] = ()
    if growing is not None:
        if not run.wait({"grow": growing}):
            return False
        models = ("--target", folder / "target.gguf", "--draft", folder / "draft.gguf")
    command = ["gpu.draft_kinds", *models, "--repeats", run.sizes.repeats]
    command += ["--device", run.device, "--out", run.out / "draft_kinds.jsonl"]
    good = run.wait({"draft_kinds": run.start("draft_kinds", *command)})
    file = run.out / "draft_kinds.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        run.log("draft call", **json.loads(line))
    return good


def specs(run: Run) -> dict[str, DraftSpec]:
    """Return the block drafts' shapes, whose feed-forward gives all as many parameters as DFlash2's has."""
    shape, heads = run.shape, {"dflash2": {"rank": run.shape.rank}, "mlp": {"inner": run.shape.inner}}
    with GGUFFile.open(run.target) as file:
        target = ModelSpec.from_gguf(file)

    def made(kind: str, feed_forward: int | None) -> DraftSpec:
        options = {"layers": shape.layers, "kv_heads": shape.kv_heads or None, "block_size": shape.block}
        return new_spec(target, mask_id=0, feed_forward=feed_forward, **options, **heads.get(kind, {}))

    usual = {kind: made(kind, shape.feed_forward or None) for kind in ("dflash2", "dflash", "mlp")}
    most, unit = size_of(usual["dflash2"]), 32
    return {
        kind: made(
            kind,
            spec.feed_forward + (most - size_of(spec)) // (3 * target.width * shape.layers * unit) * unit,
        )
        for kind, spec in usual.items()
    }


def size_of(spec: DraftSpec) -> int:
    return sum(each.numel() for each in TrainedDraft(spec).parameters())


@case()
def main(report: Report, options: Options) -> bool:
    if options.grow is not None:
        every = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, every[-GROWING_CORES:])
        grow(options.grow, "27b", random=True, force=True)
        return False
    sources = (options.prompts, options.tokens, options.toy or None)
    assert any(each is not None for each in sources), "--prompts or --tokens is needed, except with --toy"
    options.out.mkdir(parents=True, exist_ok=True)
    run, folder = Run(options), scratch_folder()
    made = {kind: size_of(spec) for kind, spec in specs(run).items()}
    config = {name: getattr(TrainConfig(), name) for name in ("optimiser", "loss")}
    facts = {"sizes": repr(run.sizes), "shape": repr(run.shape), "device": run.device}
    run.log("drafts", parameters=made, **facts, **config)
    assert max(made.values()) < 1.02 * min(made.values()), made
    growing = None
    try:
        if run.timed and not run.toy:
            shutil.rmtree(folder, ignore_errors=True)
            growing = run.start("grow", "gpu.drafts", "--grow", folder, "--data", run.data, "--out", run.out)
        if (options.tokens is not None or answers(run)) and train(run):
            measure(run)
        if run.timed:
            times(run, growing, folder)
    finally:
        if growing is not None and growing.poll() is None:
            growing.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if torch.cuda.is_available():
        run.log("device", name=torch.cuda.get_device_name())
    print("FAIL" if run.failed else "PASS", f"{report.spent:.0f} s", flush=True)
    return run.failed
