"""What a training run is told, and what it tells: plain values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treeflash.errors import UsageError
from treeflash.train.draft_eval import Evaluation, Measured
from treeflash.train.draft_loss import LossKind

_RATES = {"muon": 2e-3, "adamw": 6e-4}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    layers: int = 3
    block: int = 16
    window: int = 0  # 0: all layers see the whole context
    mask_token: int | None = None
    steps: int | None = None
    minutes: float | None = None
    batch: int = 64  # texts a step, of all processes together
    anchors: int = 128  # blocks a text
    lr: float | None = None  # None: as suits the optimiser
    weight_decay: float = 0.01
    optimiser: Literal["muon", "adamw"] = "muon"
    loss: LossKind = "dpace"
    held_out: int = 32  # prompts
    checkpoint_minutes: float = 5.0
    seed: int = 0
    gguf: bool = False  # a Q8_0 file beside the safetensors
    float32: bool = False  # weights in the safetensors file; else bfloat16

    def __post_init__(self) -> None:
        for flag, value in (
            ("--steps", self.steps),
            ("--minutes", self.minutes),
            ("--batch", self.batch),
            ("--anchors", self.anchors),
            ("--lr", self.lr),
        ):
            if value is not None and not value > 0:
                raise UsageError(f"{flag} is {value}, needed a number above 0")
        if self.steps is not None and self.minutes is not None:
            raise UsageError("--steps and --minutes exclude each other")

    @property
    def rate(self) -> float:
        return self.lr if self.lr is not None else _RATES[self.optimiser]


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    share: float  # of the run, 0 to 1
    loss: float
    acceptance: float  # estimated from the rows' likeliest tokens, on the text that is trained on
    tokens_s: float  # of text, padding not counted
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    path: Path


Event = Progress | Evaluation | Saved


@dataclass(frozen=True, slots=True)
class Result:
    finished: bool  # False: cancelled, with a checkpoint to go on from
    step: int
    folder: Path
    evaluation: Evaluation | None = None
    untrained: float = 0.0  # what the engine measured with the draft as it began
    measured: Measured | None = None
    parity: float = 0.0
