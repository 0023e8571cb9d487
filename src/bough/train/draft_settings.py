"""Settings, progress events and results of a training run, as plain values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bough.errors import UsageError
from bough.train.draft_eval import Evaluation, MeasuredDraft
from bough.train.draft_loss import LossKind
from bough.train.draft_model import DraftKind

_RATES = {"muon": 2e-3, "adamw": 6e-4}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    kind: DraftKind = "dflash"
    rank: int | None = None  # of a DFlash2 draft's selector, or the inner width of an MLP over candidates
    head_only: bool = False  # what the kind adds to the draft it begins with; that stays as it is
    layers: int = 3
    kv_heads: int | None = None  # None: by the target's width; four times as many query heads
    feed_forward: int | None = None  # None: three times the target's width
    block: int = 16
    window: int = 0  # 0: all layers attend to the whole context
    mask_token: int | None = None
    steps: int | None = None
    minutes: float | None = None
    batch: int = 64  # texts per step, over all processes
    anchors: int = 128  # blocks per text
    lr: float | None = None  # None: the optimiser's default
    weight_decay: float = 0.01
    optimiser: Literal["muon", "adamw"] = "muon"
    loss: LossKind = "dpace"
    # Tokens that the training loss compares: all of the training text, then random ones; None: all there are.
    head_tokens: int | None = None
    held_out: int = 32  # prompts
    checkpoint_minutes: float = 5.0
    seed: int = 0
    portable: Path | None = None  # folder of checkpoints without the optimiser's state, in small files
    gguf: bool = False  # also export a Q8_0 GGUF file
    vocabulary: bool = True  # in that file: llama.cpp needs it
    float32: bool = False  # dtype of the safetensors file; otherwise bfloat16

    def __post_init__(self) -> None:
        for name in ("steps", "minutes", "batch", "anchors", "lr", "rank", "head_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"`{name}` is {value}, needed a number above 0")
        if self.steps is not None and self.minutes is not None:
            raise UsageError("`steps` and `minutes` exclude each other")

    @property
    def rate(self) -> float:
        return self.lr if self.lr is not None else _RATES[self.optimiser]


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    step: int
    share: float  # of the run, 0 to 1
    loss: float
    acceptance: float  # acceptance length of the likeliest chain, on the training text
    tokens_s: float  # without padding
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    path: Path


Event = TrainingProgress | Evaluation | Saved


@dataclass(frozen=True, slots=True)
class TrainingResult:
    finished: bool  # False: cancelled, with a checkpoint to resume from
    step: int
    folder: Path
    evaluation: Evaluation | None = None
    untrained: float = 0.0  # acceptance length in the engine before training
    measured: MeasuredDraft | None = None
    parity: float = 0.0
