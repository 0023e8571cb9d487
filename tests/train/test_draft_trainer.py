"""The training loop: learning, resuming, a full disk, and that the export is the trained draft."""

import json
import resource
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bough.config import EngineConfig, SpecConfig
from bough.engine.sampler import SamplingParams
from bough.errors import BoughError, ModelFileError, ResourceError, UnsupportedModel, UsageError
from bough.gguf.reader import GGUFFile
from bough.models.dflash import DFlashDraft
from bough.models.spec import ModelSpec, has_mtp
from bough.session.events import Finished
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.train import draft_eval, portable
from bough.train.curves import CURVES
from bough.train.draft_data import Regeneration, TokenData
from bough.train.draft_eval import Evaluation, check_parity, measure
from bough.train.draft_run import DraftJob, train_draft
from bough.train.draft_settings import Saved, TrainConfig, TrainingProgress
from bough.train.draft_target import load_target
from bough.train.draft_trainer import Trainer
from bough.train.muon import orthogonalised
from tests.train.toy_target import SENTENCES, make_toy
from workshop.case import command, environment

QUICK = TrainConfig(layers=1, block=4, steps=6, batch=3, anchors=4, held_out=2, lr=1e-2, float32=True)


@pytest.fixture(scope="module")
def data(tiny_target) -> TokenData:
    """Random texts: enough to check that steps are taken."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(20, 40, 14)
    tokens = generator.integers(0, 300, lengths.sum()).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return TokenData(tokens, starts, np.full(14, 8), np.arange(14) % 7)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_training_raises_the_acceptance_length(tmp_path):
    """From prompts to a draft with a far higher acceptance length in the engine than an untrained one."""
    generator = np.random.default_rng(5)
    prompts = tmp_path / "prompts.jsonl"
    with prompts.open("w") as file:
        for _ in range(128):
            text = "".join(SENTENCES[number] for number in generator.integers(0, len(SENTENCES), 2))
            file.write(json.dumps({"prompt": text}) + "\n")
    path, folder, events = make_toy(tmp_path / "toy.gguf"), tmp_path / "draft", []
    job = DraftJob(
        target=path,
        folder=folder,
        prompts=prompts,
        regeneration=Regeneration(length=96, max_tokens=64, temperatures=(1.0,), top_p=1.0),
        config=TrainConfig(layers=2, steps=90, batch=8, anchors=16, lr=1e-2, held_out=6, gguf=True),
        device="cpu",
    )
    result = train_draft(job, notify=events.append)
    losses = [event.loss for event in events if isinstance(event, TrainingProgress)]
    held_out = [event for event in events if isinstance(event, Evaluation)]
    assert losses[-1] < 0.5 * losses[0]
    assert held_out[-1].acceptance > held_out[0].acceptance + 0.5
    assert result.untrained < 1.3
    assert result.measured is not None and result.measured.acceptance > 2.2 > 1.6 * result.untrained
    assert result.parity < 1e-3
    # The evaluation predicts the acceptance length in the engine.
    assert result.measured.acceptance == pytest.approx(held_out[-1].tree_acceptance, rel=0.35)

    target = load_target(path, device="cpu")
    encoded = [target.tokenizer.encode("Cats and dogs rest here. It is")]
    for draft in (folder, folder / "draft-q8_0.gguf"):
        assert measure(target, draft, encoded, max_tokens=32).acceptance > 2
        sampled = measure(
            target, draft, encoded, max_tokens=32, sampling=SamplingParams(temperature=0.8, seed=1)
        )
        assert sampled.acceptance > 1.5
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    report = json.loads((folder / "training.json").read_text())
    assert report["engine"]["acceptance"] == result.measured.acceptance
    assert report["config"]["steps"] == report["steps"] == 90
    assert len(report["history"]) == 10


@pytest.mark.parametrize("kind", ["dflash2", "mlp"])
def test_a_draft_learns_what_follows_the_token_before(tmp_path, kind):
    """It goes on from a DFlash draft: its convolutions and its selector, or its MLP, begin without effect."""
    generator = np.random.default_rng(5)
    prompts = tmp_path / "prompts.jsonl"
    with prompts.open("w") as file:
        for _ in range(64):
            text = "".join(SENTENCES[number] for number in generator.integers(0, len(SENTENCES), 2))
            file.write(json.dumps({"prompt": text}) + "\n")
    path, first, second = make_toy(tmp_path / "toy.gguf"), tmp_path / "first", tmp_path / "second"
    job = DraftJob(
        target=path,
        folder=first,
        prompts=prompts,
        regeneration=Regeneration(length=64, max_tokens=40, temperatures=(1.0,), top_p=1.0),
        config=TrainConfig(layers=1, block=8, steps=30, batch=8, anchors=16, lr=1e-2, held_out=6),
        device="cpu",
    )
    before = train_draft(job)
    config = replace(job.config, kind=kind, rank=32, steps=40, gguf=True, head_only=kind == "mlp")
    job = replace(job, folder=second, config=config, continue_from=first)
    result = train_draft(job)
    assert before.measured is not None and result.measured is not None and result.evaluation is not None
    # Untrained it is the draft that it continues: these two drafts differ in their bfloat16 rounding at most.
    assert result.untrained > 1.3
    assert result.measured.acceptance > before.measured.acceptance
    assert result.parity < 1e-3
    recall = result.evaluation.recall
    assert recall is not None and len(recall) == 7 and min(recall) > 0.5
    target = load_target(path, device="cpu")
    encoded = [target.tokenizer.encode("Cats and dogs rest here. It is")]
    stored = load_file(second / "model.safetensors")
    if kind == "dflash2":
        assert stored["candidate_selector.successor_codebook"].any()
        assert stored["layers.0.mlp_conv.kernel_projection.weight"].any()
    else:
        assert stored["ar_approximation.d.weight"].any()
        others = load_file(first / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in others.items())
    # The MLP is trained alone, on a draft of few steps.
    least = 2 if kind == "dflash2" else 1.3
    for draft in (second, second / "draft-q8_0.gguf"):
        assert measure(target, draft, encoded, max_tokens=32).acceptance > least


def test_an_mtp_block_for_a_target_without_one(tiny_target, data, tmp_path):
    """The run writes a file of the target that speculates by itself, and gives the target's own text."""
    events = []
    config = replace(QUICK, kind="mtp", steps=40)
    result = Trainer(tiny_target, data, tmp_path, config, notify=events.append).run()
    losses = [event.loss for event in events if isinstance(event, TrainingProgress)]
    assert losses[-1] < 0.9 * losses[0]
    assert result.parity < 1e-3 and result.evaluation is not None and len(result.evaluation.top1) == 4
    path = tmp_path / "target-mtp.gguf"
    with GGUFFile.open(path) as file, GGUFFile.open(tiny_target.path) as before:
        assert has_mtp(file, ModelSpec.from_gguf(file))
        assert all(np.array_equal(file.raw(name), before.raw(name)) for name in before.tensors)
    texts = []
    for model, speculation in ((tiny_target.path, None), (path, SpecConfig(adaptive=False, lookup=False))):
        session = load_session(model, EngineConfig("cpu", 128, speculation=speculation))
        request = TextRequest(prompt="Cats and dogs rest here.", max_tokens=24, ignore_eos=True)
        finished = list(session.generate(request))[-1]
        assert isinstance(finished, Finished)
        texts.append(finished.tokens)
        assert (finished.stats.verified_rows > finished.stats.steps) == (speculation is not None)
    assert texts[0] == texts[1]


def test_only_a_dense_hybrid_gets_an_mtp_block(tiny_model, tmp_path, data):
    target = load_target(tiny_model("qwen3"), device="cpu")
    config = TrainConfig(kind="mtp", steps=1, held_out=2)
    with pytest.raises(UnsupportedModel, match="qwen3: no MTP block can be trained for it"):
        Trainer(target, data, tmp_path, config)


def test_a_resumed_run_equals_an_uninterrupted_one(tiny_target, data, tmp_path):
    whole = Trainer(tiny_target, data, tmp_path / "whole", QUICK)
    assert whole.run().finished
    seen: list[TrainingProgress] = []
    stopped = Trainer(
        tiny_target,
        data,
        tmp_path / "resumed",
        QUICK,
        cancelled=lambda: stopped._state.step >= 3,
        notify=seen.append,
    )
    assert not stopped.run().finished
    assert not (tmp_path / "resumed/config.json").exists()
    resumed = Trainer(tiny_target, data, tmp_path / "resumed", QUICK, resume=True)
    assert same(weights(stopped), weights(resumed)) and not same(weights(whole), weights(resumed))
    assert resumed.run().finished
    assert same(weights(whole), weights(resumed))
    again = Trainer(tiny_target, data, tmp_path / "resumed", QUICK, resume=True).run()
    assert again.finished and again.step == 6


def test_continue_from_an_exported_draft(tiny_target, data, tmp_path):
    first = Trainer(tiny_target, data, tmp_path / "first", replace(QUICK, gguf=True))
    assert first.run().finished
    for path, tolerance in ((tmp_path / "first", 0.0), (tmp_path / "first" / "draft-q8_0.gguf", 1e-2)):
        begun = Trainer(tiny_target, data, tmp_path / path.name / "second", QUICK, continue_from=path)
        for name, tensor in weights(first).items():
            torch.testing.assert_close(weights(begun)[name], tensor, rtol=tolerance, atol=tolerance)
    held_out: list[Evaluation] = []
    second = Trainer(
        tiny_target,
        data,
        tmp_path / "second",
        replace(QUICK, steps=2, lr=1e-5),
        continue_from=tmp_path / "first",
        notify=lambda event: held_out.append(event) if isinstance(event, Evaluation) else None,
    )
    assert second.run().finished
    report, earlier = (
        json.loads((tmp_path / name / "training.json").read_text()) for name in ("second", "first")
    )
    assert report["continued_from"] == "first" and earlier["continued_from"] is None
    assert held_out[-1].loss == pytest.approx(earlier["history"][-1]["loss"], rel=0.01)
    with pytest.raises(UsageError, match="has layers"):
        Trainer(
            tiny_target, data, tmp_path / "other", replace(QUICK, layers=2), continue_from=tmp_path / "first"
        )


def test_a_killed_run_resumes_from_its_last_checkpoint(tiny_target, data, tmp_path):
    config = replace(QUICK, checkpoint_minutes=0.0)

    class Killed(Exception):
        pass

    def kill(event: object) -> None:
        if isinstance(event, Saved) and event.step == 4:
            raise Killed

    trainer = Trainer(tiny_target, data, tmp_path / "draft", config, notify=kill)
    with pytest.raises(Killed):
        trainer.run()
    resumed = Trainer(tiny_target, data, tmp_path / "draft", config, resume=True)
    assert resumed._state.step == 4
    resumed.run()
    whole = Trainer(tiny_target, data, tmp_path / "whole", config)
    whole.run()
    assert same(weights(whole), weights(resumed))


@contextmanager
def files_up_to(size: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_portable_checkpoint_goes_on_elsewhere(tiny_target, data, tmp_path, monkeypatch):
    """The weights and the place travel in small files; the optimiser's state does not."""
    monkeypatch.setattr(portable, "PIECE", 20_000)
    carried, events = tmp_path / "carried", []
    config = replace(QUICK, checkpoint_minutes=0.0, portable=carried)

    def stop() -> bool:
        return any(isinstance(event, Saved) and event.step == 3 for event in events)

    first = Trainer(tiny_target, data, tmp_path / "one", config, notify=events.append, cancelled=stop)
    assert not first.run().finished
    files = sorted(carried.iterdir())
    assert len(files) > 2 and max(path.stat().st_size for path in files) <= 20_000
    assert all(path.name.startswith("portable-0000004.") for path in files)

    second = Trainer(tiny_target, data, tmp_path / "two", config, resume=True)
    assert second._state.step == 4 and second._state.history == first._state.history
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, weights(first)[name].bfloat16().float())
    before = weights(second)
    share = second._share()
    second._step(second._batch(second._epoch(0)[0]), share)
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in weights(second).items())
    third = Trainer(tiny_target, data, tmp_path / "three", config, resume=True)
    third._restarted = None
    third._step(third._batch(third._epoch(0)[0]), share)
    at_once = max(float((tensor - before[name]).abs().max()) for name, tensor in weights(third).items())
    assert moved < 0.1 * at_once  # the first of forty steps of warm-up

    fourth = Trainer(tiny_target, data, tmp_path / "four", config, resume=True)
    assert fourth.run().finished and fourth._state.step == 6
    files = sorted(carried.iterdir())
    assert all(path.name.startswith("portable-0000006.") for path in files)
    files[0].write_bytes(b"x" + files[0].read_bytes()[1:])
    with pytest.raises(ModelFileError, match="do not belong together"):
        Trainer(tiny_target, data, tmp_path / "five", config, resume=True)
    files[0].unlink()  # incomplete: as if there were none
    assert Trainer(tiny_target, data, tmp_path / "six", config, resume=True)._state.step == 0


def test_a_part_of_the_vocabulary_suffices_for_the_loss(tiny_target, data, tmp_path):
    config = replace(QUICK, head_tokens=250)
    trainer = Trainer(tiny_target, data, tmp_path, config)
    used = np.unique(data.tokens)
    assert trainer._head.tokens is not None and set(used.tolist()) <= set(trainer._head.tokens.tolist())
    assert len(trainer._head.weights) == max(250, len(used)) < tiny_target.spec.vocab_size
    assert trainer.run().finished
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["config"]["head_tokens"] == 250
    assert [point["answers"] for point in report["history"]] == sorted(
        point["answers"] for point in report["history"]
    )
    pytest.importorskip("matplotlib")
    assert (tmp_path / CURVES).read_bytes()[:4] == b"\x89PNG"


def test_a_full_disk_is_reported_and_the_old_checkpoint_stays(tiny_target, data, tmp_path):
    trainer = Trainer(tiny_target, data, tmp_path, QUICK)
    trainer._save()
    before = (tmp_path / "checkpoint.pt").read_bytes()
    trainer._state.step = 1
    with (
        files_up_to(20_000),
        pytest.raises(ResourceError, match=r"checkpoint\.pt cannot be written") as error,
    ):
        trainer._save()
    assert "`resume`" in error.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_an_earlier_run_is_not_overwritten(tiny_target, data, tmp_path):
    Trainer(tiny_target, data, tmp_path, QUICK)._save()
    with pytest.raises(UsageError, match="exists from an earlier run") as error:
        Trainer(tiny_target, data, tmp_path, QUICK)
    assert "`resume`" in error.value.hint
    with pytest.raises(UsageError, match=r"has layers \('full',\), needed \('full', 'full'\)"):
        Trainer(tiny_target, data, tmp_path, replace(QUICK, layers=2), resume=True)
    with pytest.raises(UsageError, match="was trained with `optimiser` muon, not adamw"):
        Trainer(tiny_target, data, tmp_path, replace(QUICK, optimiser="adamw"), resume=True)
    (tmp_path / "checkpoint.pt").write_bytes(b"not one")
    with pytest.raises(ModelFileError, match="not a readable checkpoint"):
        Trainer(tiny_target, data, tmp_path, QUICK, resume=True)


def test_invalid_settings_are_refused(tiny_target, data, tmp_path):
    for change, problem in (
        ({"steps": 0}, "`steps` is 0"),
        ({"minutes": 3.0}, "`steps` and `minutes` exclude each other"),
        ({"batch": 0}, "`batch` is 0"),
        ({"lr": -1.0}, "`lr` is -1.0"),
    ):
        with pytest.raises(UsageError, match=problem):
            replace(QUICK, **change)
    few = TokenData(data.tokens[:60], np.array([0, 30, 60]), np.array([8, 8]), np.array([0, 0]))
    with pytest.raises(UsageError, match="2 texts of 1 prompts are too few"):
        Trainer(tiny_target, few, tmp_path, QUICK)
    with pytest.raises(UsageError, match="either `prompts` or `tokens`"):
        DraftJob(tmp_path, tmp_path)


def test_micro_batches_accumulate_the_same_gradient(tiny_target, data, tmp_path):
    """The gradient is that of the whole batch."""
    gradients = []
    for size in (3, 2):
        trainer = Trainer(tiny_target, data, tmp_path / str(size), QUICK)
        trainer._micro = size
        trainer._optimisers = []
        trainer._step(trainer._batch(trainer._epoch(0)[0]), 0.5)
        gradients.append([parameter.grad for parameter in trainer.model.parameters()])
    for whole, micro in zip(*gradients, strict=True):
        assert (whole - micro).norm() < 1e-4 * whole.norm()


def test_a_non_finite_gradient_is_skipped(tiny_target, data, tmp_path):
    trainer = Trainer(tiny_target, data, tmp_path, replace(QUICK, steps=100))
    before = weights(trainer)
    trainer._frozen.head[:] = torch.nan
    with pytest.raises(BoughError, match="the gradient was not finite in 20 consecutive steps"):
        trainer._loop()
    assert same(before, weights(trainer))


def test_a_parity_failure_raises(tiny_target, data, tmp_path, monkeypatch):
    trainer = Trainer(tiny_target, data, tmp_path, QUICK)
    trainer._export(tmp_path)
    assert check_parity(tiny_target, tmp_path, data, [0, 1, 2]) < 1e-5
    load = DFlashDraft.load

    def careless(*arguments, **options):
        draft = load(*arguments, **options)
        draft._norm = draft._norm * 1.01
        return draft

    monkeypatch.setattr(draft_eval.DFlashDraft, "load", careless)
    with pytest.raises(BoughError, match=r"logits differ by 0\.0"):
        check_parity(tiny_target, tmp_path, data, [0, 1, 2])


def test_muon_orthogonalises_matrices():
    for shape in ((3, 16, 40), (2, 40, 16), (1, 8, 8)):
        made = orthogonalised(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        sizes = torch.linalg.svdvals(made)
        assert made.shape == shape and sizes.min() > 0.5 and sizes.max() < 1.5


def test_a_training_script_that_was_stopped_says_so_by_its_exit_code(tiny_target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the {i}"}) + "\n" for i in range(8)))
    job = ["--prompts", prompts, "--output", tmp_path / "draft", "--stop-after", 1e-9, "--steps", 2]
    flags = ["--layers", 1, "--seq", 32, "--n-gen", 12, "--batch", 4, "--anchors", 4, "--device", "cpu"]
    line = command("training.draft", tiny_target.path, *job, *flags)
    one_thread = environment() | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(line, capture_output=True, text=True, env=one_thread)
    assert result.returncode == 3 and "continue with --resume" in result.stdout, result.stderr[-2000:]
    assert not (tmp_path / "draft/training.json").exists()


def test_data_parallel_training_under_torchrun(tiny_target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the {i}"}) + "\n" for i in range(8)))
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    job = ["--prompts", prompts, "--output", tmp_path / "draft", "--steps", 2, "--batch", 4, "--anchors", 4]
    flags = ["--layers", 1, "--seq", 32, "--n-gen", 12, "--temperature", 0, "--device", "cpu"]
    python, *line = command("training.draft", tiny_target.path, *job, *flags)
    result = subprocess.run(
        [python, *launch, *line],
        capture_output=True,
        text=True,
        env=environment() | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads((tmp_path / "draft/training.json").read_text())
    assert report["steps"] == 2 and report["texts"] + report["held_out"] == 8
