"""Trains a DFlash2, a DFlash and an MTP draft of the embedded target with equal data, and compares them.

    python -m workshop gpu.drafts --prompts prompts.jsonl --data DATA --out FOLDER
    python -m workshop gpu.drafts --toy --data DATA --out FOLDER     a trial run on a CPU

prompts.jsonl is that of workshop/training/prepare.py; DATA holds humaneval/test.jsonl.gz and so on. Four
parts, each in processes of its own: the target answers the prompts; three drafts are trained at once, the
DFlash draft with a wider feed-forward, so that it has as many parameters as the DFlash2 one; acceptance at
budgets 8, 22 and 63 on three suites, greedy and at T 0.8; the time of a draft call of every kind beside a
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
from bough.models.spec import ModelSpec
from bough.train.draft_model import TrainedDraft, new_spec
from bough.train.draft_settings import TrainConfig
from tests.gpu.texts import embedded_pair
from workshop.case import case
from workshop.gpu.stages import Stages, scratch_folder
from workshop.grow.grow import grow
from workshop.report import Report

KINDS = ("dflash2", "dflash", "mtp")
RANK, WIDER = 58, 512  # of DFlash2's selector; feed-forward of the DFlash draft beyond the usual
GROWING_CORES = 6
ANSWER_MINUTES = 2.0


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
        self.prompts, self.target = options.prompts, embedded_pair()[0]
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
    sizes, processes = run.sizes, dict[str, list[Any]]()
    with GGUFFile.open(run.target) as file:
        usual = new_spec(ModelSpec.from_gguf(file), mask_id=0).feed_forward
    for kind in KINDS:
        command = ["training.draft", run.target, "--tokens", run.out / "answers" / "tokens"]
        command += ["--output", run.out / kind, "--kind", kind, "--steps", sizes.steps, "--seq", sizes.length]
        command += ["--batch", sizes.batch, "--anchors", sizes.anchors, "--device", run.device]
        command += ["--rank", RANK] if kind == "dflash2" else []
        command += ["--feed-forward", usual + WIDER] if kind == "dflash" else []
        processes[f"train-{kind}"] = command
    return run.together(processes, reserve=200 if run.timed else 90)


def measure(run: Run) -> bool:
    sizes, processes = run.sizes, dict[str, list[Any]]()
    for kind in KINDS:
        own = ["--model", run.target, "--draft", run.out / kind]
        if kind == "mtp":
            own = ["--model", run.out / kind / "target-mtp.gguf"]
        command = ["acceptance", *own, "--data", run.data, "--label", kind, "--no-plain"]
        command += ["--no-lookup", "--prompts", sizes.measured, "--n-gen", sizes.measured_tokens]
        command += ["--budget", *sizes.budgets, "--temperature", 0.0, 0.8, "--device", run.device]
        command += ["--lines", run.out / f"lines-{kind}.jsonl", "--out", run.out / "acceptance.jsonl"]
        processes[f"acceptance-{kind}"] = command
    good = run.together(processes, reserve=110 if run.timed else 0)
    compare(run)
    return good


def compare(run: Run) -> None:
    """Log the acceptance of each kind, and DFlash2's over DFlash's."""
    found: dict[tuple[str, float, int], dict[str, float]] = {}
    for kind in KINDS:
        for text in (run.out / f"acceptance-{kind}.log").read_text(errors="replace").splitlines():
            if text.startswith("{") and "acceptance_length" in text:
                row = json.loads(text)
                key = (row["suite"], row["temperature"], row["budget"])
                found.setdefault(key, {})[kind] = round(row["acceptance_length"]["mean"], 3)
    for (suite, temperature, budget), by_kind in found.items():
        gain = {}
        if {"dflash", "dflash2"} <= by_kind.keys():
            gain = {"dflash2_over_dflash": round(by_kind["dflash2"] / by_kind["dflash"], 3)}
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


def parameters(target: Path) -> dict[str, int]:
    """Return the parameters of both block drafts, which have to be equal but for a few percent."""
    with GGUFFile.open(target) as file:
        spec = ModelSpec.from_gguf(file)
    wide = new_spec(spec, mask_id=0).feed_forward + WIDER
    made = {
        "dflash2": new_spec(spec, mask_id=0, rank=RANK),
        "dflash": new_spec(spec, mask_id=0, feed_forward=wide),
    }
    return {kind: sum(each.numel() for each in TrainedDraft(own).parameters()) for kind, own in made.items()}


@case()
def main(report: Report, options: Options) -> bool:
    if options.grow is not None:
        every = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, every[-GROWING_CORES:])
        grow(options.grow, "27b", random=True, force=True)
        return False
    assert options.prompts is not None or options.toy, "--prompts is needed, except with --toy"
    options.out.mkdir(parents=True, exist_ok=True)
    run, folder = Run(options), scratch_folder()
    made = parameters(run.target)
    config = {name: getattr(TrainConfig(), name) for name in ("optimiser", "loss", "layers", "block")}
    run.log("drafts", parameters=made, sizes=repr(run.sizes), rank=RANK, device=run.device, **config)
    assert abs(made["dflash2"] / made["dflash"] - 1) < 0.02, made
    growing = None
    try:
        if run.timed and not run.toy:
            shutil.rmtree(folder, ignore_errors=True)
            growing = run.start("grow", "gpu.drafts", "--grow", folder, "--data", run.data, "--out", run.out)
        if answers(run) and train(run):
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
