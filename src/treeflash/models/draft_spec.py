"""What a DFlash checkpoint says about itself, in either of its formats. Knows no weights and no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from treeflash.errors import ModelFileError, UnsupportedModel
from treeflash.gguf.reader import GGUFFile
from treeflash.models.spec import ModelSpec

LayerKind = Literal["full", "sliding"]
# Heads and norms that change what the backbone computes: a draft that has them must not be run without them.
_FOREIGN = (
    "markov_w1",
    "markov_head",
    "candidate_selector",
    "selector_",
    "attention_conv",
    "conv_base",
    "d2t",
)


@dataclass(frozen=True, slots=True)
class DraftSpec:
    source: str  # the file, for messages
    layers: tuple[LayerKind, ...]
    causal: tuple[bool, ...]  # rows of the block see only rows before them, per layer
    window: int  # of the sliding layers
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    block_size: int  # the anchor included
    taps: tuple[int, ...]  # target layers whose outputs are read, in the order of concatenation
    mask_id: int  # a row of the target's embedding
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float = 0.0

    def check_target(self, target: ModelSpec) -> None:
        """Refuses a target that this draft was not trained for, naming both values."""
        depth = len(target.layers)
        if self.width != target.width:
            raise self._mismatch("hidden_size", self.width, f"the target's width, {target.width}")
        if max(self.taps) >= depth:
            raise self._mismatch(
                "target_layer_ids", list(self.taps), f"layers of the target, 0 to {depth - 1}"
            )
        if self.mask_id >= target.vocab_size:
            raise self._mismatch(
                "mask_token_id",
                self.mask_id,
                f"a row of the target's embedding, 0 to {target.vocab_size - 1}",
            )

    def _mismatch(self, key: str, seen: Any, needed: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.source}: the draft does not fit the target: {key} is {seen}, needed {needed}",
            "treeflash list shows which draft belongs to which target; --draft none decodes without one",
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, source: str, target_depth: int, causal: bool | None = None
    ) -> "DraftSpec":
        """From a checkpoint's config.json, old or new: settings may stand at the top or in `dflash_config`.

        `causal` overrides what the file says of the sliding layers.
        """
        nested = config.get("dflash_config") or {}
        keys = _Config(source, {**config, **{k: v for k, v in nested.items() if v is not None}})
        architecture = (config.get("architectures") or ["DFlashDraftModel"])[0]
        if architecture != "DFlashDraftModel":
            raise UnsupportedModel(f"{source}: architectures is {architecture}, needed DFlashDraftModel")
        depth = keys.count("num_hidden_layers")
        kinds = keys.values.get("layer_types") or ["full_attention"] * depth
        if len(kinds) != depth or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise keys.bad("layer_types", f"full_attention or sliding_attention for each of {depth} layers")
        layers: tuple[LayerKind, ...] = tuple(
            "sliding" if kind == "sliding_attention" else "full" for kind in kinds
        )
        rope = keys.values.get("rope_parameters") or keys.values.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedModel(f"{source}: rope type is {kind!r}, needed default")
        heads, width = keys.count("num_attention_heads"), keys.count("hidden_size")
        if causal is None:
            causal = keys.values.get("is_causal", keys.values.get("causal"))
        return cls(
            source=source,
            layers=layers,
            causal=_causality(layers, causal),
            window=keys.count("sliding_window") if "sliding" in layers else 0,
            width=width,
            feed_forward=keys.count("intermediate_size"),
            heads=heads,
            kv_heads=keys.count("num_key_value_heads", heads),
            head_dim=keys.count("head_dim", width // heads),
            rope_theta=float(rope.get("rope_theta") or keys.values.get("rope_theta") or 10000.0),
            eps=float(keys.values.get("rms_norm_eps", 1e-6)),
            block_size=keys.count("block_size", 16),
            taps=tuple(keys.values.get("target_layer_ids") or default_taps(target_depth, depth)),
            mask_id=keys.count("mask_token_id"),
            embedding_scale=float(keys.values.get("input_embedding_scale") or 1.0),
            output_multiplier=float(keys.values.get("output_multiplier") or 1.0),
            softcap=float(keys.values.get("final_logit_softcapping") or 0.0),
        )

    @classmethod
    def from_gguf(cls, file: GGUFFile, *, causal: bool | None = None) -> "DraftSpec":
        """From llama.cpp's `dflash` files, whose layer ids count from one."""
        source = str(file.path)
        if file.architecture != "dflash":
            raise UnsupportedModel(
                f"{source}: general.architecture is {file.architecture!r}, needed 'dflash' for a draft"
            )
        depth = file.require("dflash.block_count", int)
        pattern = file.get("dflash.attention.sliding_window_pattern", list, [False] * depth)
        if len(pattern) != depth:
            raise UnsupportedModel(
                f"{source}: dflash.attention.sliding_window_pattern has {len(pattern)} entries, not {depth}"
            )
        layers: tuple[LayerKind, ...] = tuple("sliding" if flag else "full" for flag in pattern)
        if causal is None:
            causal = file.get("dflash.attention.causal", bool, None)
        mask = file.get("tokenizer.ggml.mask_token_id", int, None)
        return cls(
            source=source,
            layers=layers,
            causal=_causality(layers, causal),
            window=file.require("dflash.attention.sliding_window", int) if "sliding" in layers else 0,
            width=file.require("dflash.embedding_length", int),
            feed_forward=file.require("dflash.feed_forward_length", int),
            heads=file.require("dflash.attention.head_count", int),
            kv_heads=file.require("dflash.attention.head_count_kv", int),
            head_dim=file.require("dflash.attention.key_length", int),
            rope_theta=float(file.require("dflash.rope.freq_base", float)),
            eps=float(file.require("dflash.attention.layer_norm_rms_epsilon", float)),
            block_size=file.require("dflash.block_size", int),
            taps=tuple(layer - 1 for layer in file.require("dflash.target_layers", list)),
            # Files from before June 2026 have the mask under the other key.
            mask_id=mask if mask is not None else file.require("dflash.mask_token_id", int),
        )

    def __post_init__(self) -> None:
        faults = [
            (
                "num_attention_heads",
                self.heads,
                self.heads % self.kv_heads == 0,
                f"a multiple of {self.kv_heads}",
            ),
            ("head_dim", self.head_dim, self.head_dim % 2 == 0, "an even number"),
            ("block_size", self.block_size, 2 <= self.block_size <= 64, "between 2 and 64"),
            ("target_layer_ids", list(self.taps), bool(self.taps) and min(self.taps) >= 0, "layers from 0"),
            ("mask_token_id", self.mask_id, self.mask_id >= 0, "a token id"),
            (
                "sliding_window",
                self.window,
                "sliding" not in self.layers or self.window > 0,
                "a positive number",
            ),
        ]
        for key, seen, sound, needed in faults:
            if not sound:
                raise UnsupportedModel(f"{self.source}: {key} is {seen}, needed {needed}")


def check_tensor_names(names: list[str], source: str) -> None:
    """Refuses drafts whose extra parts we would otherwise silently leave out."""
    for name in names:
        for part in _FOREIGN:
            if part in name:
                raise UnsupportedModel(
                    f"{source}: tensor {name} belongs to a draft head that is not supported",
                    "take a plain DFlash draft of the first kind",
                )


def default_taps(target_depth: int, draft_depth: int) -> list[int]:
    """Where a config names no layers."""
    if draft_depth == 1:
        return [target_depth // 2]
    return [round(1 + i * (target_depth - 4) / (draft_depth - 1)) for i in range(draft_depth)]


def _causality(layers: tuple[LayerKind, ...], causal: bool | None) -> tuple[bool, ...]:
    """Unless the file says so, sliding layers are causal inside the block and full ones are not."""
    return tuple(kind == "sliding" if causal is None else causal for kind in layers)


@dataclass(frozen=True, slots=True)
class _Config:
    source: str
    values: Mapping[str, Any]

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(key, "a whole number")
        return value

    def bad(self, key: str, needed: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {key} is {self.values.get(key)!r}, needed {needed}")
