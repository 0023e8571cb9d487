"""The shapes that a small pair may be grown to, and the checks on them. Reads no weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bough.errors import UnsupportedModel, UsageError
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.models.draft_spec import DraftSpec
from bough.models.spec import ExpertSpec, ModelSpec

# Every published DFlash draft of a Qwen3.5 target has heads of 128 and four query heads per KV head.
_DRAFT_LAYERS, _DRAFT_HEADS, _DRAFT_KV_HEADS = 5, 32, 8


@dataclass(frozen=True, slots=True)
class TargetShape:
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    vocab_size: int
    context_length: int | None = None  # None: the small target's
    experts: ExpertSpec | None = None  # instead of a dense feed-forward; random weights only


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Its width is the target's."""

    layers: int
    feed_forward: int
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class PairShape:
    name: str
    target: TargetShape
    draft: DraftShape
    # types by name of tensors that contain no small tensor; None: those of q4_k_m
    types: Mapping[str, QuantType] | None = None


def preset(name: str, target: ModelSpec, draft: DraftSpec | None) -> PairShape:
    """Return a named shape.

    `27b`: Qwen3.5-27B and its first draft; `35b-a3b`: Qwen3.5-35B-A3B and its current draft; `double`: twice
    the pair's sizes.
    """
    if name == "27b":
        shape = TargetShape(
            layers=64,
            width=5120,
            feed_forward=17408,
            heads=24,
            kv_heads=4,
            key_heads=16,
            value_heads=48,
            vocab_size=248320,
            context_length=262144,
        )
        return PairShape(name, shape, DraftShape(_DRAFT_LAYERS, 17408, _DRAFT_HEADS, _DRAFT_KV_HEADS))
    if name == "35b-a3b":
        shape = TargetShape(
            layers=40,
            width=2048,
            feed_forward=0,
            heads=16,
            kv_heads=2,
            key_heads=16,
            value_heads=32,
            vocab_size=248320,
            context_length=262144,
            experts=ExpertSpec(count=256, used=8, width=512, shared_width=512),
        )
        return PairShape(name, shape, DraftShape(6, 6144, _DRAFT_HEADS, _DRAFT_KV_HEADS))
    if name == "double":
        return _double(name, target, draft)
    raise UsageError(f"`preset` is {name!r}, needed: one of 27b, 35b-a3b, double")


def like(path: Path, small: ModelSpec) -> PairShape:
    """Return the shape and types of a GGUF file, with a draft in the proportions of published ones."""
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        types = {name: info.type for name, info in file.tensors.items()}
    if spec.architecture != small.architecture or spec.delta is None or small.delta is None:
        raise UnsupportedModel(
            f"{path}: general.architecture is {spec.architecture!r}, needed {small.architecture!r}"
        )
    for what, seen, needed in (
        ("attention.key_length", spec.head_dim, small.head_dim),
        ("rope.dimension_count", spec.rope_dim, small.rope_dim),
        ("ssm.state_size", spec.delta.head_dim, small.delta.head_dim),
        ("ssm.conv_kernel", spec.delta.conv_width, small.delta.conv_width),
        ("full_attention_interval", interval(spec), interval(small)),
    ):
        if seen != needed:
            raise UsageError(f"{path}: {what} is {seen}, needed {needed}, as in the small pair")
    shape = TargetShape(
        layers=len(spec.layers),
        width=spec.width,
        feed_forward=spec.feed_forward,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        key_heads=spec.delta.key_heads,
        value_heads=spec.delta.value_heads,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
    )
    draft = DraftShape(_DRAFT_LAYERS, spec.feed_forward, _DRAFT_HEADS, _DRAFT_KV_HEADS)
    return PairShape(spec.name, shape, draft, types)


def interval(spec: ModelSpec) -> int:
    """Return n where every n-th layer has full attention; raise if the layers are not whole such groups."""
    found = spec.layers.index("attention") + 1 if "attention" in spec.layers else 0
    expected = tuple("delta" if (i + 1) % max(1, found) else "attention" for i in range(len(spec.layers)))
    if not found or expected != spec.layers or len(spec.layers) % found:
        raise UnsupportedModel(
            f"{spec.name}: its {len(spec.layers)} layers are {', '.join(spec.layers[:8])}, ..., "
            "needed: whole groups of delta layers that end in one with attention"
        )
    return found


def check(shape: PairShape, target: ModelSpec, draft: DraftSpec | None, *, random: bool = False) -> None:
    """Raise if the pair cannot be grown to this shape; `random`: if no such file can be written."""
    if target.architecture != "qwen35" or target.delta is None:
        raise UnsupportedModel(
            f"{target.name}: general.architecture is {target.architecture!r}, only 'qwen35' can be grown"
        )
    every, large, small = interval(target), shape.target, target
    if not random:
        _check_copied(large, target)
    _at_least("layers", large.layers, len(small.layers))
    if large.layers % every:
        raise UsageError(f"layers is {large.layers}, needed: a multiple of {every}")
    # one more column carries the constant that keeps the norms exact
    _at_least("width", large.width, small.width + 1)
    _at_least("KV heads", large.kv_heads, small.kv_heads)
    _at_least("key heads", large.key_heads, target.delta.key_heads)
    _at_least("vocabulary", large.vocab_size, small.vocab_size)
    if draft is not None:
        _check_draft(shape.draft, target, draft)


def _check_copied(large: TargetShape, small: ModelSpec) -> None:
    """Raise if the small target's weights have no place in this shape."""
    assert small.delta is not None
    if large.experts is not None:
        raise UsageError(
            f"a shape with {large.experts.count} experts cannot answer as {small.name} does, which has none",
            "set `random`: random weights, for timing",
        )
    _ratio("query heads per KV head", (large.heads, large.kv_heads), (small.heads, small.kv_heads))
    _ratio(
        "value heads per key head",
        (large.value_heads, large.key_heads),
        (small.delta.value_heads, small.delta.key_heads),
    )
    _at_least("feed_forward", large.feed_forward, small.feed_forward)


def _check_draft(shape: DraftShape, target: ModelSpec, draft: DraftSpec) -> None:
    _ratio(
        "the draft's query heads per KV head", (shape.heads, shape.kv_heads), (draft.heads, draft.kv_heads)
    )
    _at_least("the draft's layers", shape.layers, len(draft.layers))
    _at_least("the draft's feed_forward", shape.feed_forward, draft.feed_forward)
    _at_least("the draft's KV heads", shape.kv_heads, draft.kv_heads)
    settings = (draft.embedding_scale, draft.output_multiplier, draft.softcap)
    if settings != (1.0, 1.0, 0.0):
        raise UnsupportedModel(
            f"{draft.source}: embedding scale, output multiplier and softcap are {settings}, "
            "needed: (1.0, 1.0, 0.0), a draft in a GGUF file has no others"
        )
    # GGUF stores it in float32, config.json as written
    if not math.isclose(draft.eps, target.eps, rel_tol=1e-6):
        raise UnsupportedModel(
            f"{draft.source}: rms_norm_eps is {draft.eps}, needed the target's, {target.eps}: "
            "both use the same padded embedding"
        )


def _ratio(what: str, large: tuple[int, int], small: tuple[int, int]) -> None:
    if large[0] * small[1] != small[0] * large[1]:
        raise UsageError(
            f"{what}: the shape has {large[0]} / {large[1]}, needed {small[0] / small[1]:g}, as in the pair",
            "growing keeps the pair's head ratios: choose a shape with the same ratios",
        )


def _at_least(what: str, seen: int, needed: int) -> None:
    if seen < needed:
        raise UsageError(f"{what} is {seen}, needed: at least {needed} for this pair")


def _double(name: str, target: ModelSpec, draft: DraftSpec | None) -> PairShape:
    delta = target.delta
    shape = TargetShape(
        layers=2 * len(target.layers),
        width=2 * target.width,
        feed_forward=2 * target.feed_forward,
        heads=2 * target.heads,
        kv_heads=2 * target.kv_heads,
        key_heads=0 if delta is None else 2 * delta.key_heads,
        value_heads=0 if delta is None else 2 * delta.value_heads,
        vocab_size=2 * target.vocab_size,
    )
    if draft is None:
        return PairShape(name, shape, DraftShape(0, 0, 0, 0))
    layers, heads, kv_heads = 2 * len(draft.layers), 2 * draft.heads, 2 * draft.kv_heads
    return PairShape(name, shape, DraftShape(layers, 2 * draft.feed_forward, heads, kv_heads))
