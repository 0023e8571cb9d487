"""`bough train`: a DFlash draft for a target, from prompts."""

import contextlib
import shlex
import signal
import time
from dataclasses import MISSING, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, TimeRemainingColumn

from bough.cli import view
from bough.cli.command import INTERRUPTED
from bough.cli.interrupt import Interrupt, held
from bough.cli.loading import show_warnings
from bough.cli.options import MODEL_HELP, argument, grouped, option, panel, shared
from bough.cli.speculation import downloading
from bough.cli.values import device as device_name
from bough.config import environment
from bough.errors import UsageError
from bough.hub.resolve import meaning, resolve

if TYPE_CHECKING:
    from bough.train.draft_eval import Evaluation
    from bough.train.draft_run import DraftJob
    from bough.train.draft_settings import Event, TrainingResult

_BAR_STEPS = 10_000
_NOTES_EVERY_S = 60  # where standard error is no terminal


Optimiser = StrEnum("Optimiser", "muon adamw")
Loss = StrEnum("Loss", "dpace decay")
Kind = StrEnum("Kind", "dflash dflash2 mlp mtp")
_text, _draft, _training = panel("Text"), panel("Draft"), panel("Training")


@dataclass(frozen=True, slots=True)
class TextOptions:
    prompts: Path | None = _text(
        'JSONL of {"messages": [...]} or {"prompt": "..."}; the target answers them.'
    )
    tokens: Path | None = _text("Answers from an earlier run, instead: FOLDER/tokens.")
    seq: int = _text("Tokens of a text: prompt and answer.", "N 32..", default=512)
    n_gen: int | None = _text("Of an answer. Default: 3/4 of --seq.", "-n N 2..")
    temperature: list[float] | None = _text(
        "Each prompt is answered once at each temperature given. Default: 0 and 0.8.", "-t X 0..100"
    )
    top_p: float = _text("For temperatures above 0.", "X 0.01..1", default=0.95)
    answer_minutes: float | None = _text("Train on what was answered in this time.", "X 0..")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    kind: Kind = _draft(
        "dflash2 and mlp add a choice that knows the token before, dflash2 convolutions too; mtp: a block in"
        " a copy of the target's file.",
        default=Kind.dflash,
    )
    rank: int | None = _draft("Of that choice's tables, or width of its MLP. Default: 64, 512.", "N 1..4096")
    layers: int = _draft("Of the draft.", "N 1..64", default=3)
    kv_heads: int | None = _draft("Each of 4 query heads. Default: by width.", "N 1..64")
    feed_forward: int | None = _draft("Default: 3 times the target's width.", "N 32..")
    block: int = _draft("Tokens of a block, the anchor included.", "N 2..64", default=16)
    window: int = _draft(
        "All layers but the last attend to this many tokens; 0: all attend to all.", "N 0..", default=0
    )
    mask_token: int | None = _draft("Default: <|mask|>, else the first unused token.", "ID")
    gguf: bool = _draft("Write a Q8_0 GGUF file too.", default=False)
    vocabulary: bool = _draft(
        "Have it in that file, which llama.cpp needs.", "--vocabulary/--no-vocabulary", default=True
    )
    float32: bool = _draft("Keep weights in float32, not bfloat16.", default=False)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    minutes: float | None = _training("How long to train. Default: 6 passes over the text.", "X")
    steps: int | None = _training("The same in steps.", "N")
    batch: int = _training("Texts a step.", "N 1..", default=64)
    anchors: int = _training("Blocks of a text.", "N 1..", default=128)
    lr: float | None = _training("Default: 0.002 for muon, 0.0006 for adamw.", "X")
    optimiser: Optimiser = _training("Of matrices; adamw does the rest.", default=Optimiser.muon)
    loss: Loss = _training(
        "Weight of a token: what depends on it, or less the deeper it is.", default=Loss.dpace
    )
    head_tokens: int | None = _training(
        "Tokens that the loss compares: those of the text, then random ones. Default: all.", "N 1.."
    )
    save_every: float = _training("Between checkpoints.", "MINUTES 0..", default=5.0)
    seed: int = _training("Of weights, answers and anchors.", "N 0..", default=0)
    continue_from: Path | None = _training("Start with the weights of this draft, not with none.", "PATH")
    head_only: bool = _training("Train what --kind adds to that draft, and nothing else.", default=False)
    portable: Path | None = _training(
        "Checkpoints of bfloat16 weights, in files of 16 MiB; --resume goes on from them elsewhere.", "FOLDER"
    )
    resume: bool = _training("Go on from the checkpoint in FOLDER.", default=False)
    device: str = _training("Where to compute.", "auto|cpu|cuda|cuda:N", default="auto", parser=device_name)
    offline: bool = _training("Use only what is on this machine.", default=False)


@grouped
def train(
    *,
    target: str = argument(f"{MODEL_HELP}, or a Hugging Face folder.", "TARGET", default=MISSING),
    output: Path = option("Where the draft goes.", "--output -o FOLDER", default=MISSING),
    text: TextOptions,
    draft: DraftOptions,
    training: TrainingOptions,
    as_json: bool = option("Print one JSON object, for errors too.", "--json", default=False),
    quiet: bool = option("No progress and no notices.", "--quiet -q", default=False),
) -> None:
    """Train a draft for a target.

    The target answers the prompts; the draft learns to predict its tokens from its hidden states. An
    interrupted run goes on with `--resume`. docs/training.md says what to expect.

    bough train model.gguf --prompts prompts.jsonl -o my-draft
    """
    screen = view.Screen(quiet=quiet, notes=not as_json)
    if (text.prompts is None) == (text.tokens is None):
        raise UsageError(
            "needed either --prompts or --tokens",
            "--prompts FILE has the target answer prompts, --tokens FOLDER takes answers that are there",
        )
    path = _target(target, output, offline=training.offline or environment().offline, screen=screen)
    show_warnings(screen)
    with screen.waiting("Starting PyTorch"), held():
        from bough.train.draft_run import train_draft
    progress = _Progress(screen)
    with Interrupt(signal.SIGTERM, patience_s=None) as stop, progress:
        result = train_draft(
            _job(path, output, text, draft, training),
            loading=progress.loading,
            answering=progress.answering,
            notify=progress.notify,
            cancelled=lambda: stop.requested,
        )
    if not result.finished:
        screen.notice("Interrupted. Nothing is lost: the same command with --resume goes on from here.")
        raise typer.Exit(INTERRUPTED)
    if result.evaluation is not None:  # only the first of several processes has one
        _report(result, path, as_json=as_json)


def _job(
    target: Path, output: Path, text: TextOptions, draft: DraftOptions, training: TrainingOptions
) -> "DraftJob":
    from bough.train.draft_data import Regeneration
    from bough.train.draft_run import DraftJob
    from bough.train.draft_settings import TrainConfig

    return DraftJob(
        target=target,
        folder=output,
        prompts=text.prompts,
        tokens=text.tokens,
        regeneration=Regeneration(
            length=text.seq,
            max_tokens=text.n_gen or max(2, text.seq * 3 // 4),
            temperatures=tuple(text.temperature or (0.0, 0.8)),
            top_p=text.top_p,
            seed=training.seed,
            minutes=text.answer_minutes,
        ),
        config=TrainConfig(
            **shared(draft, TrainConfig),
            **shared(training, TrainConfig),
            checkpoint_minutes=training.save_every,
        ),
        continue_from=training.continue_from,
        resume=training.resume,
        device=training.device,
    )


def _target(name: str, output: Path, *, offline: bool, screen: view.Screen) -> Path:
    """Return the GGUF file; a Hugging Face folder is converted first, once."""
    folder = Path(name).expanduser()
    is_checkpoint = (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
    if not is_checkpoint or any(folder.glob("*.gguf")):
        meant = meaning(name)
        with downloading(screen, str(meant.fetched), again="the same command") as bar:
            return resolve(meant, offline=offline, progress=bar)
    path = output / "target-f16.gguf"
    if not path.exists():
        output.mkdir(parents=True, exist_ok=True)
        with screen.waiting("Starting PyTorch"), held():
            from bough.convert.convert import convert as write_gguf
        with screen.converting("Converting to f16") as bar:
            write_gguf(folder, path, mix="f16", progress=lambda _, done, total: bar.update(done, total))
        screen.note(f"Converted to {path}. A draft works best with the quantisation it was trained on.")
    return path


class _Progress:
    def __init__(self, screen: view.Screen):
        self._screen = screen
        self._bars = contextlib.ExitStack()
        self._bar: view.Bar | None = None
        self._phase = ""
        self._noted = time.monotonic()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    def loading(self, done: int, total: int) -> None:
        self._at("loading", self._screen.loading, "Loading the target").update(done, total)

    def answering(self, done: int, total: int) -> None:
        self._at("answering", self._clocked, "Answering").update(done, total, label=f"{done:,} answers")
        self._note(f"{done:,} of {total:,} answers")

    def notify(self, event: "Event") -> None:
        from bough.train.draft_eval import Evaluation
        from bough.train.draft_settings import TrainingProgress

        bar = self._at("training", self._clocked, "Training")
        if isinstance(event, TrainingProgress):
            line = f"loss {event.loss:.2f}  accepts {event.acceptance:.2f}  {event.tokens_s:,.0f} tok/s"
            bar.update(int(_BAR_STEPS * event.share), _BAR_STEPS, label=line)
            self._note(f"step {event.step}: {line}")
        elif isinstance(event, Evaluation):
            with bar.paused():
                self._screen.note(
                    f"step {event.step}: held-out loss {event.loss:.3f}, accepted tokens a step about"
                    f" {event.acceptance:.2f} in a chain and {event.tree_acceptance:.2f} in a tree"
                    f"{_recall(event)}"
                )

    def _at(self, phase: str, make: Any, label: str) -> view.Bar:
        if self._bar is None or self._phase != phase:
            self._bars.close()
            self._bar, self._phase = self._bars.enter_context(make(label)), phase
        return self._bar

    def _clocked(self, label: str) -> view.Bar:
        return view.Bar(label, [BarColumn(), TimeRemainingColumn(compact=True)], shown=self._screen.draws)

    def _note(self, text: str) -> None:
        if not self._screen.draws and time.monotonic() - self._noted > _NOTES_EVERY_S:
            self._noted = time.monotonic()
            self._screen.note(text)


def _recall(event: "Evaluation") -> str:
    if event.recall is None:
        return ""
    return f"; the right token is a candidate {min(event.recall):.0%} to {max(event.recall):.0%} of the time"


def _report(result: "TrainingResult", target: Path, *, as_json: bool) -> None:
    assert result.evaluation is not None and result.measured is not None
    if as_json:
        view.print_json(
            {
                "draft": str(result.folder),
                "target": str(target),
                "steps": result.step,
                "held_out_loss": result.evaluation.loss,
                "acceptance_length": result.measured.acceptance,
                "untrained_acceptance_length": result.untrained,
                "parity": result.parity,
            }
        )
        return
    view.sections(
        "Trained a draft",
        {
            "TrainingResult": [
                ("draft", str(result.folder)),
                ("steps", f"{result.step:,}"),
                ("held-out loss", f"{result.evaluation.loss:.3f}"),
                (
                    "acceptance",
                    f"{result.measured.acceptance:.2f} tokens a step on held-out prompts, greedy"
                    f" ({result.untrained:.2f} before training)",
                ),
                ("parity", f"trainer and engine agree to {result.parity:.1g}"),
                ("use it", _example(result, target)),
            ]
        },
    )


def _example(result: "TrainingResult", target: Path) -> str:
    from bough.train.mtp_export import MTP_TARGET

    block_file = result.folder / MTP_TARGET
    model = [block_file] if block_file.exists() else [target, "--draft", result.folder]
    return f'bough run {shlex.join(map(str, model))} -p "def fibonacci(n):"'
