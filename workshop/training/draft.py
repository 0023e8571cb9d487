"""Stage 5: trains the draft of the pair. Like `bough train`, with plain log lines.

    python -m workshop training.draft TARGET.gguf --prompts workshop/training/work/prompts.jsonl --data-only
    python -m workshop training.draft TARGET.gguf --prompts workshop/training/work/prompts.jsonl --minutes 8
    ... --minutes 24 --stop-after 9    then the same with --resume

Writes tokens/, checkpoint.pt and at the end model.safetensors, config.json and training.json into --output.
Needs torch, numpy, safetensors, tokenizers and jinja2; one process, or several under torchrun.
"""

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from bough.train.draft_data import Regeneration
from bough.train.draft_eval import Evaluation
from bough.train.draft_run import DraftJob, train_draft
from bough.train.draft_settings import Event, Saved, TrainConfig, TrainingProgress
from workshop.case import case
from workshop.report import Report

EVERY_S = 10.0  # between progress lines
STOPPED = 3  # exit code: ended before it was done, `--resume` goes on


@dataclass(frozen=True)
class Options:
    output: Path = Path("workshop/training/work/draft")
    prompts: Path | None = None
    tokens: Annotated[Path | None, "outputs of an earlier run, instead of prompts"] = None
    data_only: Annotated[bool, "generate the outputs, do not train"] = False
    answer_minutes: Annotated[float | None, "train on what was answered in this time"] = None
    part: Annotated[str, "I/N, with --data-only: of N processes, the I-th"] = "0/1"
    stop_after: Annotated[float | None, "minutes; writes a checkpoint for --resume"] = None
    resume: bool = False
    continue_from: Annotated[Path | None, "draft whose weights to start with"] = None
    seq: int = 512
    n_gen: int = 384
    temperature: Sequence[float] = (0.0, 0.8)
    top_p: float = 0.95
    events: Annotated[Path | None, "file for progress and evaluations as JSON lines"] = None


class Log:
    """Prints log lines, unbuffered."""

    def __init__(self, events: Path | None) -> None:
        self._start = time.monotonic()
        self._last = 0.0
        self._events = events

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._start:7.1f} s  {text}", flush=True)

    def answering(self, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._last > EVERY_S:
            self._last = time.monotonic()
            self.record("answers", done=done, total=total)
            self.say(f"{done} of {total} outputs")

    def record(self, what: str, **facts: Any) -> None:
        if self._events is not None:
            with self._events.open("a") as file:
                file.write(json.dumps({"what": what, "at": round(time.time(), 1), **facts}) + "\n")

    def notify(self, event: Event) -> None:
        match event:
            case TrainingProgress() if time.monotonic() - self._last > EVERY_S or event.step == 1:
                self._last = time.monotonic()
                self.record("training", **asdict(event))
                self.say(
                    f"step {event.step}  {event.share:.1%}  loss {event.loss:.3f}"
                    f"  accepts {event.acceptance:.2f}  {event.tokens_s:,.0f} tok/s"
                )
            case Saved():
                self.record("saved", step=event.step)
            case Evaluation():
                self.record("held out", **asdict(event))
                self.say(
                    f"step {event.step}  held out: loss {event.loss:.3f}  chain {event.acceptance:.3f}"
                    f"  tree {event.tree_acceptance:.3f}  top-1 {event.top1[0]:.3f} {event.top1[-1]:.3f}"
                    + (f"  recall {min(event.recall):.3f}" if event.recall else "")
                )


@case(device="auto")
def main(report: Report, target: Path, options: Options, config: TrainConfig) -> int:
    log = Log(options.events)
    part, parts = map(int, options.part.split("/"))
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: signals.append(caught))
    deadline = time.monotonic() + 60 * options.stop_after if options.stop_after else float("inf")
    job = DraftJob(
        target=target,
        folder=options.output,
        prompts=options.prompts,
        tokens=options.tokens,
        regeneration=Regeneration(
            length=options.seq,
            max_tokens=options.n_gen,
            temperatures=tuple(options.temperature),
            top_p=options.top_p,
            seed=config.seed,
            minutes=options.answer_minutes,
        ),
        config=config,
        continue_from=options.continue_from,
        resume=options.resume,
        device=report.device,
        part=(part, parts),
    )
    result = train_draft(
        job,
        answering=log.answering,
        notify=log.notify,
        cancelled=lambda: bool(signals) or time.monotonic() > deadline,
        data_only=options.data_only,
    )
    log.say(f"{'done' if result.finished else 'stopped, continue with --resume'}: {result}")
    return 0 if result.finished else STOPPED
