"""Tiny random models: readable by the gguf package, deterministic and well-formed."""

from pathlib import Path

import jinja2
import numpy as np
import pytest
from tokenizers import models, pre_tokenizers

from bough.errors import ModelFileError, UnsupportedModel, UsageError
from tests.convert.gguf_package import read_keys, read_tensors, read_types
from workshop.tiny import CHAT_TEMPLATE, FAMILIES, VOCABULARY, make_tiny

TENSORS = {"qwen35": 109, "qwen35moe": 76, "qwen3moe": 51, "qwen3": 47, "qwen2": 51, "llama": 39}
TENSORS["muse-glimmer"] = 3 + 8 * 14  # no other has as many in a layer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mix", ["f32", "q4_k_m"])
def test_every_family_is_readable(family: str, mix: str, tmp_path: Path):
    path = make_tiny(tmp_path / "tiny.gguf", family=family, mix=mix)
    keys, tensors = read_keys(path), read_tensors(path)
    assert keys["general.architecture"] == family
    assert len(tensors) == TENSORS[family]
    assert tensors["token_embd.weight"].shape == (VOCABULARY, 64)
    for name, values in tensors.items():
        constant = family == "muse-glimmer" and name.endswith(("attn_q_norm.weight", "attn_k_norm.weight"))
        assert np.isfinite(values).all() and (values.std() > 0) is not constant, name
    for name in ("blk.0.attn_norm.weight", "blk.0.ssm_norm.weight"):
        if name in tensors:
            assert abs(tensors[name].mean() - 1) < 0.2
    if family.startswith("qwen35"):
        assert (tensors["blk.0.ssm_a"] < 0).all()


def test_the_default_has_the_hybrids_shape(tmp_path: Path):
    path = make_tiny(tmp_path / "tiny.gguf")
    keys, types = read_keys(path), read_types(path)
    assert sum(name.endswith("attn_q.weight") for name in types) == 2
    assert sum(name.endswith("ssm_out.weight") for name in types) == 6
    assert (keys["qwen35.ssm.group_count"], keys["qwen35.ssm.time_step_rank"]) == (2, 6)
    assert (keys["qwen35.attention.key_length"], keys["qwen35.rope.dimension_count"]) == (32, 8)
    assert keys["qwen35.feed_forward_length"] == 128


def test_a_seed_is_a_model(tmp_path: Path):
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    make_tiny(first, seed=7)
    make_tiny(again, seed=7)
    make_tiny(other, seed=8)
    assert first.read_bytes() == again.read_bytes()
    ours, theirs = read_tensors(first), read_tensors(other)
    assert not any(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_depth_width_tie_and_prediction_layer(tmp_path: Path):
    path = make_tiny(tmp_path / "a.gguf", layers=12, width=256, tied=True, mix="q4_k_m", mtp=True)
    keys, types = read_keys(path), read_types(path)
    assert (keys["qwen35.block_count"], keys["qwen35.nextn_predict_layers"]) == (13, 1)
    assert "output.weight" not in types and types["token_embd.weight"] == "Q6_K"
    assert "blk.12.nextn.eh_proj.weight" in types
    assert {"Q4_K", "Q6_K", "Q8_0", "F32"} <= set(types.values())


def test_the_vocabulary_is_a_working_byte_level_bpe(tmp_path: Path):
    keys = read_keys(make_tiny(tmp_path / "tiny.gguf"))
    tokens, merges = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.merges"]
    types = keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(set(tokens)) == len(types) == VOCABULARY
    assert sorted(tokens[:256]) == sorted(pre_tokenizers.ByteLevel.alphabet())
    # the library refuses merges whose parts or results are no tokens
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges])
    assert [piece.value for piece in bpe.tokenize("ĠtheĠring")] == ["Ġthe", "Ġ", "r", "ing"]
    for token in tokens[: types.index(3)]:
        assert [piece.value for piece in bpe.tokenize(token)] == [token]
    controls = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    assert controls == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [token for token, kind in zip(tokens, types, strict=True) if kind == 4] == ["<think>", "</think>"]
    assert tokens[keys["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert [tokens[i] for i in keys["tokenizer.ggml.eos_token_ids"]] == ["<|im_end|>", "<|endoftext|>"]
    assert keys["tokenizer.ggml.pre"] == "qwen35"


@pytest.mark.parametrize(
    ("thinking", "tail"), [({}, "<think>\n"), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")]
)
def test_the_chat_template(thinking: dict[str, bool], tail: str):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    template = jinja2.Template(CHAT_TEMPLATE)
    text = template.render(messages=messages, add_generation_prompt=True, **thinking)
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert text == turns + "<|im_start|>assistant\n" + tail
    assert template.render(messages=messages, add_generation_prompt=False) == turns


def test_invalid_arguments(tmp_path: Path):
    with pytest.raises(UsageError, match="family is 'gpt2', needed: one of qwen35, qwen35moe"):
        make_tiny(tmp_path / "tiny.gguf", family="gpt2")
    with pytest.raises(ModelFileError, match="num_hidden_layers is 0"):
        make_tiny(tmp_path / "tiny.gguf", layers=0)
    with pytest.raises(UsageError, match="mix is 'q3'"):
        make_tiny(tmp_path / "tiny.gguf", mix="q3")
    with pytest.raises(UnsupportedModel, match="1 prediction layers in llama"):
        make_tiny(tmp_path / "tiny.gguf", family="llama", mtp=True)
    assert not list(tmp_path.iterdir())
