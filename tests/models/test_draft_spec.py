"""What a draft's files say, and what is refused, with the value seen and the value needed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.errors import BoughError, ModelFileError, UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.draft_spec import DraftSpec
from bough.models.spec import ModelSpec
from tests.tiny_draft import draft_config, gguf_metadata, save_draft, save_gguf

SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 13}


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> ModelSpec:
    with GGUFFile.open(tiny_model("qwen3", layers=12)) as file:
        return ModelSpec.from_gguf(file)


def read(config: dict[str, Any], target: ModelSpec) -> DraftSpec:
    spec = DraftSpec.from_config(config, source="draft", target_depth=len(target.layers))
    spec.check_target(target)
    return spec


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("nested", [False, True])
def test_both_generations_say_the_same(nested: bool, target: ModelSpec) -> None:
    config = draft_config(target, nested=nested, taps=[1, 5, 9], method={"block_size": 8}, **SLIDING)
    assert read(config, target) == DraftSpec(
        source="draft",
        layers=("sliding", "sliding", "full"),
        causal=(True, True, False),
        window=13,
        width=64,
        feed_forward=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rope_theta=1e6,
        eps=1e-6,
        block_size=8,
        taps=(1, 5, 9),
        mask_id=target.vocab_size - 1,
        vocab_size=target.vocab_size,
    )


def test_equal_rope_settings_of_all_kinds_of_layers(target: ModelSpec) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6}
    both = {"full_attention": rope, "sliding_attention": dict(rope)}
    assert read(draft_config(target, nested=True) | {"rope_parameters": both}, target).rope_theta == 5e6


def test_nested_settings_come_first(target: ModelSpec) -> None:
    config = draft_config(target, nested=True, block_size=4, mask_token_id=3, rope_theta=5.0)
    spec = read(config, target)
    assert (spec.block_size, spec.mask_id, spec.rope_theta) == (16, target.vocab_size - 1, 1e6)
    config["dflash_config"] |= {"block_size": None, "mask_token_id": None}
    spec = read(config, target)
    assert (spec.block_size, spec.mask_id) == (4, 3)


@pytest.mark.parametrize(
    ("absent", "attribute", "value"),
    [
        ("target_layer_ids", "taps", (1, 5, 9)),
        ("block_size", "block_size", 16),
        ("head_dim", "head_dim", 16),
        ("num_key_value_heads", "kv_heads", 4),
        ("rms_norm_eps", "eps", 1e-6),
        ("rope_theta", "rope_theta", 10000.0),
        ("vocab_size", "vocab_size", None),
        ("architectures", "layers", ("full",) * 3),
    ],
)
def test_what_may_be_absent(absent: str, attribute: str, value: object, target: ModelSpec) -> None:
    config = draft_config(target, method={"block_size": 5})
    assert getattr(read(without(config, absent), target), attribute) == value
    assert getattr(read(config | {absent: None}, target), attribute) == value


def test_layers_without_a_list(target: ModelSpec) -> None:
    """As transformers fills it in: a window alone does not make a layer slide."""
    config = draft_config(target, sliding_window=13, use_sliding_window=True)
    assert read(config, target).layers == ("full",) * 3
    assert read(config | {"max_window_layers": 1}, target).layers == ("full", "sliding", "sliding")
    assert (
        read(config | {"max_window_layers": 1, "use_sliding_window": False}, target).layers == ("full",) * 3
    )


@pytest.mark.parametrize(
    ("said", "causal"),
    [
        ({}, (True, True, False)),
        ({"is_causal": True}, (True, True, True)),
        ({"is_causal": False}, (False, False, False)),
        ({"dflash_config": {"causal": False}}, (False, False, False)),
        ({"is_causal": True, "dflash_config": {"causal": False}}, (True, True, True)),
        ({"is_causal": None, "dflash_config": {"causal": False}}, (False, False, False)),
        ({"dflash_config": {"causal_head": True}}, (True, True, True)),
        ({"dflash_config": {"causal_head": False}}, (False, False, False)),
        ({"is_causal": False, "dflash_config": {"causal_head": True}}, (False, False, False)),
    ],
)
def test_causality(said: dict[str, Any], causal: tuple[bool, ...], target: ModelSpec) -> None:
    assert read(draft_config(target, **SLIDING) | said, target).causal == causal


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"dflash_config": {"block_order": "reversed"}}, ["block_order"]),
        ({"lattice_width": 3, "gated": True}, ["gated", "lattice_width"]),
        # What is off, of training, or known to change nothing.
        ({"lattice_width": None, "gated": False, "training_steps": 5, "torch_dtype": "bfloat16"}, []),
    ],
)
def test_unknown_settings_are_named(
    settings: dict[str, Any], names: list[str], target: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"the file {id(settings)}"  # named once for each file
    for _ in range(2):
        DraftSpec.from_config(draft_config(target) | settings, source=source, target_depth=12)
    warned = [record.message for record in caplog.records if source in record.message]
    assert len(warned) == bool(names)
    for text in warned:
        assert ", ".join(map(repr, names)) in text


def test_unknown_settings_of_gguf_files_are_named(
    target: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = draft_config(target)
    keys = gguf_metadata(config) | {"dflash.lattice_width": 3}
    with GGUFFile.open(save_gguf(tmp_path / "draft.gguf", keys, save_draft(tmp_path, config))) as file:
        DraftSpec.from_gguf(file)
    assert [text for text in caplog.messages if "'dflash.lattice_width'" in text]
    with GGUFFile.open(save_gguf(tmp_path / "plain.gguf", gguf_metadata(config), {})) as file:
        DraftSpec.from_gguf(file)
    assert not [text for text in caplog.messages if "plain.gguf" in text]


HUGE = 10**400
REFUSED: list[tuple[dict[str, Any], str]] = [
    # another target
    ({"hidden_size": 128}, "hidden_size is 128, needed the target's width, 64"),
    ({"target_layer_ids": [1, 12]}, r"target_layer_ids is \[1, 12\], needed layers of the target, 0 to 11"),
    ({"vocab_size": 999}, "vocab_size is 999, needed the rows of the target's embedding, 320"),
    (
        {"draft_vocab_size": 32},
        "draft_vocab_size is 32, needed the rows of the target's embedding, 320, or a",
    ),
    ({"mask_token_id": 320}, "mask_token_id is 320, needed a row of the target's embedding, 0 to 319"),
    # another kind of draft
    (
        {"architectures": ["EagleDraftModel"]},
        "architectures is 'EagleDraftModel', needed 'DFlashDraftModel' or 'DFlash2DraftModel'",
    ),
    (
        {"architectures": ["Qwen3ForCausalLM"]},
        "architectures is 'Qwen3ForCausalLM', needed 'DFlashDraftModel'",
    ),
    ({"architectures": "DFlashDraftModel"}, "architectures is 'DFlashDraftModel', needed"),
    ({"architectures": [7]}, "architectures is 7, needed"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 32}},
        "rope_scaling: rope_type is 'yarn', needed 'default'",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: rope_type is 'linear', needed 'default'"),
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn"}},
        "rope_scaling: rope_type is 'yarn', needed 'default'",
    ),
    (
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e4},
                "sliding_attention": {"rope_theta": 1e6},
            }
        },
        "rope_parameters is .*, needed one for",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "rope_theta": 1e4}},
        "rope_parameters is .*, needed one for",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "rope_parameters: rope_type is 'yarn', needed 'default'",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters is .*0.25.*, needed one for"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, needed 1.0"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', needed 'silu'"),
    ({"dflash_config": {"use_swa": True}}, "use_swa is True, needed False"),
    ({"dflash_config": {"shift_label": True}}, "shift_label is True, needed False"),
    (
        {"target_layer_ids": None, "aux_hidden_state_layer_ids": [0, 3]},
        r"aux_hidden_state_layer_ids is \[0, 3\], needed 1 to 256 whole numbers from 1",
    ),
    # sizes
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, needed a whole number from 1 to 256"),
    ({"num_hidden_layers": HUGE}, r"num_hidden_layers is 10+\.\.\.0+, needed a whole number from 1 to 256"),
    ({"num_hidden_layers": 3.0}, "num_hidden_layers is 3.0, needed a whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True, needed a whole number"),
    ({"hidden_size": "64"}, "hidden_size is '64', needed a whole number"),
    ({"hidden_size": -64}, "hidden_size is -64, needed a whole number from 1"),
    ({"intermediate_size": 0}, "intermediate_size is 0, needed a whole number from 1"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0, needed a whole number from 1"),
    ({"num_attention_heads": None}, "num_attention_heads is missing, needed a whole number from 1"),
    ({"num_attention_heads": 65, "head_dim": None}, "head_dim is missing, needed a whole number from 1"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0, needed a whole number from 1"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4, needed a multiple of 3"),
    ({"head_dim": 0}, "head_dim is 0, needed a whole number from 1"),
    ({"head_dim": 15}, "head_dim is 15, needed an even number"),
    ({"block_size": 1}, "block_size is 1, needed between 2 and 64"),
    ({"block_size": 65}, "block_size is 65, needed between 2 and 64"),
    ({"block_size": "16"}, "block_size is '16', needed a whole number"),
    ({"mask_token_id": None}, "mask_token_id is missing, needed a whole number from 0"),
    ({"mask_token_id": -1}, "mask_token_id is -1, needed a whole number from 0"),
    ({"mask_token_id": [1]}, r"mask_token_id is \[1\], needed a whole number"),
    ({"vocab_size": 0}, "vocab_size is 0, needed a whole number from 1"),
    # layers
    ({"layer_types": ["full_attention"] * 2}, "layer_types is .*, needed a list of 3"),
    ({"layer_types": []}, r"layer_types is \[\], needed a list of 3"),
    ({"layer_types": "full"}, "layer_types is 'full', needed a list of 3"),
    ({"layer_types": [["full_attention"]] * 3}, "layer_types is .*, needed a list of 3"),
    (
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "layer_types is .*, needed .* not 'linear_attention'",
    ),
    ({**SLIDING, "sliding_window": None}, "sliding_window is missing, needed a whole number from 1"),
    ({**SLIDING, "sliding_window": 0}, "sliding_window is 0, needed a whole number from 1"),
    ({**SLIDING, "sliding_window": HUGE}, r"sliding_window is 10+.*, needed a whole number from 1"),
    ({"target_layer_ids": []}, r"target_layer_ids is \[\], needed 1 to 256 whole numbers"),
    ({"target_layer_ids": ["1", "2"]}, r"target_layer_ids is \['1', '2'\], needed .* whole numbers"),
    ({"target_layer_ids": [True]}, r"target_layer_ids is \[True\], needed .* whole numbers"),
    ({"target_layer_ids": [1.5]}, r"target_layer_ids is \[1.5\], needed .* whole numbers"),
    ({"target_layer_ids": [-1]}, r"target_layer_ids is \[-1\], needed .* from 0"),
    ({"target_layer_ids": 3}, "target_layer_ids is 3, needed .* whole numbers"),
    ({"target_layer_ids": [HUGE]}, "target_layer_ids is .*, needed .* whole numbers"),
    # numbers and flags
    ({"rope_theta": 0}, "rope_theta is 0, needed a number above 0"),
    ({"rope_theta": "1e6"}, "rope_theta is '1e6', needed a number above 0"),
    ({"rope_theta": HUGE}, "rope_theta is 10+.*, needed a number above 0"),
    ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan, needed a number above 0"),
    ({"rope_parameters": []}, r"rope_parameters is \[\], needed an object"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, needed a number above 0"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, needed a number above 0"),
    ({"input_embedding_scale": 0}, "input_embedding_scale is 0, needed a number above 0"),
    ({"output_multiplier": False}, "output_multiplier is False, needed a number above 0"),
    ({"final_logit_softcapping": -1}, "final_logit_softcapping is -1, needed a number from 0"),
    ({"is_causal": "no"}, "is_causal is 'no', needed true or false"),
    ({"is_causal": 1}, "is_causal is 1, needed true or false"),
    ({"dflash_config": [1]}, r"dflash_config is \[1\], needed an object"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_refused_configs(changes: dict[str, Any], message: str, target: ModelSpec) -> None:
    with pytest.raises(ModelFileError, match="^draft: (.*: )?" + message) as caught:
        read(draft_config(target) | changes, target)
    assert len(caught.value.message) < 400


NONSENSE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([2**31, 2**63, -(2**64), HUGE]),
    st.floats(),
    st.sampled_from(["", "64", "yarn", "full_attention", "DFlashDraftModel"]),
    st.lists(
        st.one_of(st.none(), st.booleans(), st.integers(-1, 13), st.floats(), st.text(max_size=3)), max_size=4
    ),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "x"]), min_size=3, max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_theta", "rope_type", "type", "block_size", "target_layer_ids", "causal", "a"]),
        st.one_of(st.none(), st.integers(-1, 20), st.floats(), st.text(max_size=3), st.lists(st.integers())),
        max_size=3,
    ),
)
KEYS = (
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "block_size", "mask_token_id"),
    *("target_layer_ids", "rope_theta", "rope_parameters", "rope_scaling", "layer_types", "sliding_window"),
    *(
        "use_sliding_window",
        "max_window_layers",
        "is_causal",
        "dflash_config",
        "draft_vocab_size",
        "hidden_act",
    ),
    *(
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
        "use_swa",
        "num_target_layers",
    ),
)


@settings(max_examples=400, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), NONSENSE, max_size=4), base=st.booleans())
def test_any_config_is_read_or_refused(changes: dict[str, Any], base: bool, target: ModelSpec) -> None:
    config = (draft_config(target, **SLIDING) if base else {}) | changes
    try:
        spec = read(config, target)
    except BoughError as error:
        assert error.message.startswith("draft: ")
    else:
        assert len(spec.layers) == len(spec.causal) and spec.heads % spec.kv_heads == 0
        assert max(spec.taps) < len(target.layers) and 0 <= spec.mask_id < target.vocab_size


def read_gguf(
    folder: Path, keys: dict[str, Any], target: ModelSpec, architecture: str = "dflash"
) -> DraftSpec:
    path = folder / "draft.gguf"
    with GGUFWriter(path, architecture) as writer:
        for key, value in keys.items():
            if value is not None:
                writer.add(key, value)
        writer.add_tensor("fc.weight", (1,), QuantType.F32)
        writer.write_header()
        writer.write_tensor("fc.weight", bytes(4))
    with GGUFFile.open(path) as file:
        spec = DraftSpec.from_gguf(file)
    spec.check_target(target)
    return spec


GGUF_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dflash.target_layers": None}, "dflash.target_layers is missing, needed a list"),
    (
        {"dflash.target_layers": [2, 13]},
        r"target_layer_ids is \[1, 12\], needed layers of the target, 0 to 11",
    ),
    ({"dflash.target_layers": [0]}, r"dflash.target_layers is \[0\], needed .* from 1"),
    ({"dflash.target_layers": ["2"]}, r"dflash.target_layers is \['2'\], needed .* whole numbers"),
    ({"dflash.target_layers": [2.5]}, r"dflash.target_layers is \[2.5\], needed .* whole numbers"),
    ({"dflash.target_layers": 2}, "dflash.target_layers is 2, needed .* whole numbers"),
    (
        {"tokenizer.ggml.mask_token_id": None},
        "tokenizer.ggml.mask_token_id is missing, needed a whole number",
    ),
    ({"tokenizer.ggml.mask_token_id": 320}, "mask_token_id is 320, needed .* 0 to 319"),
    ({"tokenizer.ggml.tokens": ["a"] * 9}, "vocab_size is 9, needed .*, 320"),
    ({"dflash.vocab_size": 9}, "vocab_size is 9, needed .*, 320"),
    ({"dflash.embedding_length": 128}, "hidden_size is 128, needed the target's width, 64"),
    ({"dflash.block_count": 0}, "dflash.block_count is 0, needed a whole number from 1 to 256"),
    ({"dflash.block_count": 2**31}, "dflash.block_count is 2147483648, needed a whole number from 1 to 256"),
    (
        {"dflash.attention.head_count_kv": 0},
        "dflash.attention.head_count_kv is 0, needed a whole number from 1",
    ),
    ({"dflash.attention.head_count_kv": [2, 2, 2]}, "head_count_kv is .*, needed a whole number"),
    ({"dflash.attention.value_length": 32}, "dflash.attention.value_length is 32, needed 16"),
    ({"dflash.rope.dimension_count": 8}, "dflash.rope.dimension_count is 8, needed 16"),
    ({"dflash.rope.scaling.type": "yarn"}, "dflash.rope.scaling.type is 'yarn', needed 'none'"),
    ({"dflash.rope.freq_base": "high"}, "dflash.rope.freq_base is 'high', needed a number above 0"),
    ({"dflash.sample_from_anchor": 1}, "dflash.sample_from_anchor is 1, needed true or false"),
    ({"dflash.hidden_activation": "gelu"}, "dflash.hidden_activation is 'gelu', needed 'silu'"),
    ({"dflash.embedding_scale": 2.5}, "dflash.embedding_scale is 2.5, needed 1.0"),
    (
        {"dflash.final_logit_softcapping": -1.0},
        "dflash.final_logit_softcapping is -1.0, needed a number from",
    ),
    ({"dflash.block_size": 1}, "block_size is 1, needed between 2 and 64"),
    (
        {"dflash.attention.sliding_window": None},
        "sliding_window is missing, needed a window for 2 sliding layers",
    ),
    (
        {"dflash.attention.sliding_window_pattern": None},
        "sliding_window_pattern is missing, needed a list of 3",
    ),
    ({"dflash.attention.sliding_window_pattern": [True]}, r"pattern is \[True\], needed a list of 3"),
    ({"dflash.attention.sliding_window_pattern": [1, 1, 0]}, r"pattern is \[1, 1, 0\], needed a list of 3"),
    ({"dflash.attention.causal": 0}, "dflash.attention.causal is 0, needed true or false"),
]


@pytest.mark.parametrize(("changes", "message"), GGUF_REFUSED, ids=[next(iter(c)) for c, _ in GGUF_REFUSED])
def test_refused_gguf_files(changes: dict[str, Any], message: str, target: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"^{re.escape(str(tmp_path))}/draft.gguf: .*" + message):
        read_gguf(tmp_path, gguf_metadata(draft_config(target, **SLIDING)) | changes, target)


@pytest.mark.parametrize("architecture", ["qwen3", "dflash-draft", "qwen35-dflash-draft"])
def test_other_architectures(architecture: str, target: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"architecture is '{architecture}', needed 'dflash'"):
        read_gguf(tmp_path, gguf_metadata(draft_config(target)), target, architecture)


GGUF_NONSENSE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 330),
    st.sampled_from([2**31, 2**63]),
    st.floats(allow_nan=True, width=32),
    st.text(max_size=4),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.lists(st.integers(-1, 14), min_size=1, max_size=4),
    st.lists(st.text(max_size=2), min_size=1, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_gguf_metadata_is_read_or_refused(
    target: ModelSpec, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    keys = gguf_metadata(draft_config(target, **SLIDING))
    names = [
        *keys,
        "dflash.attention.causal",
        "dflash.mask_token_id",
        "tokenizer.ggml.tokens",
        "dflash.vocab_size",
    ]
    changes = data.draw(st.dictionaries(st.sampled_from(names), GGUF_NONSENSE, min_size=1, max_size=3))
    try:
        spec = read_gguf(tmp_path_factory.mktemp("draft"), keys | changes, target)
    except BoughError as error:
        assert "draft.gguf: " in error.message
    else:
        assert max(spec.taps) < len(target.layers) and 0 <= spec.mask_id < target.vocab_size
