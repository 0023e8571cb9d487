"""What the metadata of a file says, and what is refused, with the key and the value in the message."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.errors import BoughError, UnsupportedModel
from bough.gguf.header import ValueType
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.decoder import Decoder
from bough.models.spec import ExpertSpec, ModelSpec

QWEN35 = {
    "block_count": 8,
    "context_length": 1024,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 6,
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 8,
    "rope.freq_base": 1e7,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
    "full_attention_interval": 4,
}


def spec_of(folder: Path, architecture: str = "qwen35", **changes) -> ModelSpec:
    """A header with those keys; None leaves one out."""
    path = folder / "model.gguf"
    with GGUFWriter(path, architecture) as writer:
        for key, value in {**QWEN35, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
            if value is not None:
                kind = ValueType.BOOL if isinstance(value, list) and isinstance(value[0], bool) else None
                writer.add(f"{architecture}.{key}", value, kind)
        writer.add_tensor("token_embd.weight", (32, 64), QuantType.F32)
        writer.write_header()
        writer.write_tensor("token_embd.weight", bytes(32 * 64 * 4))
    with GGUFFile.open(path) as file:
        return ModelSpec.from_gguf(file)


def test_hybrid_layers(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert spec.layers == ("delta", "delta", "delta", "attention") * 2
    assert (spec.vocab_size, spec.tied_head, spec.mtp_layers) == (32, True, 0)
    assert spec.delta is not None and spec.delta.channels == (2 * 2 + 6) * 16
    # Per sequence and delta layer: six 16x16 matrices and three rows of 160 inputs, in float32.
    assert spec.recurrent_bytes() == 6 * 4 * (6 * 16 * 16 + 3 * 160)
    assert spec.kv_bytes_per_token(2 * spec.head_dim, 2 * spec.head_dim) == 2 * 2 * 32 * 2


def test_prediction_blocks_are_not_part_of_the_trunk(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, block_count=9, nextn_predict_layers=1)
    assert len(spec.layers) == 8 and spec.mtp_layers == 1


def test_recurrent_layers_override_the_interval(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, block_count=3, attention__recurrent_layers=[True, False, True])
    assert spec.layers == ("delta", "attention", "delta")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention__head_count_kv": [0, 0, 0, 1]},
            "qwen35.attention.head_count_kv is .* needed a single number",
        ),
        (
            {"attention__head_count_kv": 0},
            "attention.head_count_kv is 0, needed a divisor of attention.head_count .6",
        ),
        ({"attention__key_length": 0}, "attention.key_length is 0, needed a positive number"),
        (
            {"attention__head_count_kv": 4},
            "attention.head_count_kv is 4, needed a divisor of attention.head_count .6",
        ),
        (
            {"attention__value_length": 64},
            "attention.value_length is 64, needed the same as attention.key_length",
        ),
        ({"rope__dimension_count": 64}, "rope.dimension_count is 64, needed an even number up to"),
        ({"rope__scaling.type": "yarn"}, "rope.scaling.type is yarn, needed none or linear"),
        ({"ssm__inner_size": 95}, "ssm.inner_size is 95, needed time_step_rank times state_size .96"),
        ({"ssm__time_step_rank": 5}, "ssm.time_step_rank is 5, needed a multiple of ssm.group_count"),
        ({"ssm__v_head_reordered": False}, "ssm.v_head_reordered is False, needed true"),
        ({"nextn_predict_layers": 8}, "nextn_predict_layers is 8, needed fewer than qwen35.block_count"),
        ({"block_count": 100_000}, "block_count is 100000, needed at most 4096"),
        ({"embedding_length": 0}, "embedding_length is 0, needed a positive number"),
        ({"embedding_length": 96}, r"token_embd.weight has shape \[32, 64\], needed \[vocabulary, 96\]"),
        ({"expert_count": 4}, "expert_count is 4, needed 0"),
        (
            {"attention__layer_norm_rms_epsilon": -1.0},
            "layer_norm_rms_epsilon is -1.0, needed a positive number",
        ),
        ({"block_count": None}, "qwen35.block_count"),
        ({"block_count": "eight"}, "qwen35.block_count"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(BoughError, match=message) as caught:
        spec_of(tmp_path, **changes)
    assert "model.gguf" in caught.value.message


EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}


def test_experts_without_a_shared_one(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen3moe", **EXPERTS)
    assert spec.experts == ExpertSpec(count=8, used=2, width=32, shared_width=0) and spec.feed_forward == 0
    by_width = spec_of(tmp_path, "qwen3moe", **{**EXPERTS, "expert_feed_forward_length": None})
    assert by_width.experts == ExpertSpec(count=8, used=2, width=64, shared_width=0)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"expert_used_count": 9}, "at most expert_count"),
        ({"expert_weights_norm": False}, "renormalised"),
        ({"expert_gating_func": 2}, "1: a softmax"),
        ({"expert_weights_scale": 2.5}, "needed 1"),
        ({"expert_shared_feed_forward_length": 32}, "all routed"),
    ],
)
def test_other_experts_are_refused(tmp_path: Path, changes: dict, needed: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"qwen3moe.{next(iter(changes))} is .* {needed}"):
        spec_of(tmp_path, "qwen3moe", **{**EXPERTS, **changes})


@pytest.mark.parametrize(
    "architecture",
    ["gemma3", "gemma4", "gpt-oss", "nemotron_h_moe", "mistral3", "mistral4", "deepseek2", "glm4",
     "qwen3next", "qwen4exp", "phi3", "gemma-embedding", "dflash"],
)  # fmt: skip
def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path, architecture: str) -> None:
    message = f"general.architecture is '{architecture}', supported are qwen35"
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(tmp_path, architecture=architecture)


@pytest.mark.parametrize("extra", ["blk.0.attn_q.scale", "output.bias", "blk.0.ffn_down.bias"])
def test_a_tensor_that_nobody_knows_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, extra: str
) -> None:
    """Left out in silence it would mean another function than the file's."""
    path = tmp_path / "extra.gguf"
    with GGUFFile.open(tiny_model("qwen2")) as file, GGUFWriter(path, "qwen2") as writer:
        for key, value in file.metadata.items():
            if key.startswith("qwen2."):
                writer.add(key, value)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, info.type)
        writer.add_tensor(extra, (64,), QuantType.F32)
        writer.write_header()
        for info in file.tensors.values():
            writer.write_tensor(info.name, file.raw(info.name))
        writer.write_tensor(extra, bytes(256))
    read: list[int] = []
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedModel, match=extra):
        Decoder.load(file, progress=lambda done, total: read.append(done))
    assert not read, "refused before weights are read"


def test_prediction_blocks_are_left_out(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model(mtp=True)) as file:
        assert any("nextn" in name for name in file.tensors)
        assert Decoder.load(file).spec.mtp_layers == 1


def test_a_missing_tensor_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with GGUFFile.open(tiny_model()) as file, GGUFWriter(tmp_path / "broken.gguf", "qwen35") as writer:
        for key, value in file.metadata.items():
            if key.startswith("qwen35."):
                writer.add(key, value)
        kept = [info for info in file.tensors.values() if info.name != "blk.3.attn_q_norm.weight"]
        for info in kept:
            writer.add_tensor(info.name, info.shape, info.type)
        writer.write_header()
        for info in kept:
            writer.write_tensor(info.name, file.raw(info.name))
    read: list[int] = []
    with (
        GGUFFile.open(tmp_path / "broken.gguf") as file,
        pytest.raises(BoughError, match=r"broken.gguf.*blk.3.attn_q_norm.weight"),
    ):
        Decoder.load(file, progress=lambda done, total: read.append(done))
    assert not read, "refused before weights are read"
