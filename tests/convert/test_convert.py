"""Converted folders, read back by the gguf package and compared with expected.py."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bough.convert.convert import convert, model_name
from bough.gguf.types import QuantType
from tests.convert.expected import expected_tensors
from tests.convert.gguf_package import read_key_types, read_keys, read_tensors, read_types
from tests.convert.hf_models import FAMILIES, build_hf, checkpoint, save_hf, save_tensors

HYBRID = ("qwen35", "qwen35moe")


def assert_tensors(path: Path, expected: dict[str, np.ndarray]) -> None:
    found = read_tensors(path)
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        # exp() of a whole tensor and of one head may round differently
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=0, err_msg=name)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama3"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_tensors_are_rewritten(family: str, tie: bool, tmp_path: Path):
    model, config = build_hf(family, seed=3, tie=tie)
    mtp = family in HYBRID
    save_hf(model, config, tmp_path / "hf", mtp=mtp)
    report = convert(tmp_path / "hf", tmp_path / "model.gguf", mix="f32")
    assert_tensors(
        tmp_path / "model.gguf", expected_tensors(checkpoint(model, config, mtp=mtp), config, family)
    )
    assert report.types == {QuantType.F32: report.tensors}
    assert report.bytes == (tmp_path / "model.gguf").stat().st_size
    assert not report.fallbacks and not report.dropped


def test_llama3_scaling_becomes_a_tensor_of_factors(tmp_path: Path):
    model, config = build_hf("llama3")
    save_hf(model, config, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "model.gguf", mix="f32")
    expected = expected_tensors(checkpoint(model, config), config, "llama3")
    # transformers' rotary buffer holds the frequencies after scaling
    plain = 1 / 10000.0 ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    expected["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    assert len(set(expected["rope_freqs.weight"].round(3))) > 3
    found = read_tensors(tmp_path / "model.gguf")
    np.testing.assert_allclose(found["rope_freqs.weight"], expected["rope_freqs.weight"], rtol=1e-5)
    assert sorted(found) == sorted(expected)


def test_multimodal_checkpoints_lose_only_their_vision_tower(tmp_path: Path):
    model, config = build_hf("qwen35", seed=4)
    save_hf(model, config, tmp_path / "hf", mtp=True, multimodal=True)
    report = convert(tmp_path / "hf", tmp_path / "model.gguf", mix="f32")
    expected = expected_tensors(checkpoint(model, config, mtp=True), config, "qwen35")
    assert_tensors(tmp_path / "model.gguf", expected)
    assert report.dropped == ("model.visual.patch_embed.proj.weight",)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_shards_of_half_precision(dtype: torch.dtype, tmp_path: Path):
    model, config = build_hf("qwen35moe", seed=5)
    save_hf(model, config, tmp_path / "hf", dtype=dtype, shards=3)
    convert(tmp_path / "hf", tmp_path / "model.gguf", mix="f32")
    rounded = {name: tensor.to(dtype) for name, tensor in checkpoint(model, config).items()}
    assert_tensors(tmp_path / "model.gguf", expected_tensors(rounded, config, "qwen35moe"))


@pytest.mark.parametrize("family", ["qwen35moe", "qwen3moe"])
def test_experts_may_be_separate_tensors(family: str, tmp_path: Path):
    model, config = build_hf(family, seed=6)
    save_hf(model, config, tmp_path / "hf")
    stacked = checkpoint(model, config)
    apart = {}
    for name, tensor in stacked.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for i, both in enumerate(tensor):
                gate, up = both.chunk(2)
                apart[f"{prefix}.{i}.gate_proj.weight"] = gate.contiguous()
                apart[f"{prefix}.{i}.up_proj.weight"] = up.contiguous()
        elif last == "down_proj":
            apart |= {f"{prefix}.{i}.down_proj.weight": one.contiguous() for i, one in enumerate(tensor)}
        else:
            apart[name] = tensor
    save_tensors(apart, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "model.gguf", mix="f32")
    assert_tensors(tmp_path / "model.gguf", expected_tensors(stacked, config, family))


COMMON_KEYS = {
    "context_length": 512,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
}
HYBRID_KEYS = {
    **COMMON_KEYS,
    "rope.freq_base": 1e7,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
    "full_attention_interval": 4,
    "nextn_predict_layers": 1,
}
KEYS = {
    "qwen35": {**HYBRID_KEYS, "block_count": 9, "feed_forward_length": 96},
    "qwen35moe": {
        **HYBRID_KEYS,
        "block_count": 5,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 40,
    },
    "qwen3": {**COMMON_KEYS, "block_count": 3, "feed_forward_length": 96, "rope.freq_base": 1e6},
    "qwen3moe": {
        **COMMON_KEYS,
        "block_count": 3,
        "rope.freq_base": 1e6,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
    },
    "qwen2": {
        **COMMON_KEYS,
        "block_count": 3,
        "feed_forward_length": 96,
        "rope.freq_base": 1e6,
        "attention.key_length": 16,
        "attention.value_length": 16,
    },
    "llama": {
        **COMMON_KEYS,
        "block_count": 3,
        "feed_forward_length": 96,
        "rope.freq_base": 5e5,
        "rope.dimension_count": 32,
        "vocab_size": 320,
    },
}


@pytest.mark.parametrize("family", KEYS)
def test_architecture_keys(family: str, tmp_path: Path):
    model, config = build_hf(family)
    save_hf(model, config, tmp_path / "A Model", mtp=family in HYBRID)
    path = tmp_path / "model.gguf"
    convert(tmp_path / "A Model", path, mix="f32")
    keys, types = read_keys(path), read_key_types(path)
    found = {key.removeprefix(f"{family}."): keys[key] for key in keys if key.startswith(f"{family}.")}
    assert found == KEYS[family]
    floats = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
    for key in KEYS[family]:
        expected = "FLOAT32" if key in floats else "UINT32"
        if key == "rope.dimension_sections":
            assert types[f"{family}.{key}"] == ("ARRAY", "INT32")
        else:
            assert types[f"{family}.{key}"] == (expected,)
    assert keys["general.architecture"] == family
    assert keys["general.type"] == "model"
    assert keys["general.name"] == "A Model"
    assert keys["general.quantization_version"] == 2


def test_recommended_sampling_is_kept(tmp_path: Path):
    model, config = build_hf("qwen2")
    save_hf(model, config, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 1, "top_k": 20, "top_p": 0.95}')
    convert(tmp_path, tmp_path / "model.gguf", mix="f32")
    keys, types = read_keys(tmp_path / "model.gguf"), read_key_types(tmp_path / "model.gguf")
    assert keys["general.sampling.temp"] == 1.0 and types["general.sampling.temp"] == ("FLOAT32",)
    assert keys["general.sampling.top_k"] == 20 and types["general.sampling.top_k"] == ("INT32",)
    assert math.isclose(keys["general.sampling.top_p"], 0.95, rel_tol=1e-6)
    assert "general.sampling.min_p" not in keys


@pytest.mark.parametrize(("mix", "file_type"), [("f32", 0), ("f16", 1), ("q8_0", 7), ("q4_k_m", 15)])
def test_mixes_keep_the_values(mix: str, file_type: int, tmp_path: Path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}
    model, config = build_hf("qwen35", seed=8, **sizes, **heads)
    save_hf(model, config, tmp_path / "hf")
    path = tmp_path / "model.gguf"
    seen: list[tuple[str, int, int]] = []
    report = convert(tmp_path / "hf", path, mix=mix, progress=lambda *step: seen.append(step))
    assert read_keys(path)["general.file_type"] == file_type
    assert not report.fallbacks
    expected = expected_tensors(checkpoint(model, config), config, "qwen35")
    found = read_tensors(path)
    # relative RMS error that rounding normal random weights to each type may cost
    limits = {"F32": 1e-6, "F16": 1e-3, "Q8_0": 0.01, "Q6_K": 0.03, "Q5_K": 0.05, "Q4_K": 0.1}
    types = read_types(path)
    for name, values in expected.items():
        error = np.sqrt(np.mean((found[name] - values) ** 2) / np.mean(values**2))
        assert error < limits[types[name]], (name, types[name], error)
    assert [done for _, done, _ in seen] == list(range(1, len(expected) + 1))
    assert {total for _, _, total in seen} == {len(expected)} == {report.tensors}
    assert {name for name, _, _ in seen} == set(expected)


def test_short_rows_fall_back(tmp_path: Path):
    model, config = build_hf("qwen35moe")
    save_hf(model, config, tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "model.gguf")
    types = read_types(tmp_path / "model.gguf")
    used = {fallback.name: (fallback.wanted, fallback.used) for fallback in report.fallbacks}
    assert used["blk.0.ffn_gate_exps.weight"] == (QuantType.Q4_K, QuantType.Q8_0)
    # rows of 40 weights: no block of 32 divides them
    assert used["blk.0.ffn_down_shexp.weight"] == (QuantType.Q4_K, QuantType.F16)
    assert "blk.0.ssm_alpha.weight" not in used
    assert all(types[name] == kind.name for name, (_, kind) in used.items())
    assert sum(report.types.values()) == report.tensors == len(types)


def test_a_tied_head_that_was_saved_too_is_dropped(tmp_path: Path):
    model, config = build_hf("qwen3", tie=True)
    save_hf(model, config, tmp_path)
    tensors = checkpoint(model, config)
    save_tensors({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path)
    report = convert(tmp_path, tmp_path / "model.gguf", mix="f32")
    assert report.dropped == ("lm_head.weight",)
    assert "output.weight" not in read_types(tmp_path / "model.gguf")


def test_a_folder_without_tokenizer_when_asked_for(tmp_path: Path):
    model, config = build_hf("qwen35")
    save_hf(model, config, tmp_path, with_tokenizer=False)
    convert(tmp_path, tmp_path / "model.gguf", mix="f32", vocabulary=False)
    keys = read_keys(tmp_path / "model.gguf")
    assert keys["tokenizer.ggml.model"] == "no_vocab"
    assert keys["qwen35.vocab_size"] == 320


def test_snapshots_of_the_hub_are_named_after_their_repository(tmp_path: Path):
    assert model_name(tmp_path / "Qwen3.5-27B") == "Qwen3.5-27B"
    assert model_name(tmp_path / "models--Qwen--Qwen3.5-27B" / "snapshots" / "0a1b") == "Qwen3.5-27B"
