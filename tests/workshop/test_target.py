"""The trainable target against transformers' model, and against our decoder after conversion."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from bough.convert.convert import convert
from bough.errors import BoughError, UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.step import Step
from bough.state.sequences import SequenceStates
from tests.convert.hf_models import randomise, save_tokenizer
from workshop.training.target import Target, TargetConfig, save_target
from workshop.training.target_file import read_target

SHAPE = TargetConfig(vocabulary=320, width=64, layers=4, inner=96, head_dim=32, delta_dim=16, context=512)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def theirs() -> Any:
    settings = {key: value for key, value in SHAPE.to_hf().items() if key != "model_type"}
    config = Qwen3_5TextConfig(**settings)
    config._attn_implementation = "eager"
    return randomise(Qwen3_5ForCausalLM(config), 4)


@pytest.fixture(scope="module")
def ours(theirs: Any) -> Target:
    target = Target(SHAPE)
    # Strict: every name and shape is the checkpoint's.
    weights = {name: value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
    target.load_state_dict(weights)
    return target


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.detach() - theirs.detach()).abs().max() / theirs.detach().abs().max())


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocabulary, (rows, length), generator=torch.Generator().manual_seed(length))


def test_logits_are_those_of_transformers(ours: Target, theirs: Any) -> None:
    ids = tokens(2, 192)
    with torch.no_grad():
        assert error(ours.logits(ours(ids)), theirs(ids, use_cache=False).logits) <= TOLERANCE


def test_gradients_are_those_of_transformers(ours: Target, theirs: Any) -> None:
    ids = tokens(2, 129)
    mask = (tokens(2, 128) % 3 > 0).float()
    loss = ours.loss(ids[:, :-1], ids[:, 1:], mask)
    loss.objective.backward()
    logits = theirs(ids[:, :-1], use_cache=False).logits
    each = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    expected = (each * mask).sum() / mask.sum()
    expected.backward()
    assert error(loss.cross_entropy, expected) <= 1e-5
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and wanted[name].grad is not None
        assert error(parameter.grad, wanted[name].grad) <= 1e-3, name
    ours.zero_grad()
    theirs.zero_grad()


def test_z_loss_is_the_mean_square_of_the_normaliser(ours: Target) -> None:
    ids = tokens(1, 65)
    loss = ours.loss(ids[:, :-1], ids[:, 1:], torch.ones(1, 64), z_loss=0.1)
    with torch.no_grad():
        normaliser = ours.logits(ours(ids[:, :-1])).logsumexp(-1)
    assert torch.allclose(loss.objective - loss.cross_entropy, 0.1 * normaliser.square().mean(), rtol=1e-4)


def test_converted_target_computes_the_same(ours: Target, tmp_path: Path) -> None:
    save_target(ours, tmp_path / "hf", end_ids=[288, 286], pad_id=286)
    save_tokenizer("qwen35", tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "model.gguf", mix="f32")
    assert report.architecture == "qwen35" and not report.dropped
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        decoder = Decoder.load(file, device="cpu")
    states = SequenceStates(decoder.spec, max_ctx=512, device="cpu")
    slot, ids = states.open(), tokens(1, 128)
    states.reserve(slot, 128)
    slots = torch.tensor([slot])
    output = decoder.forward(Step.chunk(slots, ids, states.buffers.lengths[slots]), states.buffers)
    with torch.no_grad():
        assert error(decoder.logits(output.hidden), ours.logits(ours(ids))) <= TOLERANCE


def test_a_target_is_read_back_from_its_file(ours: Target, tmp_path: Path) -> None:
    save_target(ours, tmp_path / "folder", end_ids=[1], pad_id=0)
    save_tokenizer("qwen35", tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "target.gguf", mix="f32")
    read = read_target(tmp_path / "target.gguf", ours.config)
    again = Target(ours.config)
    again.load_state_dict(read)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-6, atol=1e-6)
    with pytest.raises(BoughError, match=r"blk\.\d"):
        read_target(tmp_path / "target.gguf", replace(ours.config, inner=2 * ours.config.inner))
    with pytest.raises(UnsupportedModel, match="nothing else"):
        read_target(tmp_path / "target.gguf", replace(ours.config, layers=ours.config.layers // 2))


def test_an_untrained_target_is_uniform_and_can_learn() -> None:
    """Output projections start at zero; every parameter has a gradient after the first step."""
    torch.manual_seed(0)
    target, ids = Target(SHAPE), tokens(2, 65)
    optimiser = torch.optim.AdamW(target.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimiser.zero_grad()
        loss = target.loss(ids[:, :-1], ids[:, 1:], torch.ones(2, 64))
        loss.objective.backward()
        losses.append(float(loss.cross_entropy))
        optimiser.step()
    assert abs(losses[0] - torch.tensor(float(SHAPE.vocabulary)).log()) < 0.3
    assert losses[-1] < losses[0] - 0.3
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in target.parameters())


def test_the_shipped_shape_has_the_sizes_of_its_configuration() -> None:
    with torch.device("meta"):
        target = Target(TargetConfig())
    assert sum(parameter.numel() for parameter in target.parameters()) == 41_234_760
    assert target.config.to_hf()["rope_parameters"]["mrope_section"] == [11, 11, 10]
