"""Checkpoints and GGUF files that are not, or not only, a DFlash draft of the target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bough.errors import BoughError, ModelFileError, ModelNotFound, UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.dflash import DFlashDraft, open_draft
from bough.models.draft_spec import default_taps
from bough.models.spec import ModelSpec
from tests.tiny_draft import draft_config, draft_tensors, gguf_metadata, save_draft, save_gguf


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> ModelSpec:
    with GGUFFile.open(tiny_model("qwen3", layers=12)) as file:
        return ModelSpec.from_gguf(file)


def load(
    path: Path, target: ModelSpec, message: str, kind: type[BoughError] = ModelFileError, **options
) -> None:
    with pytest.raises(kind, match=message):
        DFlashDraft.load(path, target, **options)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "markov_head.gate.weight",
            "candidate_selector.successor_codebook",
            "layers.0.attention_conv.kernel_projection.weight",
        ),
        *("layers.0.self_attn.q_proj.bias", "layers.3.mlp.up_proj.weight", "layers.00.mlp.up_proj.weight"),
        *("fc_layernorm.0.weight", "layers.0.self_attn.sinks", "prefix_gru.weight_ih_l0", "fc.bias"),
    ],
)
def test_unknown_tensors(name: str, target: ModelSpec, tmp_path: Path) -> None:
    tensors = save_draft(tmp_path, draft_config(target)) | {name: torch.zeros(4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path, target, r"tensor '.*' is not part of a DFlash draft", UnsupportedModel)


def test_a_sharded_checkpoint(target: ModelSpec, tmp_path: Path) -> None:
    whole = save_draft(tmp_path, draft_config(target))
    one = DFlashDraft.load(tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    for number, part in ((1, names[::2]), (2, names[1::2])):
        save_file({name: whole[name] for name in part}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    for path in (tmp_path, tmp_path / "model-00001-of-00002.safetensors"):
        draft = DFlashDraft.load(path, target)
        assert torch.equal(draft._fuse.data, one._fuse.data)
        assert torch.equal(draft._norm, one._norm)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    load(
        tmp_path,
        target,
        "model-00002-of-00002.safetensors: no such file, needed all 2 shards",
        ModelNotFound,
    )
    load(
        tmp_path / "model-00001-of-00002.safetensors",
        target,
        "model-00002-of-00002.safetensors: no such file, needed all 2 shards",
        ModelNotFound,
    )


@pytest.mark.parametrize(
    "name", ["markov_w3", "blk.0.attn_conv_base", "blk.0.attn_q", "blk.3.attn_q", "fc_s"]
)
def test_unknown_gguf_tensors(name: str, target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target)
    path = tmp_path / "draft.gguf"
    with GGUFWriter(path, "dflash") as writer:
        for key, value in gguf_metadata(config).items():
            writer.add(key, value)
        writer.add_tensor(f"{name}.bias", (4,), QuantType.F32)
        writer.write_header()
        writer.write_tensor(f"{name}.bias", bytes(16))
    load(path, target, f"tensor '{name}.bias' is not part of a DFlash draft of 3 layers", UnsupportedModel)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", None, r"tensor fc.weight of shape \[64, 192\] is missing"),
        (
            "layers.2.mlp.down_proj.weight",
            None,
            r"tensor layers.2.mlp.down_proj.weight of shape \[64, 96\] is missing",
        ),
        ("fc.weight", torch.zeros(64, 320), r"tensor fc.weight has shape \[64, 320\], needed \[64, 192\]"),
        ("norm.weight", torch.zeros(32), r"tensor norm.weight has shape \[32\], needed \[64\]"),
        ("norm.weight", torch.tensor(1.0), r"tensor norm.weight has shape \[\], needed 1 or 2 dimensions"),
        ("norm.weight", torch.zeros(0), r"tensor norm.weight has shape \[0\], needed \[64\]"),
        (
            "norm.weight",
            torch.zeros(64, dtype=torch.float64),
            "norm.weight is of type F64, needed F32, F16, BF16",
        ),
        (
            "fc.weight",
            torch.zeros(64, 192, dtype=torch.float8_e4m3fn),
            "fc.weight is of type F8_E4M3, needed F32, F16, BF16",
        ),
        (
            "model.fc.weight",
            torch.zeros(64, 192),
            "tensor model.fc.weight is there as fc.weight too|as model.fc.weight",
        ),
        (
            "lm_head.weight",
            torch.zeros(32, 64),
            r"output.weight is \[32, 64\], needed the target's, \[320, 64\]",
        ),
    ],
)
def test_wrong_tensors(name: str, tensor: Any, message: str, target: ModelSpec, tmp_path: Path) -> None:
    tensors = save_draft(tmp_path, draft_config(target))
    tensors = {key: value for key, value in tensors.items() if key != name}
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path, target, message)


def test_a_gguf_file_of_an_old_config_has_the_usual_taps(target: ModelSpec, tmp_path: Path) -> None:
    depth = len(target.layers)
    config = draft_config(target) | {"target_layer_ids": default_taps(depth, 3), "num_hidden_layers": 3}
    keys = {name: value for name, value in gguf_metadata(config).items() if name != "dflash.target_layers"}
    path = save_gguf(tmp_path / "old.gguf", keys, draft_tensors(config))
    with open_draft(path, target) as (spec, _):
        assert list(spec.taps) == default_taps(depth, 3)


def test_wrong_gguf_tensors(target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target)
    tensors = draft_tensors(config)
    keys = gguf_metadata(config)
    path = save_gguf(tmp_path / "a.gguf", keys, {k: v for k, v in tensors.items() if k != "fc.weight"})
    load(path, target, r"tensor 'fc.weight' of shape \[64, 192\] is missing")
    path = save_gguf(tmp_path / "b.gguf", keys | {"dflash.target_layers": [2, 3]}, tensors)
    load(path, target, r"tensor 'fc.weight' has shape \[64, 192\], needed \[64, 128\]")


def test_damaged_weights_are_named(target: ModelSpec, tmp_path: Path) -> None:
    tensors = save_draft(tmp_path, draft_config(target))
    tensors["fc.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path, target, r"tensor fc.weight: weight \[3, 5\] of .* is nan", quant=QuantType.Q8_0)


def test_damaged_checkpoints(target: ModelSpec, tmp_path: Path) -> None:
    save_draft(tmp_path, draft_config(target))
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    data, text = weights.read_bytes(), config.read_text()
    for length in (0, 5, 300, len(data) - 1):
        weights.write_bytes(data[:length])
        load(tmp_path, target, "model.safetensors: not a readable safetensors file")
    weights.write_bytes(data)
    for broken in ("", "{", '{"a": }', "[" * 100_000, text[:-1], "\udcff"):
        config.write_text(broken, errors="surrogateescape")
        load(tmp_path, target, "config.json: not readable as JSON")
    config.write_text(json.dumps([1]))
    load(tmp_path, target, "config.json: holds list, needed an object")
    config.unlink()
    load(tmp_path, target, "config.json is missing", ModelNotFound)
    config.write_text(text)
    (tmp_path / "mask_embedding.pt").touch()
    load(tmp_path, target, "has mask_embedding.pt, needed one whose mask is a token", UnsupportedModel)


def test_missing_files(target: ModelSpec, tmp_path: Path) -> None:
    load(tmp_path / "none", target, "none: no such file", ModelNotFound)
    load(tmp_path / "none.gguf", target, "none.gguf: no such file", ModelNotFound)
    load(tmp_path, target, r"for a draft, or all shards of one, found 0 \(none\)", ModelNotFound)
    for name in "ab":
        (tmp_path / f"{name}.safetensors").touch()
    load(tmp_path, target, r"found 2 \(a.safetensors, b.safetensors\)", ModelNotFound)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sizes_that_the_weights_do_not_have(
    target: ModelSpec, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever passes as a number is held against the weights before it is used."""
    folder = tmp_path_factory.mktemp("draft")
    config = draft_config(target)
    save_draft(folder, config)
    keys = [
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ]
    sizes = st.one_of(st.integers(1, 100), st.integers(1, 2**30))
    changes = data.draw(st.dictionaries(st.sampled_from(keys), sizes, min_size=1, max_size=3))
    (folder / "config.json").write_text(json.dumps(config | changes))
    if all(config[key] == value for key, value in changes.items()):
        DFlashDraft.load(folder, target)
    else:
        load(folder, target, "needed|not part of|is missing", BoughError)
