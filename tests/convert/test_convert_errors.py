"""Folders that cannot be converted: one clear error each, and no output file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.convert.convert import convert
from bough.errors import BoughError, ModelFileError, ModelNotFound, UnsupportedModel, UsageError
from tests.convert.hf_models import build_hf, checkpoint, save_hf, save_tensors

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def built() -> tuple[Any, Any]:
    return build_hf("qwen3")


@pytest.fixture
def folder(built: tuple[Any, Any], tmp_path: Path) -> Path:
    return save_hf(*built, tmp_path / "hf")


def refused(folder: Path, error: type[BoughError], *parts: str, **options: Any) -> BoughError:
    output = folder.parent / "model.gguf"
    with pytest.raises(error) as caught:
        convert(folder, output, **{"mix": "f32", **options})
    assert type(caught.value) is error
    for part in parts:
        assert part in caught.value.message
    assert not list(folder.parent.glob("model.gguf*"))
    return caught.value


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def edit_tensors(
    folder: Path, built: tuple[Any, Any], change: Callable[[dict[str, torch.Tensor]], Any], shards: int = 1
) -> None:
    tensors = {name: tensor.clone() for name, tensor in checkpoint(*built).items()}
    change(tensors)
    save_tensors(tensors, folder, shards=shards)


def test_no_folder(tmp_path: Path):
    refused(tmp_path / "nowhere", ModelNotFound, "nowhere is not a folder")


def test_no_configuration(folder: Path):
    (folder / "config.json").unlink()
    refused(folder, ModelFileError, "hf has no config.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff"])
def test_a_damaged_configuration(text: str, folder: Path):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(folder, ModelFileError, "config.json")


def test_an_unknown_architecture(folder: Path):
    edit_config(folder, architectures=["MambaForCausalLM"])
    refused(
        folder, UnsupportedModel, "architecture MambaForCausalLM", "Qwen3_5ForCausalLM", "LlamaForCausalLM"
    )


def test_an_unknown_model_type_without_architecture(folder: Path):
    edit_config(folder, architectures=None, model_type="mamba")
    refused(folder, UnsupportedModel, "model_type mamba")


def test_a_known_model_type_is_enough(folder: Path):
    edit_config(folder, architectures=None)
    assert convert(folder, folder / "model.gguf", mix="f32").architecture == "qwen3"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_size": "absent"}, ModelFileError, "hidden_size is absent, needed: a positive whole number"),
        ({"num_hidden_layers": -3}, ModelFileError, "num_hidden_layers is -3"),
        ({"rms_norm_eps": "small"}, ModelFileError, 'rms_norm_eps is "small", needed: a positive number'),
        ({"tie_word_embeddings": 1}, ModelFileError, "tie_word_embeddings is 1, needed: true or false"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act gelu, needed: silu"),
        ({"use_sliding_window": True}, UnsupportedModel, "use_sliding_window true"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
            UnsupportedModel,
            "rope type yarn for qwen3, needed: default",
        ),
        ({"rope_parameters": {"rope_theta": "big"}}, ModelFileError, 'rope_theta is "big"'),
        ({"rope_parameters": [1]}, UnsupportedModel, "rope parameters [1], needed: an object"),
        ({"num_key_value_heads": 3}, UnsupportedModel, "4 attention heads, needed: a multiple of 3"),
        ({"head_dim": 31}, UnsupportedModel, "rope on 1.0 of 31"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModel, "weights quantised as awq"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "rope on 0.5 of 32, needed: on all of it"),
    ],
)
def test_configurations_we_cannot_convert(
    change: dict[str, Any], error: type[BoughError], message: str, folder: Path
):
    edit_config(folder, **change)
    refused(folder, error, "config.json", message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 6}, "irregular layer_types"),
        ({"linear_value_head_dim": 32}, "linear_value_head_dim 32, needed: 16"),
        ({"linear_num_value_heads": 5}, "5 linear value heads, needed: a multiple of 2"),
    ],
)
def test_hybrids_we_cannot_convert(change: dict[str, Any], message: str, tmp_path: Path):
    folder = save_hf(*build_hf("qwen35"), tmp_path / "hf")
    edit_config(folder, **change)
    refused(folder, UnsupportedModel, message)


def test_an_absent_tensor(folder: Path, built: tuple[Any, Any]):
    edit_tensors(folder, built, lambda tensors: tensors.pop(QUERY))
    refused(folder, ModelFileError, "1 of 36 tensors are absent", QUERY, "[128, 64]", "blk.1.attn_q.weight")


def test_a_misshapen_tensor(folder: Path, built: tuple[Any, Any]):
    edit_tensors(folder, built, lambda tensors: tensors.update({QUERY: torch.zeros(64, 64)}))
    refused(folder, ModelFileError, "model.safetensors", QUERY, "[64, 64]", "needed: [128, 64]")


def test_an_unknown_tensor(folder: Path, built: tuple[Any, Any]):
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}
    edit_tensors(folder, built, lambda tensors: tensors.update(extra))
    refused(folder, UnsupportedModel, "self_attn.q_proj.bias of shape [128] is not a tensor of qwen3")


def test_old_rotary_buffers_are_dropped(folder: Path, built: tuple[Any, Any]):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, built, lambda tensors: tensors.update({name: torch.zeros(16)}))
    assert convert(folder, folder / "model.gguf", mix="f32").dropped == (name,)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("mix", ["f32", "q8_0", "q4_k_m"])
def test_weights_that_are_no_numbers(value: float, mix: str, folder: Path, built: tuple[Any, Any]):
    edit_tensors(folder, built, lambda tensors: tensors[QUERY][5].fill_(value))
    refused(folder, ModelFileError, QUERY, "blk.1.attn_q.weight", str(value), mix=mix)


def test_weights_too_large_for_half_precision(folder: Path, built: tuple[Any, Any]):
    edit_tensors(folder, built, lambda tensors: tensors[QUERY][5].fill_(1e6))
    with pytest.raises(BoughError, match=r"q_proj\.weight, for blk\.1\.attn_q\.weight: .*1e\+06"):
        convert(folder, folder.parent / "model.gguf", mix="f16")


def test_integers_are_not_weights(folder: Path, built: tuple[Any, Any]):
    edit_tensors(
        folder, built, lambda tensors: tensors.update({QUERY: torch.zeros(128, 64, dtype=torch.int8)})
    )
    refused(folder, UnsupportedModel, QUERY, "dtype I8, needed: BF16, F16, F32")


def test_no_weights(folder: Path):
    (folder / "model.safetensors").unlink()
    refused(folder, ModelFileError, "hf has no weights, needed: model.safetensors")
    (folder / "pytorch_model.bin").touch()
    refused(folder, ModelFileError, "hf has pytorch_model.bin")


def test_a_cut_file(folder: Path):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(folder, ModelFileError, "model.safetensors cannot be read as safetensors")


def test_an_absent_shard(folder: Path, built: tuple[Any, Any]):
    edit_tensors(folder, built, lambda tensors: None, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, ModelFileError, "model-00002-of-00003.safetensors is absent, but")


def test_an_index_that_does_not_match(folder: Path, built: tuple[Any, Any]):
    edit_tensors(folder, built, lambda tensors: None, shards=2)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    index.write_text(
        json.dumps({"weight_map": {**listed, "more.weight": "model-00001-of-00002.safetensors"}})
    )
    refused(folder, ModelFileError, "tensor more.weight is not in the file")
    index.write_text(json.dumps({"weight_map": {QUERY: "../model.safetensors"}}))
    refused(folder, ModelFileError, "'../model.safetensors', needed: a file name")


def test_no_tokenizer(folder: Path):
    (folder / "tokenizer.json").unlink()
    refused(folder, ModelFileError, "has no tokenizer.json")


def test_an_unknown_mix_and_an_absent_folder(folder: Path):
    refused(folder, UsageError, "mix is 'q4'", mix="q4")
    with pytest.raises(UsageError):
        convert(folder, folder / "nowhere" / "model.gguf", mix="f32")


def test_a_failure_half_way_leaves_the_old_file(folder: Path):
    output = folder.parent / "model.gguf"
    output.write_bytes(b"before")

    def stop(name: str, done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, output, mix="f32", progress=stop)
    assert output.read_bytes() == b"before"
    assert [path.name for path in folder.parent.iterdir() if path.is_file()] == ["model.gguf"]
