"""Stage 3: trains the target on the files of stages 1 and 2 in the work folder, within a time budget.

    python -m workshop training.pretrain --minutes 9
    python -m workshop training.pretrain --minutes 18 --pause-after 9    then the same with --resume
    python -m workshop training.pretrain --minutes 3 --lr 1.5e-3 --continue-from TARGET.gguf

Writes Bough-40M/ (a Hugging Face folder), log.jsonl, pretrain.json and every two minutes checkpoint.pt
into the work folder. Reads prepare.json, the streams it names, instruct.bin, instruct.mask, heldout.bin and
the tokenizer's files there.
"""

import json
import math
import platform
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from bough.train.muon import Muon
from workshop.case import case
from workshop.report import Report
from workshop.training.delta import CHUNK, fused_error
from workshop.training.streams import (
    Streams,
    document_end,
    held_out_windows,
    read_instructions,
    read_parts,
    token_ids,
)
from workshop.training.target import Target, TargetConfig, save_target
from workshop.training.target_file import read_target

NAME = "Bough-40M"  # of the folder and the model
WARM_UP, DECAY = 0.02, 0.4  # shares of the time: at the start, at the end
INSTRUCT_ROWS = 0.8  # share of a batch in the last phase; the rest stays general text
ALIGNED_ROWS = 0.5  # share of general text: rows that start at a document's start, as prompts do
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHECKPOINT_SECONDS, REPORT_SECONDS = 120, 10
MAX_EVALUATION_BATCHES = 8
# Fused kernels are not used if they differ from plain torch by more than bfloat16 rounding explains.
MAX_KERNEL_ERROR = 0.05


@dataclass(frozen=True)
class Options:
    work: Path = Path("workshop/training/work")
    minutes: Annotated[float, "total budget, start-up and saving included"] = 9.0
    pause_after: Annotated[float | None, "minutes after which this call stops, for --resume"] = None
    resume: Annotated[bool, "continue from work/checkpoint.pt"] = False
    continue_from: Annotated[Path | None, "GGUF file of a target whose weights to start with"] = None
    instruct_share: Annotated[float, "share of the time, at the end"] = 0.15
    batch_tokens: int = 65536
    seq: Annotated[int, "a multiple of 64"] = 512
    lr: float = 3e-3
    weight_decay: float = 0.1
    z_loss: float = 1e-4
    layers: int = TargetConfig().layers
    inner: Annotated[int, "width of the feed-forward"] = TargetConfig().inner
    seed: int = 0
    chunk: Annotated[int, "tokens in a chunk of the delta rule"] = CHUNK
    compile: bool = torch.cuda.is_available()
    triton: bool = torch.cuda.is_available()


def say(text: str) -> None:
    print(text, flush=True)


def rate(share: float) -> float:
    """Return the learning-rate factor at a share of the time."""
    return max(0.0, min(1.0, share / WARM_UP + 0.01, (1 - share) / DECAY))


class Pretraining:
    """The training state that checkpoints hold, and the training steps."""

    def __init__(self, options: Options, config: TargetConfig):
        self.options, self.config = options, config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if options.seq % options.chunk:
            raise SystemExit(f"--seq is {options.seq}, needed: a multiple of the chunk, {options.chunk}")
        self.rows = max(1, options.batch_tokens // options.seq)
        torch.manual_seed(options.seed)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self.fused, self.compiled = options.triton and self._kernels_agree(), False
        self.target = self._build()
        if options.continue_from is not None:
            self.target.load_state_dict(read_target(options.continue_from, config))
        self._load_data()
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.optimisers = self._optimisers()
        self.step, self.tokens, self.spent, self.begun = 0, 0, 0.0, 0.0
        self.finished: dict[str, float] = {}  # held-out loss by phase

    def _build(self) -> Target:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        target = Target(self.config, dtype=dtype, chunk=self.options.chunk, fused=self.fused)
        return target.to(self.device)

    def _load_data(self) -> None:
        work, seq, end = self.options.work, self.options.seq, document_end(self.options.work)
        for name in TOKENIZER_FILES:
            if not (work / name).exists():
                raise SystemExit(f"{work / name} is missing: run workshop/training/tokenizer.py")
        self.general = Streams(read_parts(work), seq=seq, document_end=end, device=self.device)
        self.instruct = Streams([read_instructions(work)], seq=seq, document_end=end, device=self.device)
        self.held_out = held_out_windows(work, seq=seq, limit=self.rows * MAX_EVALUATION_BATCHES)

    def _kernels_agree(self) -> bool:
        try:
            error = fused_error(self.device)
        except Exception as failure:
            say(f"WARNING: the Triton kernels fail, plain torch is used: {failure!r:.500}")
            return False
        say(f"Triton kernels against plain torch: relative error {error:.1e}")
        if not error <= MAX_KERNEL_ERROR:
            say(f"WARNING: needed at most {MAX_KERNEL_ERROR}; plain torch is used")
        return error <= MAX_KERNEL_ERROR

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        matrices, others = [], []
        for name, parameter in self.target.named_parameters():
            # Matrices with few rows are not worth orthogonalising: in_proj_a and in_proj_b.
            hidden = parameter.ndim == 2 and "embed" not in name and min(parameter.shape) >= 16
            (matrices if hidden else others).append(parameter)
        adam = torch.optim.AdamW(
            others, lr=self.options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=self.device.type == "cuda"
        )
        return [Muon(matrices, lr=self.options.lr, weight_decay=self.options.weight_decay), adam]

    def batch(self, *, instruct: bool) -> tuple[Tensor, Tensor]:
        """Return rows [B, T + 1] of tokens and the mask [B, T] of their labels."""
        answers = round(self.rows * INSTRUCT_ROWS) if instruct else 0
        parts = [self.general.sample(self.rows - answers, self.generator, aligned=ALIGNED_ROWS)]
        if answers:
            parts.append(self.instruct.sample(answers, self.generator, aligned=1.0))
        rows, masks = zip(*parts, strict=True)
        return torch.cat(rows), torch.cat(masks)

    def gradients(self, *, instruct: bool) -> Tensor:
        """Accumulate one batch's gradients; return its cross entropy without synchronising."""
        rows, mask = self.batch(instruct=instruct)
        loss = self.target.loss(rows[:, :-1], rows[:, 1:], mask, z_loss=self.options.z_loss)
        loss.objective.backward()
        return loss.cross_entropy

    def update(self, *, instruct: bool, factor: float) -> Tensor:
        cross_entropy = self.gradients(instruct=instruct)
        torch.nn.utils.clip_grad_norm_(self.target.parameters(), 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.options.lr * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += self.rows * self.options.seq
        return cross_entropy

    def warm_up(self) -> None:
        """Run one batch and discard it, so that compilation ends before the schedule's clock starts."""
        if self.options.compile:
            self.compiled = True
            self.target.compile_layers()
        try:
            self.gradients(instruct=False).item()
        except Exception as failure:
            if not self.compiled or isinstance(failure, torch.OutOfMemoryError):
                raise
            say(f"WARNING: compilation fails, the layers run as they are: {failure!r:.1500}")
            self.compiled, state = False, self.state()
            self.target = self._build()
            self.optimisers = self._optimisers()
            self.load_state(state)
            self.gradients(instruct=False).item()
        self.target.zero_grad(set_to_none=True)

    def evaluate(self) -> float:
        """Return the held-out cross entropy in nats per token.

        Gradients stay enabled, so that the compiled graphs are reused.
        """
        total, count = 0.0, 0
        for part in self.held_out.split(self.rows):
            # Every batch has the compiled shape; repeated rows do not count.
            rows = part[torch.arange(self.rows) % len(part)].to(self.device)
            mask = (torch.arange(self.rows) < len(part)).float()[:, None].expand(-1, self.options.seq)
            loss = self.target.loss(
                rows[:, :-1], rows[:, 1:], mask.to(self.device), z_loss=self.options.z_loss
            )
            total, count = total + loss.cross_entropy.item() * len(part), count + len(part)
        return total / count

    def state(self) -> dict[str, Any]:
        return {
            "config": asdict(self.config),
            "weights": self.target.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "generator": self.generator.get_state(),
            "counts": (self.step, self.tokens, self.spent, self.begun),
            "finished": self.finished,
        }

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        partial = path.with_suffix(".partial")
        torch.save(self.state(), partial)
        partial.replace(path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["config"] != asdict(self.config):
            raise SystemExit(
                f"{path} is of another shape: {state['config']}, asked for: {asdict(self.config)}"
            )
        self.load_state(state)

    def load_state(self, state: dict[str, Any]) -> None:
        self.target.load_state_dict(state["weights"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.generator.set_state(state["generator"].cpu())
        self.step, self.tokens, self.spent, self.begun = state["counts"]
        self.finished = state["finished"]


def train(run: Pretraining, started: float) -> bool:
    """Train until the budget is spent; return False if --pause-after came first. `started`: start time."""
    options, work = run.options, run.options.work
    budget = 60 * options.minutes - min(20.0, 3 * options.minutes)  # leaves time for evaluation and saving
    earlier, limit = run.spent, 60 * (options.pause_after or math.inf)
    with (work / "log.jsonl").open("a" if options.resume else "w") as log:
        run.warm_up()
        if options.continue_from is not None and run.step == 0:
            run.finished["start"] = run.evaluate()
            say(f"held-out loss of {options.continue_from}: {run.finished['start']:.4f}")
        run.spent = earlier + time.monotonic() - started
        run.begun = run.begun or run.spent
        if run.begun >= budget:
            raise SystemExit(
                f"--minutes {options.minutes} were over before the first step, at {run.begun:.0f} s"
            )
        say(f"ready after {time.monotonic() - started:.0f} s, compiled: {run.compiled}, Triton: {run.fused}")
        reported = saved = time.monotonic()
        losses, steps, share = torch.zeros((), device=run.device), 0, 0.0
        while True:
            now = time.monotonic()
            run.spent = earlier + now - started
            share = (run.spent - run.begun) / (budget - run.begun)
            instruct = share >= 1 - options.instruct_share
            if now - reported >= REPORT_SECONDS or share >= 1 or now - started >= limit:
                entry = {
                    "step": run.step,
                    "tokens": run.tokens,
                    "rate": round(steps * run.rows * options.seq / (now - reported)),
                    "loss": round(losses.item() / max(steps, 1), 4),
                    "lr": options.lr * rate(share),
                    "minutes": round(run.spent / 60, 2),
                    "phase": "instruct" if instruct else "general",
                }
                say(
                    "  ".join(
                        f"{key} {value:.4g}" if key == "lr" else f"{key} {value}"
                        for key, value in entry.items()
                    )
                )
                log.write(json.dumps(entry) + "\n")
                log.flush()
                if not math.isfinite(entry["loss"]):
                    raise SystemExit(
                        f"the loss is {entry['loss']}: resume from the checkpoint with a lower --lr"
                    )
                losses.zero_()
                reported, steps = time.monotonic(), 0
            if share >= 1:
                return True
            if now - started >= limit:
                run.save(work / "checkpoint.pt")
                return False
            if instruct and "general" not in run.finished and options.instruct_share < 1:
                run.finished["general"] = run.evaluate()
                say(f"held-out loss after general text: {run.finished['general']:.4f}")
            losses += run.update(instruct=instruct, factor=rate(share))
            steps += 1
            if now - saved >= CHECKPOINT_SECONDS:
                run.save(work / "checkpoint.pt")
                saved = time.monotonic()


def finish(run: Pretraining) -> None:
    """Write the Hugging Face folder and the record of the run."""
    options, folder = run.options, run.options.work / NAME
    run.finished["end"] = run.evaluate()
    say(f"held-out loss at the end: {run.finished['end']:.4f}")
    ids = token_ids(options.work)
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    save_target(run.target, folder, end_ids=ends, pad_id=ids["<|endoftext|>"])
    for name in TOKENIZER_FILES:
        shutil.copyfile(options.work / name, folder / name)
    record = {
        "options": {key: str(value) for key, value in asdict(options).items()},
        "shape": asdict(run.config),
        "parameters": sum(parameter.numel() for parameter in run.target.parameters()),
        "steps": run.step,
        "tokens": run.tokens,
        "epochs_of_parts": run.general.epochs(run.tokens * (1 - options.instruct_share)),
        "held_out_loss": run.finished,
        "compiled": run.compiled,
        "triton": run.fused,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu",
        "data": json.loads((options.work / "prepare.json").read_text()),
    }
    (options.work / "pretrain.json").write_text(json.dumps(record, indent=2) + "\n")
    say(f"wrote {folder}: {record['parameters'] / 1e6:.1f}M parameters, {run.tokens / 1e6:.1f}M tokens")


@case()
def main(report: Report, options: Options) -> None:
    run_stage(options, TargetConfig(layers=options.layers, inner=options.inner))


def run_stage(options: Options, shape: TargetConfig) -> None:
    started = time.monotonic()
    ids = token_ids(options.work)
    vocabulary = -(-(max(ids.values()) + 1) // 64) * 64
    run = Pretraining(options, replace(shape, vocabulary=vocabulary))
    if options.resume:
        run.restore(options.work / "checkpoint.pt")
        say(f"resumed at step {run.step}, {run.spent / 60:.1f} of {options.minutes} minutes spent")
    if train(run, started):
        finish(run)
    else:
        say(f"paused at step {run.step}: continue with --resume")
