"""Biases: computed alike by every backend, or refused by all of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bough.convert.convert import convert
from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder, Target
from bough.models.native import NativeDecoder, NativeLoader
from bough.models.step import Step
from bough.state.sequences import SequenceStates
from tests.convert.hf_models import build_hf, save_hf
from tests.kernels.native_library import needs_native, opened
from tests.models.biased import TAKEN, biases_for, matrices_of, part_of, with_vectors
from workshop.steps import commit

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe")
# Native code runs no experts.
NATIVE = [pytest.param(family, "native", marks=needs_native) for family in FAMILIES if "moe" not in family]
BACKENDS = [*((family, "torch") for family in FAMILIES), *NATIVE]


def loaded(path: Path, backend: str) -> Target:
    with GGUFFile.open(path) as file:
        return NativeDecoder.load(file, opened()) if backend == "native" else Decoder.load(file)


@torch.inference_mode()
def logits_of(model: Target, ids: Tensor) -> Tensor:
    """Return logits [T, V]: half of the text is read as a chunk, the rest as trees of one row and four."""
    states, half, rows = SequenceStates(model.spec, max_ctx=256, max_rows=8), len(ids) // 2, []
    slot = states.open()
    slots = torch.tensor([slot])
    states.reserve(slot, len(ids))
    step = Step.chunk(slots, ids[None, :half], states.buffers.lengths[slots])
    rows.append(model.logits(model.forward(step, states.buffers).hidden[0]))
    states.advance(step)
    while (at := int(states.lengths[slot])) < len(ids):
        tokens = ids[None, at : at + (1 if at % 3 else 4)]
        parents = torch.arange(-1, tokens.shape[1] - 1)[None]
        step = Step.tree(slots, tokens, parents, states.buffers.lengths[slots])
        rows.append(model.verify(step, states.buffers)[1][0])
        commit(states, step, torch.tensor([tokens.shape[1] - 1]))
    return torch.cat(rows)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def biased_pair(family: str, folder: Path, **sizes: Any) -> tuple[Any, Path]:
    """Return transformers' float64 model with a bias at each such linear layer, and the same as a file.

    A bias follows the rows of its weight, which a converter reorders: rows are found by their values.
    """
    model, config = build_hf(family, seed=11, **sizes)
    config._experts_implementation = "eager"
    save_hf(model, config, folder / "hf")
    plain = folder / "plain.gguf"
    convert(folder / "hf", plain, mix="f32")
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    rows = {
        row.tobytes(): (name, index)
        for name, module in linear.items()
        for index, row in enumerate(module.weight.detach().numpy())
    }
    generator = torch.Generator().manual_seed(5)
    biases = {
        name: 0.3 * torch.randn(len(module.weight), generator=generator) for name, module in linear.items()
    }
    vectors, used = {}, set()
    with GGUFFile.open(plain) as file:
        for name in matrices_of(file):
            if part_of(name) in TAKEN:
                weight = file.raw(name).view(np.float32).reshape(file.tensors[name].shape)
                sources = [rows[row.tobytes()] for row in weight]
                values = [float(biases[source][index]) for source, index in sources]
                vectors[f"{name.removesuffix('weight')}bias"] = np.array(values, np.float32)
                used |= {source for source, _ in sources}
    for name in used:
        linear[name].bias = nn.Parameter(biases[name])
    return model.double(), with_vectors(plain, folder / "model.gguf", vectors)


def exact_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits [T, V] of one text in float64, also where the model's code names float32."""
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        return model(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize(("family", "backend"), BACKENDS)
def test_every_bias_at_once_against_transformers(family: str, backend: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4} if family == "qwen35" else {}  # deeper, rounding to float32 grows
    model, path = biased_pair(family, tmp_path, **sizes)
    with GGUFFile.open(path) as file:
        assert not {part_of(name) for name in matrices_of(file)} & TAKEN
    ids = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(1))
    assert error(logits_of(loaded(path, backend), ids), exact_logits(model, ids)) <= 1e-5


@pytest.mark.parametrize(("family", "backend"), BACKENDS)
def test_one_bias_is_computed_or_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, backend: str
) -> None:
    """Of every matrix of a file, one at a time."""
    path, ids = tiny_model(family, layers=4), torch.arange(40, 52)
    plain = logits_of(loaded(path, backend), ids)
    with GGUFFile.open(path) as file:
        names = {part_of(name): name for name in matrices_of(file)}
    assert len(names) > 5
    for part, name in names.items():
        (bias,) = vectors = biases_for(path, [name])
        biased = with_vectors(path, tmp_path / "biased.gguf", vectors)
        if part in TAKEN:
            assert error(logits_of(loaded(biased, backend), ids), plain) > 1e-3, name
        else:
            with pytest.raises(UnsupportedModel, match=re.escape(bias)):
                loaded(biased, backend)


@needs_native
def test_what_native_code_does_not_read_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that forgets biases, as it did of seven kinds: the names that it read are compared."""
    path = tiny_model("llama", layers=4)
    biased = with_vectors(path, tmp_path / "biased.gguf", biases_for(path, ["blk.1.ffn_up.weight"]))
    monkeypatch.setattr(NativeLoader, "has", lambda loader, name: False)
    with pytest.raises(
        UnsupportedModel, match=r"native CPU backend does not read tensor blk\.1\.ffn_up\.bias"
    ):
        loaded(biased, "native")
