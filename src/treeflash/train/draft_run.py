"""A whole training run, from a target's file to a draft in a folder. Knows no terminal."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from treeflash.errors import UsageError
from treeflash.models.weights import Progress as LoadProgress
from treeflash.train.draft_data import Regeneration, TokenData, regenerate
from treeflash.train.draft_import import read_draft
from treeflash.train.draft_settings import Event, Result, TrainConfig
from treeflash.train.draft_target import load_target
from treeflash.train.draft_trainer import Trainer, check_folder, draft_spec
from treeflash.train.ranks import Ranks

TOKENS = "tokens"  # the folder of regenerated text, inside the draft's


@dataclass(frozen=True, slots=True)
class Job:
    """Exactly one of `prompts`, a JSONL file to be answered, and `tokens`, a folder of answers."""

    target: Path  # a GGUF file
    folder: Path  # where everything goes
    prompts: Path | None = None
    tokens: Path | None = None
    regeneration: Regeneration = field(default_factory=Regeneration)
    config: TrainConfig = field(default_factory=TrainConfig)
    begin: Path | None = None  # a draft whose weights to start with
    resume: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.tokens is None):
            raise UsageError(
                "needed either --prompts or --tokens",
                "--prompts FILE has the target answer prompts, --tokens FOLDER takes answers that are there",
            )


def train_draft(
    job: Job,
    *,
    loading: LoadProgress | None = None,
    answering: Callable[[int, int], None] | None = None,
    notify: Callable[[Event], None] = lambda event: None,
    cancelled: Callable[[], bool] = lambda: False,
    data_only: bool = False,
) -> Result:
    """Loads, answers prompts, trains; where `cancelled` says yes, all but the shard at hand is kept."""
    ranks, device = Ranks.join(job.device)
    try:
        check_folder(job.folder, resume=job.resume)
        target = load_target(job.target, device=device, progress=loading)
        # What cannot be is refused before any work.
        spec = draft_spec(target, job.config, job.folder)
        if job.begin is not None:
            read_draft(job.begin, spec, target.spec)
        tokens = job.tokens
        if job.prompts is not None:
            tokens = job.folder / TOKENS
            done = regenerate(
                target,
                job.prompts,
                tokens,
                job.regeneration,
                progress=answering,
                cancelled=cancelled,
                rank=ranks.rank,
                ranks=ranks.count,
            )
            done = ranks.all(done, target.device)
            if data_only or not done:
                return Result(done, 0, job.folder)
        assert tokens is not None
        data = TokenData.load(tokens, vocabulary=target.spec.vocab_size, length=job.regeneration.length)
        trainer = Trainer(
            target,
            data,
            job.folder,
            job.config,
            begin=job.begin,
            resume=job.resume,
            ranks=ranks,
            notify=notify,
            cancelled=cancelled,
        )
        return trainer.run()
    finally:
        ranks.leave()
