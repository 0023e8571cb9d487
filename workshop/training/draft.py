"""Stage 5: trains the draft of the pair. Like `bough train`, with plain log lines.

    python -m workshop.training.draft TARGET.gguf --prompts workshop/training/work/prompts.jsonl --data-only
    python -m workshop.training.draft TARGET.gguf --prompts workshop/training/work/prompts.jsonl --minutes 8
    ... --minutes 24 --stop-after 9    then the same with --resume

Writes tokens/, checkpoint.pt and at the end model.safetensors, config.json and training.json into --output.
Needs torch, numpy, safetensors, tokenizers and jinja2; one process, or several under torchrun.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bough.train.draft_data import Regeneration
from bough.train.draft_eval import Evaluation
from bough.train.draft_run import Job, train_draft
from bough.train.draft_settings import Event, Saved, TrainConfig, TrainingProgress

EVERY_S = 10.0  # between progress lines
STOPPED = 3  # exit code: ended before it was done, `--resume` goes on


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--output", "-o", type=Path, default=Path("workshop/training/work/draft"))
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--tokens", type=Path, help="outputs of an earlier run, instead of prompts")
    parser.add_argument("--data-only", action="store_true", help="generate the outputs, do not train")
    parser.add_argument("--answer-minutes", type=float, help="train on what was answered in this time")
    parser.add_argument("--part", default="0/1", help="I/N, with --data-only: of N processes, the I-th")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stop-after", type=float, help="minutes; writes a checkpoint for --resume")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--continue-from", type=Path, help="draft whose weights to start with")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--n-gen", type=int, default=384)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--kind", choices=["dflash", "dflash2", "mtp"], default="dflash")
    parser.add_argument("--rank", type=int, default=64, help="of a dflash2 draft's selector")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--feed-forward", type=int)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--optimiser", choices=["muon", "adamw"], default="muon")
    parser.add_argument("--loss", choices=["dpace", "decay"], default="dpace")
    parser.add_argument("--head-tokens", type=int, help="that the loss compares; default: all")
    parser.add_argument("--portable", type=Path, help="folder for checkpoints that can be carried")
    parser.add_argument("--save-every", type=float, default=2.0, help="minutes between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", action="store_true")
    parser.add_argument("--no-vocabulary", dest="vocabulary", action="store_false", help="in that file")
    parser.add_argument("--events", type=Path, help="file for progress and evaluations as JSON lines")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


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


def main() -> int:
    args = arguments()
    log = Log(args.events)
    part, parts = map(int, args.part.split("/"))
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: signals.append(caught))
    deadline = time.monotonic() + 60 * args.stop_after if args.stop_after else float("inf")
    job = Job(
        target=args.target,
        folder=args.output,
        prompts=args.prompts,
        tokens=args.tokens,
        regeneration=Regeneration(
            length=args.seq,
            max_tokens=args.n_gen,
            temperatures=tuple(args.temperature),
            top_p=args.top_p,
            seed=args.seed,
            minutes=args.answer_minutes,
        ),
        config=TrainConfig(
            kind=args.kind,
            rank=args.rank,
            layers=args.layers,
            kv_heads=args.kv_heads,
            feed_forward=args.feed_forward,
            block=args.block,
            steps=args.steps,
            minutes=args.minutes,
            batch=args.batch,
            anchors=args.anchors,
            lr=args.lr,
            optimiser=args.optimiser,
            loss=args.loss,
            head_tokens=args.head_tokens,
            checkpoint_minutes=args.save_every,
            seed=args.seed,
            portable=args.portable,
            gguf=args.gguf,
            vocabulary=args.vocabulary,
        ),
        continue_from=args.continue_from,
        resume=args.resume,
        device=args.device,
        part=(part, parts),
    )
    result = train_draft(
        job,
        answering=log.answering,
        notify=log.notify,
        cancelled=lambda: bool(signals) or time.monotonic() > deadline,
        data_only=args.data_only,
    )
    log.say(f"{'done' if result.finished else 'stopped, continue with --resume'}: {result}")
    return 0 if result.finished else STOPPED


if __name__ == "__main__":
    sys.exit(main())
