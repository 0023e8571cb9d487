"""A training run killed in each of its stages goes on where it was."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from bough.train.draft_data import Regeneration
from bough.train.draft_run import DraftJob, train_draft
from bough.train.draft_settings import TrainConfig
from bough.train.shards import read_shard, shard_files

ROOT = Path(__file__).parents[2]
STEPS = 8
# Runs a job and kills itself, as the kernel or a lost machine would, in the middle of a stage.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.train.test_killed import job_of
from bough.train import draft_data, draft_trainer
from bough.train.draft_run import train_draft
from bough.train.draft_settings import TrainingProgress

draft_data._SHARD = {"cpu": 4}
stage, folder = sys.argv[1], Path(sys.argv[2])

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def answering(done, total):
    if stage == "answers" and done == 7:
        die()

step = draft_trainer.Trainer._step
def counted(self, *arguments):
    if stage == "training" and self._state.step == 5:
        die()
    return step(self, *arguments)
draft_trainer.Trainer._step = counted
if stage == "export":
    draft_trainer.check_parity = die
train_draft(job_of(folder, resume=True), answering=answering)
"""


def job_of(folder: Path, *, resume: bool) -> DraftJob:
    return DraftJob(
        target=folder.parent / "target.gguf",
        folder=folder,
        prompts=folder.parent / "prompts.jsonl",
        regeneration=Regeneration(length=40, max_tokens=12, temperatures=(0.0, 0.8), seed=3),
        config=TrainConfig(
            layers=1, block=4, steps=STEPS, batch=3, anchors=4, held_out=2, checkpoint_minutes=0.0
        ),
        resume=resume,
        device="cpu",
    )


def killed(stage: str, folder: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KILLED, stage, folder],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", "HOME": str(folder.parent)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr


def test_every_stage_survives_a_kill(tiny_model, tmp_path):
    """The draft is that of a run that was never killed; at most what was not written is lost."""
    (tmp_path / "target.gguf").symlink_to(tiny_model("qwen35", layers=4))
    lines = [json.dumps({"prompt": f"the {number} and"}) for number in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    folder = tmp_path / "draft"

    killed("answers", folder)
    kept = [job for path in shard_files(folder / "tokens") for job in read_shard(path).jobs]
    assert len(kept) == 4  # of seven: a shard has four
    killed("training", folder)
    assert len([job for path in shard_files(folder / "tokens") for job in read_shard(path).jobs]) == 12
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["place"]["step"] == 5
    killed("export", folder)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["place"]["step"] == STEPS
    assert not (folder / "training.json").exists()

    assert train_draft(job_of(folder, resume=True)).finished
    assert train_draft(job_of(tmp_path / "whole", resume=False)).finished
    one, other = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((folder / "training.json").read_text())["steps"] == STEPS
    assert not list(folder.rglob("*.part"))
