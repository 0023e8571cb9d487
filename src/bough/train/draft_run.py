"""A whole training run, from a target's GGUF file to an exported draft."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bough.errors import UsageError
from bough.models.weights import Progress as LoadProgress
from bough.train.draft_data import Regeneration, TokenData, regenerate
from bough.train.draft_settings import Event, TrainConfig, TrainingResult
from bough.train.draft_target import load_target
from bough.train.draft_trainer import Trainer, check_folder, check_settings
from bough.train.ranks import Ranks

TOKENS = "tokens"  # subfolder of the draft's folder with the generated training text


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Settings of a run; exactly one of `prompts` (a JSONL file) and `tokens` (a token folder) is set."""

    target: Path  # a GGUF file
    folder: Path  # output folder
    prompts: Path | None = None
    tokens: Path | None = None
    regeneration: Regeneration = field(default_factory=Regeneration)
    config: TrainConfig = field(default_factory=TrainConfig)
    continue_from: Path | None = None  # a draft whose weights to start with
    resume: bool = False
    device: str = "auto"
    part: tuple[int, int] = (0, 1)  # of the answers: which, of how many processes that share the folder

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.tokens is None):
            raise UsageError(
                "needed either `prompts` or `tokens`",
                "`prompts` is a file for which the target generates outputs,"
                " `tokens` a folder of outputs from an earlier run",
            )


def train_draft(
    job: DraftJob,
    *,
    loading: LoadProgress | None = None,
    answering: Callable[[int, int], None] | None = None,
    notify: Callable[[Event], None] = lambda event: None,
    cancelled: Callable[[], bool] = lambda: False,
    data_only: bool = False,
) -> TrainingResult:
    """Load the target, generate the training text and train the draft.

    `cancelled` is polled between steps; only the token shard in progress is lost.
    """
    ranks, device = Ranks.join(job.device)
    try:
        check_folder(job.folder, resume=job.resume)
        target = load_target(job.target, device=device, progress=loading)
        check_settings(target, job.config, job.folder, job.continue_from)
        tokens = job.tokens
        if job.prompts is not None:
            tokens = job.folder / TOKENS
            part = job.part if ranks.count == 1 else (ranks.rank, ranks.count)
            done = regenerate(
                target,
                job.prompts,
                tokens,
                job.regeneration,
                progress=answering,
                cancelled=cancelled,
                rank=part[0],
                ranks=part[1],
            )
            done = ranks.all(done, target.device)
            if data_only or not done:
                return TrainingResult(done, 0, job.folder)
        assert tokens is not None
        data = TokenData.load(tokens, vocabulary=target.spec.vocab_size, length=job.regeneration.length)
        trainer = Trainer(
            target,
            data,
            job.folder,
            job.config,
            continue_from=job.continue_from,
            resume=job.resume,
            ranks=ranks,
            notify=notify,
            cancelled=cancelled,
        )
        return trainer.run()
    finally:
        ranks.leave()
