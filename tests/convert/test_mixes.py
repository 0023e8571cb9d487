"""The type of each tensor, on the names and shapes of published models."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.convert.checkpoint import HFConfig
from bough.convert.families import read_sizes
from bough.convert.mixes import FILE_TYPES, check_mix, fitting_type, tensor_type
from bough.convert.rules import Rule, tensor_rules
from bough.errors import UsageError
from bough.gguf.types import QuantType

QWEN35_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_parameters": {"rope_theta": 10000000, "mrope_section": [11, 11, 10]},
        "tie_word_embeddings": False,
    },
}
# The published Q4_K_M of Qwen3.5-27B, header included.
PUBLISHED_BYTES = 16_740_812_160


def rules_of(config: dict[str, Any], *, mtp_layers: int = 0) -> list[Rule]:
    return tensor_rules(read_sizes(HFConfig(config, "config.json"), mtp_layers=mtp_layers))


def types_of(rules: list[Rule], **options: Any) -> dict[str, QuantType]:
    return {rule.name: tensor_type(rule.name, rule.shape, **options) for rule in rules}


@pytest.fixture(scope="module")
def rules() -> list[Rule]:
    return rules_of(QWEN35_27B)


def test_27b_has_the_published_number_of_tensors(rules: list[Rule]):
    assert len(rules) == 851
    assert len(rules_of(QWEN35_27B, mtp_layers=1)) == 866


def test_27b_q4_k_m_is_the_published_map(rules: list[Rule]):
    types = types_of(rules, mix="q4_k_m", layers=64, interval=4)

    def count(stem: str) -> dict[QuantType, int]:
        return Counter(kind for name, kind in types.items() if name.split(".", 2)[-1] == f"{stem}.weight")

    assert count("ffn_down") == {QuantType.Q6_K: 32, QuantType.Q4_K: 32}
    assert count("attn_v") == {QuantType.Q6_K: 10, QuantType.Q4_K: 6}
    for stem in ("ffn_gate", "ffn_up"):
        assert count(stem) == {QuantType.Q4_K: 64}
    for stem in ("attn_q", "attn_k", "attn_output"):
        assert count(stem) == {QuantType.Q4_K: 16}
    assert count("attn_gate") == {QuantType.Q4_K: 48}
    assert count("attn_qkv") == count("ssm_out") == {QuantType.Q5_K: 48}
    assert count("ssm_alpha") == count("ssm_beta") == {QuantType.Q8_0: 48}
    assert types["output.weight"] is QuantType.Q6_K
    assert types["token_embd.weight"] is QuantType.Q4_K
    floats = [name for name, kind in types.items() if kind is QuantType.F32]
    assert all("norm" in name or name.split(".", 2)[2].startswith("ssm_") for name in floats)
    size = sum(types[rule.name].row_bytes(rule.shape[-1]) * _rows(rule.shape) for rule in rules)
    # what is left of the file is its header: 248320 tokens and 247587 merges
    assert 10_000_000 < PUBLISHED_BYTES - size < 12_000_000


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def test_a_tied_embedding_is_as_precise_as_a_head():
    options = {"mix": "q4_k_m", "layers": 36}
    assert tensor_type("token_embd.weight", (1000, 2560), tied=True, **options) is QuantType.Q6_K
    assert tensor_type("token_embd.weight", (1000, 2560), tied=False, **options) is QuantType.Q4_K


def test_dense_models_follow_the_same_rules():
    options = {"mix": "q4_k_m", "layers": 32}
    more = [
        i for i in range(32) if tensor_type(f"blk.{i}.attn_v.weight", (512, 4096), **options).name == "Q6_K"
    ]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    down = [
        i
        for i in range(32)
        if tensor_type(f"blk.{i}.ffn_down.weight", (4096, 11008), **options).name == "Q6_K"
    ]
    assert down == more
    assert tensor_type("blk.0.attn_q.bias", (4096,), **options) is QuantType.F32
    assert tensor_type("rope_freqs.weight", (64,), **options) is QuantType.F32


def test_experts_are_feed_forward_tensors():
    options = {"mix": "q4_k_m", "layers": 40, "interval": 4}
    assert tensor_type("blk.0.ffn_down_exps.weight", (256, 2048, 512), **options) is QuantType.Q6_K
    assert tensor_type("blk.6.ffn_down_exps.weight", (256, 2048, 512), **options) is QuantType.Q4_K
    assert tensor_type("blk.0.ffn_up_exps.weight", (256, 512, 2048), **options) is QuantType.Q4_K
    assert tensor_type("blk.0.ffn_gate_inp.weight", (256, 2048), **options) is QuantType.F32
    assert tensor_type("blk.0.ffn_gate_inp_shexp.weight", (2048,), **options) is QuantType.F32


@pytest.mark.parametrize(("mix", "kind"), [("f32", "F32"), ("f16", "F16"), ("q8_0", "Q8_0")])
def test_flat_mixes_leave_the_sensitive_tensors_alone(mix: str, kind: str, rules: list[Rule]):
    types = types_of(rules, mix=mix, layers=64, interval=4)
    assert {
        types[name].name for name in ("token_embd.weight", "blk.0.ssm_alpha.weight", "output.weight")
    } == {kind}
    assert types["blk.0.ssm_conv1d.weight"] is types["blk.3.attn_q_norm.weight"] is QuantType.F32


@given(row=st.integers(1, 5000), wanted=st.sampled_from([QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0]))
def test_a_fallback_always_divides_the_row(row: int, wanted: QuantType):
    kind = fitting_type(wanted, row)
    assert row % kind.block_elements == 0
    assert (kind is wanted) == (row % wanted.block_elements == 0)
    assert kind.bits_per_weight >= wanted.bits_per_weight


def test_unknown_mixes_are_refused():
    with pytest.raises(UsageError, match="mix is 'q5_k_m', needed: one of f32, f16, q8_0, q4_k_m"):
        check_mix("q5_k_m")
    for mix in FILE_TYPES:
        check_mix(mix)
