"""The DFlash draft against a plain implementation of the same description."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bough.gguf.quantise import quantise
from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.models import dflash
from bough.models.dflash import DFlashDraft
from bough.models.spec import ModelSpec
from bough.state.draft_ring import draft_buffers
from tests.convert.gguf_package import read_tensors
from tests.models.plain_dflash import PlainDraft
from tests.tiny_draft import (
    GGUF_NAMES,
    arrays,
    draft_config,
    gguf_metadata,
    gguf_name,
    poisoned,
    random_rows,
    save_draft,
    save_gguf,
)

TOLERANCE = 1e-4
ROUNDS = (40, 3, 8, 1, 17)
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
EIGHT = (1, 2, 3, 4, 6, 7, 8, 9)
FIVE = (1, 3, 5, 7, 9)
# Every matrix has rows of whole blocks of 256.
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256}


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> ModelSpec:
    with GGUFFile.open(tiny_model("qwen3", layers=12)) as file:
        return ModelSpec.from_gguf(file)


@pytest.fixture(scope="module")
def wide_target(tiny_model: Callable[..., Path]) -> ModelSpec:
    """Rows that the K types divide."""
    with GGUFFile.open(tiny_model("qwen3", layers=12, width=256)) as file:
        return ModelSpec.from_gguf(file)


def error(found: Tensor, expected: np.ndarray) -> float:
    difference = np.abs(found.double().numpy() - expected).max()
    return float(difference / np.abs(expected).max())


def compare(
    draft: DFlashDraft,
    plain: PlainDraft,
    *,
    rounds: tuple[int, ...] = ROUNDS,
    context: int | None = None,
    before_any: bool = True,
) -> float:
    """The largest error over rounds of appending so many positions and running a block."""
    buffers, slot = poisoned(draft, context=context), torch.zeros(1, dtype=torch.int64)
    spec, worst = draft.spec, 0.0
    for number, count in enumerate((0, *rounds) if before_any else rounds):
        features = random_rows(1, count, len(spec.taps) * spec.width, seed=number)
        rows = random_rows(1, spec.block_size, spec.width, seed=100 + number)
        draft.append(features, slot, buffers)
        plain.append(features[0].numpy())
        worst = max(worst, error(draft.block(rows, slot, buffers)[0], plain.block(rows[0].numpy())))
    assert int(buffers.lengths[0]) == sum(rounds)
    return worst


CASES: dict[str, dict[str, Any]] = {
    "first generation": {"taps": FIVE},
    "three taps": {},
    "current generation": {
        "nested": True,
        "taps": EIGHT,
        "layer_types": SLIDING,
        "sliding_window": 4096,
        "use_sliding_window": True,
    },
    "window wraps": {"taps": FIVE, "layer_types": SLIDING, "sliding_window": 13},
    "window below the block": {"layer_types": SLIDING, "sliding_window": 5},
    "window of one": {"layer_types": SLIDING, "sliding_window": 1},
    "not causal": {"nested": True, "layer_types": SLIDING, "sliding_window": 13, "is_causal": False},
    "not causal, window below the block": {"layer_types": SLIDING, "sliding_window": 5, "is_causal": False},
    "all causal": {"layer_types": SLIDING, "sliding_window": 13, "is_causal": True},
    "causal as others spell it": {
        "nested": True,
        "layer_types": SLIDING,
        "sliding_window": 13,
        "method": {"causal": False},
    },
    "causal as JetSpec spells it": {"nested": True, "method": {"causal_head": True}},
    "all sliding": {
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 9,
        "method": {"block_size": 8},
    },
    "scaled embedding": {"nested": True, "method": {"input_embedding_scale": 2.5}},
    "one layer": {"layers": 1, "method": {"block_size": 2}},
    "other sizes": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("case", CASES)
def test_block_equals_the_plain_draft(case: str, target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target, **CASES[case])
    tensors = save_draft(tmp_path, config)
    draft = DFlashDraft.load(tmp_path, target)
    assert compare(draft, PlainDraft(config, arrays(tensors))) <= TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("said", [None, True, False])
def test_switch_overrides_the_file(
    causal: bool, said: bool | None, target: ModelSpec, tmp_path: Path
) -> None:
    config = draft_config(target, layer_types=SLIDING, sliding_window=13, is_causal=said)
    tensors = save_draft(tmp_path, config)
    draft = DFlashDraft.load(tmp_path, target, causal=causal)
    assert draft.spec.causal == (causal,) * 3
    assert compare(draft, PlainDraft(config, arrays(tensors), causal=causal)) <= TOLERANCE


def test_causality_and_window_matter(target: ModelSpec, tmp_path: Path) -> None:
    """The comparison above can fail: another mask or another order of taps is far beyond the tolerance."""
    config = draft_config(target, layer_types=SLIDING, sliding_window=13)
    tensors = arrays(save_draft(tmp_path, config))
    draft = DFlashDraft.load(tmp_path, target)
    assert compare(draft, PlainDraft(config, tensors, causal=False)) > 0.01
    assert compare(draft, PlainDraft({**config, "sliding_window": 14}, tensors)) > 0.01
    assert compare(draft, PlainDraft(config, tensors, context=40)) > 0.01
    fuse = np.roll(tensors["fc.weight"], target.width, axis=1)
    assert compare(draft, PlainDraft(config, {**tensors, "fc.weight": fuse})) > 0.01


def test_a_causal_head_run_bidirectionally_is_caught(target: ModelSpec, tmp_path: Path) -> None:
    config = draft_config(target, nested=True, method={"causal_head": True})
    tensors = arrays(save_draft(tmp_path, config))
    assert compare(DFlashDraft.load(tmp_path, target), PlainDraft(config, tensors)) <= TOLERANCE
    assert compare(DFlashDraft.load(tmp_path, target, causal=False), PlainDraft(config, tensors)) > 0.01


@pytest.mark.parametrize("context", [1, 7, 20, 31])
def test_full_layers_look_back_as_far_as_their_ring(context: int, target: ModelSpec, tmp_path: Path) -> None:
    """Chunks of 40 and 50 positions are longer than any ring: only their newest part is kept."""
    config = draft_config(target, layer_types=SLIDING, sliding_window=13)
    tensors = save_draft(tmp_path, config)
    draft = DFlashDraft.load(tmp_path, target)
    plain = PlainDraft(config, arrays(tensors), context=context)
    assert compare(draft, plain, rounds=(5, 40, 3, 8, 1, 50, 2), context=context) <= TOLERANCE


@settings(max_examples=25, deadline=None)
@given(
    rounds=st.lists(st.integers(0, 24), min_size=1, max_size=5),
    window=st.integers(1, 20),
    context=st.integers(1, 30),
    causal=st.sampled_from([None, True, False]),
    block=st.integers(2, 6),
)
def test_any_schedule_of_chunks(
    rounds: list[int],
    window: int,
    context: int,
    causal: bool | None,
    block: int,
    target: ModelSpec,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("draft")
    kinds = ["full_attention", "sliding_attention"]
    config = draft_config(
        target,
        layers=2,
        layer_types=kinds,
        sliding_window=window,
        taps=[3],
        method={"block_size": block},
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=8,
    )
    tensors = save_draft(folder, config)
    draft = DFlashDraft.load(folder, target, causal=causal)
    plain = PlainDraft(config, arrays(tensors), causal=causal, context=context)
    assert compare(draft, plain, rounds=tuple(rounds), context=context) <= TOLERANCE


class UniqueIndices(TorchFunctionMode):
    """Every indexed assignment has unique indices: on a GPU the winner would be random."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[1], tuple):
            indices = torch.stack(torch.broadcast_tensors(*args[1])).flatten(1)
            assert indices.unique(dim=1).shape == indices.shape
            self.seen += 1
        return func(*args, **(kwargs or {}))


def test_no_place_of_a_ring_is_written_twice(target: ModelSpec, tmp_path: Path) -> None:
    save_draft(tmp_path, draft_config(target, layer_types=SLIDING, sliding_window=13))
    draft = DFlashDraft.load(tmp_path, target)
    buffers = poisoned(draft, context=20, slots=2)
    lengths = torch.zeros(2, dtype=torch.int64)
    with UniqueIndices() as mode:
        for count, slots in ((50, [0, 1]), (13, [1]), (14, [0]), (20, [0, 1]), (21, [1])):
            draft.append(random_rows(len(slots), count, 3 * target.width), torch.tensor(slots), buffers)
            lengths[slots] += count
    assert mode.seen == 5 * 2 * 3
    assert torch.equal(buffers.lengths, lengths)
    # The chunks of 50 and of 21 lost what the longest ring does not hold.
    assert buffers.starts.tolist() == [30, 84]


def test_what_is_not_committed_is_not_appended(target: ModelSpec, tmp_path: Path) -> None:
    """The number of committed rows as a tensor: the same as appending so many, in rings that wrap."""
    save_draft(tmp_path, draft_config(target, layer_types=SLIDING, sliding_window=13))
    draft = DFlashDraft.load(tmp_path, target)
    one, other = (poisoned(draft) for _ in range(2))
    slot, size = torch.zeros(1, dtype=torch.int64), len(draft.spec.taps) * target.width
    for number, count in enumerate((5, 9, 0, 4, 1, 9)):
        features = random_rows(1, 9, size, seed=number)
        draft.append(features[:, :count], slot, one)
        draft.commit(features, slot, other, torch.tensor([count]))
        assert torch.equal(one.lengths, other.lengths)
        for a, b in zip(one.keys + one.values, other.keys + other.values, strict=True):
            assert torch.allclose(a, b, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kept", [0, 3, 13, 30])
def test_positions_that_no_ring_has_to_hold_are_skipped(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """A prompt of which only the newest features come, in pieces: the rest is never seen."""
    monkeypatch.setattr(dflash, "PIECE", 7)
    config = draft_config(target, layer_types=SLIDING, sliding_window=13)
    tensors = arrays(save_draft(tmp_path, config))
    draft = DFlashDraft.load(tmp_path, target)
    buffers, slot = poisoned(draft, context=kept + 2), torch.zeros(1, dtype=torch.int64)
    plain = PlainDraft(config, tensors, context=kept + 2)
    for number, (skipped, count) in enumerate(((20, kept), (0, 2))):
        features = random_rows(1, count, 3 * target.width, seed=number)
        draft.append(features, slot, buffers, skipped=skipped)
        plain.append(np.concatenate([np.zeros((skipped, 3 * target.width)), features[0].numpy()]))
    assert int(buffers.lengths[0]) == 22 + kept
    assert int(buffers.starts[0]) == 20
    if kept >= 13:  # shorter: the reference's sliding layers would see what was skipped
        rows = random_rows(1, 16, target.width)
        assert error(draft.block(rows, slot, buffers)[0], plain.block(rows[0].numpy())) <= TOLERANCE


def test_slots_do_not_mix(target: ModelSpec, tmp_path: Path) -> None:
    """Three sequences of different lengths, appended to and run together in changing company."""
    config = draft_config(target, layer_types=SLIDING, sliding_window=13)
    tensors = arrays(save_draft(tmp_path, config))
    draft = DFlashDraft.load(tmp_path, target)
    buffers = poisoned(draft, context=20, slots=4)
    plain = {slot: PlainDraft(config, tensors, context=20) for slot in range(4)}
    steps = [([2], 30), ([0, 3], 5), ([3, 2], 17), ([0], 1), ([2, 0, 3], 4), ([1], 2), ([1, 2, 3, 0], 24)]
    for number, (slots, count) in enumerate(steps):
        features = random_rows(len(slots), count, 3 * target.width, seed=number)
        draft.append(features, torch.tensor(slots), buffers)
        for slot, rows in zip(slots, features.numpy(), strict=True):
            plain[slot].append(rows)
        asked = [3, 0, 1, 2] if number % 2 else [2, 1]
        embeddings = random_rows(len(asked), 16, target.width, seed=50 + number)
        found = draft.block(embeddings, torch.tensor(asked), buffers)
        for item, slot in enumerate(asked):
            assert error(found[item], plain[slot].block(embeddings[item].numpy())) <= TOLERANCE
    assert buffers.lengths.tolist() == [34, 26, 75, 50]


def test_a_block_changes_no_state(target: ModelSpec, tmp_path: Path) -> None:
    save_draft(tmp_path, draft_config(target, layer_types=SLIDING, sliding_window=13))
    draft = DFlashDraft.load(tmp_path, target)
    slot = torch.zeros(1, dtype=torch.int64)
    buffers = draft_buffers(draft.spec, max_ctx=64)
    draft.append(random_rows(1, 20, 3 * target.width), slot, buffers)
    before = [pool.clone() for pool in (*buffers.keys, *buffers.values, buffers.lengths, buffers.starts)]
    draft.block(random_rows(1, 16, target.width), slot, buffers)
    after = (*buffers.keys, *buffers.values, buffers.lengths, buffers.starts)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_positions_that_were_never_appended_are_not_seen(target: ModelSpec, tmp_path: Path) -> None:
    """A sequence whose features the draft has only from some position on."""
    config = draft_config(target)
    tensors = arrays(save_draft(tmp_path, config))
    draft = DFlashDraft.load(tmp_path, target)
    slot, buffers = torch.zeros(1, dtype=torch.int64), draft_buffers(draft.spec, max_ctx=64)
    buffers.lengths[0] = buffers.starts[0] = 30
    plain = PlainDraft(config, tensors, context=6)
    plain.append(np.zeros((30, 3 * target.width)))
    for count in (2, 4):
        features = random_rows(1, count, 3 * target.width, seed=count)
        draft.append(features, slot, buffers)
        plain.append(features[0].numpy())
    rows = random_rows(1, 16, target.width)
    assert error(draft.block(rows, slot, buffers)[0], plain.block(rows[0].numpy())) <= TOLERANCE


@pytest.mark.parametrize("said", [None, False])
@pytest.mark.parametrize("kinds", [None, SLIDING])
@pytest.mark.parametrize("old_mask", [False, True])
def test_llama_cpp_file_gives_the_same(
    said: bool | None, kinds: list[str] | None, old_mask: bool, target: ModelSpec, tmp_path: Path
) -> None:
    changes = {} if kinds is None else {"layer_types": kinds, "sliding_window": 13}
    config = draft_config(target, nested=True, taps=FIVE, is_causal=said, **changes)
    tensors = save_draft(tmp_path, config)
    keys = gguf_metadata(config)
    if old_mask:
        keys["dflash.mask_token_id"] = keys.pop("tokenizer.ggml.mask_token_id")
    path = save_gguf(tmp_path / "draft.gguf", keys, tensors)
    drafts = [DFlashDraft.load(tmp_path, target), DFlashDraft.load(path, target)]
    first, second = (draft.spec for draft in drafts)
    assert replace(first, source="", vocab_size=None) == replace(second, source="", eps=first.eps)
    assert second.eps == pytest.approx(first.eps)
    rows, slot = random_rows(1, 16, target.width), torch.zeros(1, dtype=torch.int64)
    found = []
    for draft in drafts:
        buffers = poisoned(draft)
        draft.append(random_rows(1, 45, 5 * target.width), slot, buffers)
        found.append(draft.block(rows, slot, buffers))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q4_K, QuantType.Q6_K, QuantType.BF16])
def test_quantised_llama_cpp_file(
    type: QuantType, expand: bool, wide_target: ModelSpec, tmp_path: Path
) -> None:
    config = draft_config(wide_target, layers=2, **WIDE)
    tensors = save_draft(tmp_path, config)
    types = dict.fromkeys(set(GGUF_NAMES.values()), type) | {"attn_v": QuantType.Q8_0}
    path = save_gguf(tmp_path / "draft.gguf", gguf_metadata(config), tensors, types=types)
    # The gguf package's opinion of what the file holds.
    held = read_tensors(path)
    plain = PlainDraft(config, {name: held[gguf_name(name)] for name in tensors})
    draft = DFlashDraft.load(path, wide_target, expand=expand)
    assert compare(draft, plain, rounds=(20, 3)) <= TOLERANCE
    assert compare(draft, PlainDraft(config, arrays(tensors)), rounds=(20, 3)) > TOLERANCE


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("quant", [QuantType.Q8_0, QuantType.Q4_K, None])
def test_quantised_at_load(
    quant: QuantType | None, expand: bool, wide_target: ModelSpec, tmp_path: Path
) -> None:
    """BF16 as published; the rows of one matrix are too short for any block, and stay."""
    config = draft_config(wide_target, layers=2, **(WIDE | {"intermediate_size": 40}))
    tensors = save_draft(tmp_path, config, dtype=torch.bfloat16)
    held = {}
    for name, tensor in tensors.items():
        whole = quant is not None and tensor.ndim == 2 and tensor.shape[1] % quant.block_elements == 0
        assert whole == (quant is not None and tensor.ndim == 2 and "down_proj" not in name)
        held[name] = tensor.float()
        if quant is not None and whole:
            held[name] = dequantise(quantise(tensor.float(), quant), quant)
    draft = DFlashDraft.load(tmp_path, wide_target, quant=quant, expand=expand)
    assert compare(draft, PlainDraft(config, arrays(held)), rounds=(20, 3)) <= TOLERANCE


def test_half_floats_and_other_names(target: ModelSpec, tmp_path: Path) -> None:
    """Copies of the target's embedding and head may lie in the file, and names may have a prefix."""
    config = draft_config(target)
    tensors = save_draft(tmp_path, config, dtype=torch.float16)
    extra = {
        name: torch.zeros(target.vocab_size, target.width)
        for name in ("lm_head.weight", "embed_tokens.weight")
    }
    renamed = {f"model.{name}": tensor for name, tensor in {**tensors, **extra}.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    draft = DFlashDraft.load(tmp_path / "model.safetensors", target)
    assert compare(draft, PlainDraft(config, arrays(tensors)), rounds=(5,)) <= TOLERANCE
