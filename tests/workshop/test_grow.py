"""Growing preserves the function: logits, outputs and acceptance equal the small pair's."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.sampler import SamplingParams
from bough.errors import UnsupportedQuant
from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.hub.catalog import Pair, named
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft
from bough.models.spec import ExpertSpec, ModelSpec
from bough.models.step import Step
from bough.session.loading import load_session
from bough.session.session import Finished, TextRequest
from bough.state.draft_ring import draft_buffers
from bough.state.sequences import SequenceStates
from tests.convert.gguf_package import read_keys, read_types
from tests.tiny_draft import draft_config, draft_tensors, gguf_metadata, save_draft, save_gguf
from workshop.grow.bytes import Noise, single
from workshop.grow.grow import DRAFT, TARGET, Growth, grow
from workshop.grow.plan import Stream
from workshop.grow.shape import DraftShape, PairShape, TargetShape

# The largest difference of logits, relative to the largest logit: float32 sums in another order. In float64
# the same files agree to 2e-6.
TOLERANCE = 3e-5
# Three times as wide, not a power of two; heads, depth and vocabulary by other factors.
WIDER = PairShape(
    "wider",
    TargetShape(
        layers=12,
        width=192,
        feed_forward=352,
        heads=8,
        kv_heads=4,
        key_heads=4,
        value_heads=12,
        vocab_size=1000,
    ),
    DraftShape(layers=5, feed_forward=160, heads=8, kv_heads=4),
)
TAPS = (1, 3, 5)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 300, 37)]


def specification(path: Path) -> ModelSpec:
    with GGUFFile.open(path) as file:
        return ModelSpec.from_gguf(file)


def outputs(target: Path, draft: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt [T, V] and of a drafted block after it [16, V]."""
    with GGUFFile.open(target) as file:
        decoder = Decoder.load(file)
    spec = decoder.spec
    drafter = DFlashDraft.load(draft, spec)
    states = SequenceStates(spec, max_ctx=64, max_rows=1, device=decoder.device)
    slot = states.open()
    states.reserve(slot, len(PROMPT))
    slots = torch.tensor([slot])
    step = Step.chunk(slots, torch.tensor([PROMPT]), states.buffers.lengths)
    out = decoder.forward(step, states.buffers, taps=drafter.spec.taps)
    buffers, first = draft_buffers(drafter.spec, max_ctx=64), torch.tensor([0])
    drafter.append(out.features, first, buffers)
    block = decoder.embed(torch.tensor([[7] + [drafter.spec.mask_id] * 15]))
    return decoder.logits(out.hidden)[0], decoder.logits(drafter.block(block, first, buffers))[0]


def tiny_draft(target: Path, path: Path, kind: QuantType) -> Path:
    config = draft_config(specification(target), taps=TAPS, mask_token_id=319)
    types = dict.fromkeys(
        ("fc", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), kind
    )
    return save_gguf(path, gguf_metadata(config), draft_tensors(config), types=types)


def assert_same(small: tuple[torch.Tensor, ...], grown: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(grown, small, strict=True):
        vocabulary = theirs.shape[1]
        assert (ours[:, :vocabulary] - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
        # low enough that no temperature samples a padding token
        assert ours[:, vocabulary:].max() < theirs.min() - 1000


@pytest.mark.parametrize(
    ("mix", "kind", "tied"),
    [("f32", QuantType.F32, False), ("q8_0", QuantType.Q8_0, True), ("f16", QuantType.BF16, False)],
)
def test_a_random_pair_keeps_its_logits(tmp_path, tiny_model, mix, kind, tied):
    target = tiny_model(mix=mix, tied=tied)
    draft = tiny_draft(target, tmp_path / "draft.gguf", kind)
    grown = grow(tmp_path / "grown", WIDER, target=target, draft=draft)
    assert grown.layer_indices == (0, 1, 2, 3, 4, 5, 6, 7) and grown.taps == TAPS
    assert_same(outputs(target, draft), outputs(grown.target, grown.draft))


@pytest.mark.parametrize("mtp", [False, True])
def test_k_types_deeper_and_four_times_as_wide(tmp_path, tiny_model, mtp):
    """At a ratio of four the smallest sufficient scale leaves no room for the constant; the next one does."""
    target = tiny_model(mix="q4_k_m", width=256, mtp=mtp)
    draft = tiny_draft(target, tmp_path / "draft.gguf", QuantType.Q8_0)
    shape = replace(WIDER.target, layers=16, width=1024, feed_forward=768)
    grown = grow(tmp_path / "grown", replace(WIDER, target=shape), target=target, draft=draft)
    assert grown.layer_indices == (0, 1, 2, 3, 8, 9, 10, 11) and grown.taps == (1, 3, 9)
    assert_same(outputs(target, draft), outputs(grown.target, grown.draft))
    types, keys = read_types(grown.target), read_keys(grown.target)
    small = read_types(target)
    assert types["blk.8.ffn_down.weight"] == small["blk.4.ffn_down.weight"]
    assert types["blk.5.attn_qkv.weight"] == "Q5_K" and types["output.weight"] == small["output.weight"]
    assert keys["qwen35.block_count"] == 16 and "qwen35.nextn_predict_layers" not in keys
    assert keys["qwen35.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def test_a_checkpoint_in_bfloat16_gets_norms_in_float32(tmp_path, tiny_model):
    target = tiny_model()
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = draft_config(
        specification(target), taps=TAPS, layer_types=kinds, sliding_window=20, use_sliding_window=True
    )
    save_draft(tmp_path / "draft", config, dtype=torch.bfloat16)
    grown = grow(tmp_path / "grown", WIDER, target=target, draft=tmp_path / "draft")
    assert_same(outputs(target, tmp_path / "draft"), outputs(grown.target, grown.draft))
    types = read_types(grown.draft)
    assert types["blk.0.attn_q.weight"] == types["blk.4.attn_q.weight"] == "BF16"
    assert {kind for name, kind in types.items() if name.endswith("norm.weight")} == {"F32"}
    keys = read_keys(grown.draft)
    assert list(keys["dflash.attention.sliding_window_pattern"]) == [True, True, False, False, False]


@given(
    small=st.integers(1, 64).map(lambda n: 32 * n),
    more=st.integers(1, 400),
    eps=st.sampled_from([1e-6, 1e-5]),
)
def test_norms_of_the_large_stream_equal_the_small(small: int, more: int, eps: float):
    stream = Stream(small, small + 32 * more, eps)
    assert math.log2(stream.scale).is_integer() and stream.constant > 0
    x = np.random.default_rng(small).standard_normal(small) * 1e-3
    large = np.zeros(stream.large)
    large[:small], large[small] = stream.scale * x, stream.constant
    ours = large * stream.norm_factor / np.sqrt(np.mean(large**2) + eps)
    np.testing.assert_allclose(ours[:small], x / np.sqrt(np.mean(x**2) + eps), rtol=1e-12)


# Codes that a block's float16 factor is multiplied with, at most.
LARGEST_CODE = {QuantType.Q8_0: 127, QuantType.Q6_K: 127, QuantType.Q4_K: 63, QuantType.Q5_K: 63}
# Half the widest gap between two values of float16 times such a code, relative, over all of them from 0.01
# to 2e4: 5.77e-5 up to 127 and 1.06e-4 up to 63. Below, where large codes need a factor that is subnormal,
# both have 1.91e-4 at most down to 1e-3. A bfloat16 of 8 digits: 2^-8.
HALF_GAP = {127: 5.77e-5, 63: 1.06e-4}
HALF_GAP_OF_SMALL_VALUES = 1.91e-4


@settings(max_examples=30)
@given(
    kind=st.sampled_from([*LARGEST_CODE, QuantType.BF16]),
    value=st.floats(1e-3, 2e4),
)
@example(kind=QuantType.Q8_0, value=13654.5)
@example(kind=QuantType.Q6_K, value=118.64453125)  # the middles of widest gaps
@example(kind=QuantType.Q4_K, value=1.0081939697265625)
@example(kind=QuantType.Q5_K, value=0.0010946094989776611)
def test_single_values_in_a_block(kind: QuantType, value: float):
    if kind is QuantType.BF16:
        error = 2**-8 * value
    else:
        limit = LARGEST_CODE[kind]
        factors = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
        error = min(float(np.abs(code * factors - value).min()) for code in range(1, limit + 1))
        assert error <= value * (HALF_GAP[limit] if value >= 0.01 else HALF_GAP_OF_SMALL_VALUES)
    for wanted in (value, -value):
        block = torch.frombuffer(bytearray(single(kind, wanted)), dtype=torch.uint8)
        weights = dequantise(block, kind)
        assert abs(weights[0].item() - wanted) <= error
        assert not weights[1:].any()


@pytest.fixture(scope="module")
def embedded() -> Pair:
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    return found[0].pair


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, embedded: Pair) -> Growth:
    """The embedded pair with half as many columns and layers again."""
    small = specification(embedded.target)
    assert small.delta is not None
    shape = TargetShape(
        layers=len(small.layers) * 3 // 2,
        width=small.width * 3 // 2,
        feed_forward=small.feed_forward * 3 // 2,
        heads=2 * small.heads,
        kv_heads=2 * small.kv_heads,
        key_heads=2 * small.delta.key_heads,
        value_heads=2 * small.delta.value_heads,
        vocab_size=small.vocab_size + 256,
    )
    return grow(
        tmp_path_factory.mktemp("grown") / "pair",
        PairShape("larger", shape, DraftShape(layers=4, feed_forward=2048, heads=12, kv_heads=3)),
    )


def answers(target: Path, draft: Path) -> list[Finished]:
    speculation = SpecConfig(adaptive=False)
    config = EngineConfig(device="cpu", max_ctx=512, speculation=speculation, draft=DraftConfig(draft))
    session = load_session(target, config)
    found = []
    for prompt, sampling in (
        ("def fibonacci(n):", SamplingParams(seed=1)),
        ("What is 12 times 4?", SamplingParams(seed=1)),
        ("Write a haiku.", SamplingParams(temperature=0.8, top_p=0.95, seed=2)),
    ):
        messages = [{"role": "user", "content": prompt}]
        *_, last = session.generate(TextRequest(messages=messages, max_tokens=24, sampling=sampling))
        assert isinstance(last, Finished)
        found.append(last)
    return found


def test_the_embedded_pair_keeps_its_outputs_and_acceptance(embedded: Pair, larger: Growth):
    assert larger.draft is not None
    small, grown = answers(embedded.target, embedded.draft), answers(larger.target, larger.draft)
    assert [each.tokens for each in grown] == [each.tokens for each in small]
    assert [each.stats.steps for each in grown] == [each.stats.steps for each in small]


def test_the_vocabulary_is_filled_up(larger: Growth):
    keys, draft = read_keys(larger.target), read_keys(larger.draft)
    tokens = keys["tokenizer.ggml.tokens"]
    assert len(tokens) == larger.shape.target.vocab_size == len(set(tokens))
    assert set(keys["tokenizer.ggml.token_type"][-256:]) == {5}
    assert draft["tokenizer.ggml.tokens"] == tokens
    assert draft["dflash.target_layers"] == [tap + 1 for tap in larger.taps]


def test_writing_is_deterministic(tmp_path, tiny_model, monkeypatch):
    """For any number of threads and any previous file content."""
    target = tiny_model()
    first = grow(tmp_path / "a", WIDER, target=target)
    monkeypatch.setattr("workshop.grow.write._PIECE_BYTES", 1000)
    seen: list[tuple[int, int]] = []
    again = grow(tmp_path / "b", WIDER, target=target, progress=lambda *done: seen.append(done))
    assert first.target.read_bytes() == again.target.read_bytes()
    assert first.draft is None and not (tmp_path / "a" / DRAFT).exists()
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    assert [path.name for path in (tmp_path / "b").iterdir()] == [TARGET]


Maker = Callable[..., Path]


@pytest.mark.parametrize("kind", [QuantType.Q8_0, QuantType.F16])
def test_random_files_load_and_give_finite_logits(tmp_path, tiny_model: Maker, kind: QuantType):
    target = tiny_model(mix="q4_k_m", width=256)
    draft = tiny_draft(target, tmp_path / "draft.gguf", kind)
    shape = replace(WIDER, target=replace(WIDER.target, width=512, feed_forward=768))
    grown = grow(tmp_path / "grown", shape, target=target, draft=draft, random=True)
    for logits in outputs(grown.target, grown.draft):
        assert logits.isfinite().all() and logits.std() > 0.01
    with GGUFFile.open(grown.target) as file:
        for name, info in file.tensors.items():
            weights = dequantise(torch.from_numpy(file.raw(name).copy()), info.type)
            assert weights.isfinite().all()
            if len(info.shape) == 2:
                assert abs(weights.mean()) < 0.002 and 0.01 < weights.std() < 0.02, name


def test_a_random_pair_with_experts_loads_and_gives_finite_logits(tmp_path, tiny_model: Maker):
    target = tiny_model(mix="q4_k_m", width=256)
    draft = tiny_draft(target, tmp_path / "draft.gguf", QuantType.Q8_0)
    experts = ExpertSpec(count=16, used=4, width=256, shared_width=256)
    sizes = replace(WIDER.target, layers=8, width=512, feed_forward=0, heads=12, value_heads=8)
    shape = replace(WIDER, target=replace(sizes, experts=experts))
    grown = grow(tmp_path / "grown", shape, target=target, draft=draft, random=True)
    spec = specification(grown.target)
    assert spec.architecture == "qwen35moe" and spec.experts == experts and spec.heads == 12
    for logits in outputs(grown.target, grown.draft):
        assert logits.isfinite().all() and logits.std() > 0.01


def test_every_type_has_noise():
    noise = Noise()
    without = {"IQ1_M", "TQ1_0", "TQ2_0", "I64", "NVFP4", "Q1_0", "Q2_0", "PQ2_0", "PTQ1_0"}
    for kind in set(QuantType) - {QuantType[name] for name in without}:
        noise.prepare(kind)
        out = np.zeros(4000 * kind.block_bytes, np.uint8)
        noise.fill(out, kind, "a name", 0)
        weights = dequantise(torch.from_numpy(out), kind)
        assert abs(weights.mean()) < 0.002 and 0.01 < weights.std() < 0.025, kind
    with pytest.raises(UnsupportedQuant, match="IQ1_M weights cannot be grown"):
        noise.prepare(QuantType.IQ1_M)
