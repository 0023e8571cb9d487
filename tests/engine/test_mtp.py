"""Speculation with the target's own MTP block: the same text as plain decoding, token for token."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from bough.config import EngineConfig, SpecConfig
from bough.engine.engine import Done, Engine, Request
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.decoder import Decoder
from bough.models.mtp import MTPBlock
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.prefix_cache.files import SnapshotFiles
from bough.session.loading import load_session
from bough.spec.costs import StepCosts
from bough.spec.mtp import STEPS, MTPModel
from bough.spec.speculator import Speculator
from bough.state.draft_ring import mtp_buffers
from tests.engine.driving import cut_after
from tests.engine.driving import run as drive_to_end
from tests.engine.test_lossless import SAMPLINGS

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 6
GREEDY = SamplingParams(seed=1)
CPU = torch.device("cpu")


class Model:
    def __init__(self, path: Path):
        with GGUFFile.open(path) as file:
            self.target = Decoder.load(file)
            self._block = MTPBlock.load(file, self.target.spec, device=CPU, dtype=torch.float32)

    def drafter(self, *, max_ctx: int = 1024, **settings) -> Speculator:
        buffers = mtp_buffers(self.target.spec, max_ctx=max_ctx)
        config = SpecConfig(**{"adaptive": False, "lookup": False, **settings})
        return Speculator(MTPModel(self._block, self.target, buffers), config, StepCosts())


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Model:
    return Model(tiny_model(layers=4, mtp=True))


def run(
    model: Model,
    drafter: Speculator | None,
    *,
    sampling: SamplingParams = GREEDY,
    count: int = 128,
    runner: Literal["eager", "graph"] = "eager",
) -> tuple[list[int], Done]:
    engine = Engine(model.target, max_ctx=1024, drafter=drafter, max_rows=64, runner=runner)
    return drive_to_end(engine, Request(prompt=PROMPT, max_tokens=count, sampling=sampling))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_same_text(model: Model, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    plain, _ = run(model, None, sampling=params)
    accepted = []
    for settings in ({"budget": 63}, {"budget": 22, "lookup": True}, {"budget": 5, "chain": True}):
        tokens, done = run(model, model.drafter(**settings), sampling=params)
        assert tokens == plain, settings
        accepted.append(done.stats.acceptance_length)
    tokens, done = run(model, model.drafter(budget=22), sampling=params, runner="graph")
    assert tokens == plain
    # Random weights: what the tree holds is accepted by chance.
    assert max(accepted) > 1


def test_same_text_with_experts_and_adaptive_rows(tiny_model: Callable[..., Path]) -> None:
    model = Model(tiny_model("qwen35moe", mtp=True))
    plain, _ = run(model, None, count=64)
    for settings in ({"budget": 30}, {"budget": 22, "lookup": True, "adaptive": True}):
        assert run(model, model.drafter(**settings), count=64)[0] == plain


def predictable(path: Path, out: Path) -> Path:
    """A copy whose next token depends on the last one alone, in the trunk and in the MTP block alike."""
    with GGUFFile.open(path) as file, GGUFWriter(out, "qwen35") as writer:
        depth = file.metadata["qwen35.block_count"] - 1
        for key, value in file.metadata.items():
            if key not in ("general.architecture", "general.alignment"):
                writer.add(key, value)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, info.type)
            assert info.type is QuantType.F32
        writer.write_header()
        for name, info in file.tensors.items():
            values = file.raw(name).view(np.float32).copy().reshape(info.shape)
            if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
                values[:] = 0
            if name.endswith(("enorm.weight", "shared_head_norm.weight")):
                values[:] = 1
            if name.endswith("shared_head_norm.weight"):
                values = file.raw("output_norm.weight").view(np.float32).copy()
            if name == f"blk.{depth}.nextn.eh_proj.weight":
                values[:] = np.eye(*info.shape)
            writer.write_tensor(name, values)
    return out


@pytest.fixture(scope="module")
def bigrams(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("bigrams")
    return Model(predictable(tiny_model(layers=4, mtp=True), folder / "bigrams.gguf"))


@pytest.mark.parametrize("runner", ["eager", "graph"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_block_that_is_right_is_accepted_to_its_depth(
    bigrams: Model, runner: Literal["eager", "graph"], temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    plain, _ = run(bigrams, None, sampling=sampling, count=100)
    # Sampled tokens are unlikely here, so that a tree prefers others at the same depth.
    for least, settings in (
        (STEPS + 0.5 if temperature == 0 else 2.5, {"budget": 40}),
        (STEPS + 0.5, {"budget": STEPS, "chain": True}),
    ):
        drafter = bigrams.drafter(**settings)
        tokens, done = run(bigrams, drafter, sampling=sampling, count=100, runner=runner)
        assert tokens == plain
        assert done.stats.acceptance_length > least, settings


@torch.inference_mode()
def proposal(draft: MTPModel) -> tuple[list[int], list[float]]:
    def rank(
        logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        best = logits.log_softmax(-1).topk(count, -1)
        return best.indices, best.values

    draft.flush(0)
    found = draft.candidates(torch.tensor([9]), torch.tensor([0]), rank, 8).one(0)
    return found.chains.flatten().tolist(), found.chain_scores.flatten().tolist()


@pytest.mark.parametrize("runner", ["eager", "graph"])
@pytest.mark.parametrize("keep", [20, 21, 22, 23, None])
def test_the_blocks_state_is_that_of_the_text(
    model: Model, keep: int | None, runner: Literal["eager", "graph"]
) -> None:
    """Also where it was cut inside the tokens of a step: the prefix cache saves this state."""
    drafter, fresh = model.drafter(budget=63), model.drafter(budget=63)
    sampling = SamplingParams(temperature=0.7, seed=4)
    options = {"cut": cut_after(keep)[0]} if keep else {}
    engine = Engine(model.target, max_ctx=1024, drafter=drafter, max_rows=64, runner=runner)
    request = Request(prompt=PROMPT, max_tokens=40, sampling=sampling, may_stop=True)
    tokens, _ = drive_to_end(engine, request, **options)
    assert len(tokens) == (keep or 40)
    # The last token was delivered, not processed.
    text = [*PROMPT, *tokens[:-1]]
    other = Engine(model.target, max_ctx=1024, drafter=fresh, max_rows=64)
    drive_to_end(other, Request(prompt=text, max_tokens=1, sampling=sampling))
    (ids, scores), (wanted, wanted_scores) = proposal(drafter._draft), proposal(fresh._draft)
    assert ids == wanted and scores == pytest.approx(wanted_scores, abs=1e-4)


def test_snapshots_on_disk(model: Model, tmp_path: Path) -> None:
    def engine(drafter: Speculator) -> tuple[Engine, SnapshotFiles]:
        files = SnapshotFiles(tmp_path, "0123456789abcdef" * 2, limit=1 << 30)
        cache = PrefixCacheConfig(1 << 30, files)
        return Engine(model.target, max_ctx=1024, drafter=drafter, max_rows=64, prefix_cache=cache), files

    first, files = engine(model.drafter(budget=63))
    request = Request(prompt=PROMPT, max_tokens=40, sampling=GREEDY, boundaries={})
    tokens, _ = drive_to_end(first, request)
    files.flush()
    drafters = model.drafter(budget=63), model.drafter(budget=63)
    request = Request(prompt=[*PROMPT, *tokens, 40, 41], max_tokens=1, sampling=GREEDY, boundaries={})
    _, done = drive_to_end(engine(drafters[0])[0], request)
    assert done.stats.cached_tokens >= len(PROMPT) + 39
    drive_to_end(Engine(model.target, max_ctx=1024, drafter=drafters[1], max_rows=64), request)
    (ids, scores), (wanted, wanted_scores) = (proposal(drafter._draft) for drafter in drafters)
    assert ids == wanted and scores == pytest.approx(wanted_scores, abs=1e-4)


def test_a_session_uses_the_block_unless_told_otherwise(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(mtp=True)

    def draft(speculation: SpecConfig | None) -> str:
        session = load_session(path, EngineConfig(device="cpu", max_ctx=256, speculation=speculation))
        return type(getattr(session.engine.drafter, "_draft", None)).__name__

    assert draft(SpecConfig()) == "MTPModel"
    assert draft(SpecConfig(mtp="off")) == "NoDraftModel"
    assert draft(None) == "NoneType"
