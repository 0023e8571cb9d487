"""The shapes and settings of a DFlash draft, with any head, in either format. Imports no torch."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from bough.errors import ModelFileError, UnsupportedModel
from bough.gguf.header import TensorInfo, shorten
from bough.gguf.reader import GGUFFile
from bough.hub.names import ASSISTANT, DRAFT_ARCHITECTURES, is_draft_architecture
from bough.models.spec import ModelSpec

log = logging.getLogger(__name__)

LayerKind = Literal["full", "sliding"]
# The tensors of DFlash and of what each kind of draft adds, by GGUF's name: the name in a checkpoint, {} is a
# layer's number.
TENSORS: dict[str, dict[str, str]] = {
    "dflash": {
        "fc.weight": "fc.weight",
        "enc.output_norm.weight": "hidden_norm.weight",
        "output_norm.weight": "norm.weight",
        "blk.{}.attn_norm.weight": "layers.{}.input_layernorm.weight",
        "blk.{}.attn_q.weight": "layers.{}.self_attn.q_proj.weight",
        "blk.{}.attn_k.weight": "layers.{}.self_attn.k_proj.weight",
        "blk.{}.attn_v.weight": "layers.{}.self_attn.v_proj.weight",
        "blk.{}.attn_output.weight": "layers.{}.self_attn.o_proj.weight",
        "blk.{}.attn_q_norm.weight": "layers.{}.self_attn.q_norm.weight",
        "blk.{}.attn_k_norm.weight": "layers.{}.self_attn.k_norm.weight",
        "blk.{}.ffn_norm.weight": "layers.{}.post_attention_layernorm.weight",
        "blk.{}.ffn_gate.weight": "layers.{}.mlp.gate_proj.weight",
        "blk.{}.ffn_up.weight": "layers.{}.mlp.up_proj.weight",
        "blk.{}.ffn_down.weight": "layers.{}.mlp.down_proj.weight",
    },
    # Dynamic convolutions around each half of a layer, and the candidate selector.
    "dflash2": {
        "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
        "selector_successor.weight": "candidate_selector.successor_codebook",
        "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
        "blk.{}.attn_conv_base.weight": "layers.{}.attention_conv.base_kernel",
        "blk.{}.attn_conv_proj.weight": "layers.{}.attention_conv.kernel_projection.weight",
        "blk.{}.ffn_conv_base.weight": "layers.{}.mlp_conv.base_kernel",
        "blk.{}.ffn_conv_proj.weight": "layers.{}.mlp_conv.kernel_projection.weight",
    },
    # A score of each token after each other one, and how likely the next is accepted.
    "dspark": {
        "markov_w1.weight": "markov_head.markov_w1.weight",
        "markov_w2.weight": "markov_head.markov_w2.weight",
        "conf_proj.weight": "confidence_head.proj.weight",
        "conf_proj.bias": "confidence_head.proj.bias",
    },
    # What refines rows by the token before them: an MLP over candidates, or DSpine's messages.
    "mlp": {
        "refine_norm.weight": "ar_approximation.norm.weight",
        "refine_ug.weight": "ar_approximation.ug.weight",
        "refine_ug.bias": "ar_approximation.ug.bias",
        "refine_d.weight": "ar_approximation.d.weight",
    },
    "dspine": {
        "refine_message.weight": "injection.message.weight",
        "refine_receiver.weight": "injection.receiver_gate.weight",
        "refine_predecessor.weight": "injection.predecessor_gate.weight",
        "refine_gate.bias": "injection.bias",
        "refine_codes.weight": "transfer_codes",
        "blk.{}.refine_readout.weight": "injection.readouts.{}.weight",
        "blk.{}.refine_write.weight": "injection.writes.{}.weight",
    },
}
# The target's own are used; some checkpoints contain copies.
SHARED_TENSORS = ("token_embd.weight", "output.weight")
# Of a draft with a vocabulary of its own: the target's ids of its tokens, and its head.
OWN_IDS, _OWN_HEAD = "d2t", "output.weight"
_REFINED = 16  # candidates of a position that both kinds that refine rows were trained with
# Settings that change the backbone's computation, or the position that a row predicts, without a tensor of
# their own; with the only supported value.
_FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "use_swa": False, "shift_label": False}
# Whether rows of a block see only those before them, as z-lab, others and JetSpec spell it.
_CAUSAL = ("is_causal", "causal", "causal_head")
# Settings that change nothing here: of training, of the library that wrote the file, or said by the tensors.
_IDLE = (
    *("_name_or_path", "attention_bias", "attention_dropout", "auto_map", "bos_token_id", "dtype"),
    *("eos_token_id", "initializer_range", "max_position_embeddings", "max_window_layers", "model_type"),
    *("num_anchors", "pad_token_id", "sliding_window", "swa_window_size", "tie_word_embeddings"),
    *("torch_dtype", "transformers_version", "use_cache", "use_sliding_window"),
    # Of the heads that tensors show.
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("architectures", "dflash_config", "dspine_config", "treeflash_config", "transformer_layer_config"),
    *("selector_rank", "selector_top_k"),
    *("conv_kernel_size", "conv_group_size"),
)
_IDLE_PREFIXES = ("speculators_", "training_")
_LARGEST = 1 << 30
_LARGEST_NUMBER = 1e30  # float32 holds it
_MOST_LAYERS = 256
_MOST_CANDIDATES = 32  # of a position; with those of prompt lookup they are columns of a tree
MIN_BLOCK, MAX_BLOCK = 2, 64  # tokens of a block, the anchor included
# transformers' default: where layer_types is absent, layers from this one on may slide
_WINDOW_FROM = 28


@dataclass(frozen=True, slots=True)
class SecondSpec:
    """What DFlash2 adds to a draft."""

    kernel: int  # taps of a convolution
    group: int  # channels that share the dynamic part of a kernel
    rank: int  # of the selector's code books
    candidates: int  # of a position that the selector compares


@dataclass(frozen=True, slots=True)
class MarkovSpec:
    """What DSpark adds to a draft."""

    rank: int  # of the tables that score pairs of tokens
    confidence: bool  # whether there is a head that predicts acceptance


@dataclass(frozen=True, slots=True)
class RefineSpec:
    """What a head adds that refines a row by the token before it."""

    inner: int  # of the MLP, or of a message
    rank: int | None = None  # of DSpine's codes; None: an MLP over embeddings
    candidates: int = _REFINED  # of a position that it scores

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo]) -> "RefineSpec | None":
        """Return what the tensors show; None: there is no such head."""
        if (down := tensors.get("refine_d.weight")) is not None:
            return cls(inner=down.shape[-1])
        if (codes := tensors.get("refine_codes.weight")) is None:
            return None
        message = tensors.get("refine_message.weight")
        return cls(inner=0 if message is None else message.shape[0], rank=codes.shape[-1])


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
    vocab_size: int | None = None  # rows of the embedding it was trained with; None: the file does not say
    draft_vocab_size: int | None = None  # of its own head; None: that of the target
    reduced: bool = False  # whether its head has a vocabulary of its own, and a table of the target's ids
    second: SecondSpec | None = None  # of a DFlash2 draft
    markov: MarkovSpec | None = None  # of a DSpark draft
    refine: RefineSpec | None = None  # of a DSpine draft, or one with an MLP over candidates
    # Whether a row predicts the token after its own position, the anchor's row too; None: by the kind.
    from_anchor: bool | None = None

    @property
    def depth(self) -> int:
        """Positions that one call proposes for."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def with_heads(self, tensors: Mapping[str, TensorInfo], *, causal: bool | None = None) -> "DraftSpec":
        """Return the spec with the heads that the tensors show: configs do not tell DSpark from DFlash.

        `causal` overrides the file: messages of DSpine go from row to row of a block that is causal.
        """
        if (ids := tensors.get(OWN_IDS)) is not None and not self.reduced:
            size = self.draft_vocab_size or ids.elements
            return replace(self, draft_vocab_size=size, reduced=True).with_heads(tensors, causal=causal)
        table = tensors.get("markov_w1.weight")
        if table is None and self.second is None and (refine := RefineSpec.of(tensors)) is not None:
            if self.reduced or self.from_anchor:
                raise UnsupportedModel(
                    f"{self.source}: the draft refines rows by the token before them and has "
                    f"{'a vocabulary of its own' if self.reduced else 'sample_from_anchor'}, needed neither"
                )
            if refine.rank is not None and causal is None:
                causal = True
            kinds = self.causal if causal is None else (causal,) * len(self.layers)
            return replace(self, refine=refine, causal=kinds, from_anchor=False)
        if table is None:
            if self.from_anchor:
                raise UnsupportedModel(
                    f"{self.source}: sample_from_anchor is True, "
                    "needed False for a draft without a Markov head"
                )
            return replace(self, from_anchor=False)
        markov = MarkovSpec(rank=table.shape[-1], confidence="conf_proj.weight" in tensors)
        return replace(self, markov=markov, from_anchor=self.from_anchor is not False)

    def check_target(self, target: ModelSpec) -> None:
        """Raise for a target that this draft was not trained for, naming both values."""
        depth = len(target.layers)
        if self.width != target.width:
            raise self._mismatch("hidden_size", self.width, f"the target's width, {target.width}")
        if max(self.taps) >= depth:
            raise self._mismatch(
                "target_layer_ids", list(self.taps), f"layers of the target, 0 to {depth - 1}"
            )
        if not self.reduced and self.draft_vocab_size not in (None, target.vocab_size):
            raise self._mismatch(
                "draft_vocab_size",
                self.draft_vocab_size,
                f"the rows of the target's embedding, {target.vocab_size}, or a table {OWN_IDS} of its ids",
            )
        if self.vocab_size not in (None, target.vocab_size):
            raise self._mismatch(
                "vocab_size", self.vocab_size, f"the rows of the target's embedding, {target.vocab_size}"
            )
        if self.mask_id >= target.vocab_size:
            raise self._mismatch(
                "mask_token_id",
                self.mask_id,
                f"a row of the target's embedding, 0 to {target.vocab_size - 1}",
            )

    def check_tensors(self, tensors: Mapping[str, TensorInfo], target: ModelSpec, source: str) -> None:
        """Raise for tensors (named as in a GGUF file) that would otherwise be silently ignored."""
        refined = "mlp" if self.refine is None or self.refine.rank is None else "dspine"
        heads = {"dflash2": self.second, "dspark": self.markov, refined: self.refine}
        kinds = ["dflash", *(kind for kind, head in heads.items() if head is not None)]
        parts = [name for kind in kinds for name in TENSORS[kind]]
        names = {name.format(layer) for name in parts for layer in range(len(self.layers))}
        # llama.cpp writes the base kernels without a suffix.
        names |= {name.removesuffix(".weight") for name in names if "_conv_base" in name}
        shape, prefix = (target.vocab_size, target.width), ()
        if self.reduced:
            names |= {OWN_IDS, _OWN_HEAD}
            prefix = (_OWN_HEAD,)
        for name, info in tensors.items():
            if name in SHARED_TENSORS and name not in prefix and info.shape != shape:
                raise self._mismatch(f"the shape of {name}", list(info.shape), f"the target's, {list(shape)}")
            if name not in names and name not in SHARED_TENSORS:
                raise unknown_tensor(source, name, layers=len(self.layers))

    def with_logits(self, target: ModelSpec) -> "DraftSpec":
        """Return the spec with the target's scale and cap of logits, where the file says neither."""
        if (self.output_multiplier, self.softcap) != (1.0, 0.0):
            return self
        return replace(self, output_multiplier=target.logits.scale, softcap=target.logits.cap)

    def _mismatch(self, key: str, seen: Any, needed: str) -> UnsupportedModel:
        return _mismatch(self.source, key, seen, needed)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, source: str, target_depth: int, causal: bool | None = None
    ) -> "DraftSpec":
        """From a checkpoint's config.json, old or new: settings may stand at the top or in `dflash_config`.

        `causal` overrides what the file says of the sliding layers.
        """
        nested = FileSettings(source, config).table("dflash_config")
        # Where the speculators library keeps the backbone's settings.
        backbone = FileSettings(source, config).table("transformer_layer_config")
        values = {k: v for table in (config, nested) for k, v in table.items() if v is not None}
        keys = FileSettings(source, {**backbone, **values})
        _check_architecture(keys)
        for key, needed in _FIXED.items():
            if keys.get(key) not in (None, needed):
                raise UnsupportedModel(f"{source}: {key} is {shorten(keys.values[key])}, needed {needed!r}")
        if (trained := keys.optional("num_target_layers")) not in (None, target_depth):
            raise _mismatch(source, "num_target_layers", trained, f"the target's layers, {target_depth}")
        depth = keys.whole("num_hidden_layers", high=_MOST_LAYERS)
        layers = _config_layers(keys, depth)
        heads, width = keys.whole("num_attention_heads"), keys.whole("hidden_size")
        for key in _CAUSAL:
            causal = keys.flag(key) if causal is None else causal
        if causal is None and config.get("architectures") == [ASSISTANT]:
            causal = False  # transformers' class has no flag for it
        taps = keys.layer_ids("target_layer_ids")
        if taps is None and (after := keys.layer_ids("aux_hidden_state_layer_ids", low=1)) is not None:
            taps = [layer - 1 for layer in after]
        spec = cls(
            source=source,
            layers=layers,
            causal=_causality(layers, causal),
            window=keys.whole("sliding_window") if "sliding" in layers else 0,
            width=width,
            feed_forward=keys.whole("intermediate_size"),
            heads=heads,
            kv_heads=keys.whole("num_key_value_heads", heads),
            head_dim=keys.whole("head_dim", width // heads),
            rope_theta=_config_rope(keys),
            eps=keys.number("rms_norm_eps", 1e-6),
            block_size=keys.whole("block_size", 16),
            taps=tuple(default_taps(target_depth, depth) if taps is None else taps),
            mask_id=keys.whole("mask_token_id", low=0),
            embedding_scale=keys.number("input_embedding_scale", 1.0),
            output_multiplier=keys.number("output_multiplier", 1.0),
            softcap=keys.number("final_logit_softcapping", 0.0, zero=True),
            vocab_size=keys.optional("vocab_size"),
            draft_vocab_size=keys.optional("draft_vocab_size"),
            second=_second(keys, "") if config.get("architectures") == [DRAFT_ARCHITECTURES[1]] else None,
            from_anchor=keys.flag("sample_from_anchor"),
        )
        keys.report_others(_CAUSAL)
        return spec

    @classmethod
    def from_gguf(
        cls, file: GGUFFile, *, causal: bool | None = None, target_depth: int | None = None
    ) -> "DraftSpec":
        """From llama.cpp's `dflash` files, whose layer ids count from one.

        A file made from an old config names no taps: those are then the usual ones of a target this deep.
        """
        source, keys = str(file.path), FileSettings(str(file.path), file.metadata)
        if file.architecture != "dflash":
            raise UnsupportedModel(
                f"{source}: general.architecture is {shorten(file.architecture)}, needed 'dflash' for a draft"
            )
        depth = keys.whole("dflash.block_count", high=_MOST_LAYERS)
        layers, window = _gguf_layers(keys, depth)
        head_dim = keys.whole("dflash.attention.key_length")
        fixed = {
            "dflash.attention.value_length": head_dim,
            "dflash.rope.dimension_count": head_dim,
            "dflash.rope.scaling.type": "none",
            "dflash.hidden_activation": "silu",
            "dflash.embedding_scale": 1.0,
        }
        for key, needed in fixed.items():
            if file.metadata.get(key) not in (None, needed):
                raise UnsupportedModel(f"{source}: {key} is {shorten(file.metadata[key])}, needed {needed!r}")
        taps = keys.layer_ids("dflash.target_layers", low=1)
        if taps is None and target_depth is not None:
            taps = [layer + 1 for layer in default_taps(target_depth, depth)]
        if taps is None:
            raise keys.bad("dflash.target_layers", "a list of the target's layers")
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        mask = "tokenizer.ggml.mask_token_id"
        if mask not in file.metadata and "dflash.mask_token_id" in file.metadata:
            mask = "dflash.mask_token_id"  # in files from before June 2026
        spec = cls(
            source=source,
            layers=layers,
            causal=_causality(layers, keys.flag("dflash.attention.causal") if causal is None else causal),
            window=window,
            width=keys.whole("dflash.embedding_length"),
            feed_forward=keys.whole("dflash.feed_forward_length"),
            heads=keys.whole("dflash.attention.head_count"),
            kv_heads=keys.whole("dflash.attention.head_count_kv"),
            head_dim=head_dim,
            rope_theta=keys.number("dflash.rope.freq_base"),
            eps=keys.number("dflash.attention.layer_norm_rms_epsilon"),
            block_size=keys.whole("dflash.block_size"),
            taps=tuple(layer - 1 for layer in taps),
            mask_id=keys.whole(mask, low=0),
            output_multiplier=keys.number("dflash.logit_scale", 1.0),
            softcap=keys.number("dflash.final_logit_softcapping", 0.0, zero=True),
            vocab_size=keys.optional("dflash.vocab_size") or (len(tokens) if type(tokens) is list else None),
            second=_second(keys, "dflash.") if "dflash.selector_rank" in file.metadata else None,
            from_anchor=keys.flag("dflash.sample_from_anchor"),
        )
        keys.report_others(("dflash.attention.causal", "dflash.context_length", *fixed), "dflash.")
        return spec

    def __post_init__(self) -> None:
        size, group = self.block_size, self.second.group if self.second is not None else 1
        least = min(self.taps, default=-1)
        faults = (
            ("num_attention_heads", self.heads, self.heads % self.kv_heads, f"a multiple of {self.kv_heads}"),
            ("head_dim", self.head_dim, self.head_dim % 2, "an even number"),
            ("block_size", size, not MIN_BLOCK <= size <= MAX_BLOCK, f"between {MIN_BLOCK} and {MAX_BLOCK}"),
            ("target_layer_ids", list(self.taps), least < 0, "layers from 0"),
            ("conv_group_size", group, self.width % group, f"a divisor of {self.width}"),
        )
        for key, seen, wrong, needed in faults:
            if wrong:
                raise UnsupportedModel(f"{self.source}: {key} is {seen}, needed {needed}")


@cache
def _warn_once(text: str) -> None:
    """Files are read more than once: for a plan, for the weights."""
    log.warning("%s: if it accepts less than expected, this may be why", text)


def _mismatch(source: str, key: str, seen: Any, needed: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{source}: the draft does not fit the target: {key} is {seen}, needed {needed}",
        "bough list shows which draft belongs to which target; `draft` none decodes without one",
    )


def unknown_tensor(source: str, name: str, *, layers: int | None = None) -> UnsupportedModel:
    depth = "" if layers is None else f" of {layers} layers"
    return UnsupportedModel(
        f"{source}: tensor {shorten(name)} is not part of a DFlash draft{depth}",
        "other heads are not supported: take a DFlash, DFlash2 or DSpark draft",
    )


def default_taps(target_depth: int, draft_depth: int) -> list[int]:
    """Return the taps of a config that names no layers."""
    if draft_depth == 1:
        return [target_depth // 2]
    return [round(1 + i * (target_depth - 4) / (draft_depth - 1)) for i in range(draft_depth)]


def _check_architecture(keys: "FileSettings") -> None:
    names = keys.get("architectures")
    if names is None or names == []:
        return
    if type(names) is not list or not is_draft_architecture(names[0]):
        seen = shorten(names[0] if type(names) is list else names)
        raise UnsupportedModel(
            f"{keys.source}: architectures is {seen}, needed {' or '.join(map(repr, DRAFT_ARCHITECTURES))}",
            "take a DFlash, DFlash2 or DSpark draft",
        )


def _second(keys: "FileSettings", prefix: str) -> SecondSpec:
    """Return the settings of DFlash2, by default those of the published draft."""
    return SecondSpec(
        kernel=keys.whole(f"{prefix}conv_kernel_size", 2, high=MAX_BLOCK),
        group=keys.whole(f"{prefix}conv_group_size", 16),
        rank=keys.whole(f"{prefix}selector_rank", 256),
        candidates=keys.whole(f"{prefix}selector_top_k", 16, low=4, high=_MOST_CANDIDATES),
    )


def _config_layers(keys: "FileSettings", depth: int) -> tuple[LayerKind, ...]:
    kinds = keys.get("layer_types")
    if kinds is None:
        slides = keys.flag("use_sliding_window") and keys.optional("sliding_window")
        first = keys.whole("max_window_layers", _WINDOW_FROM, low=0) if slides else depth
        return tuple("sliding" if layer >= first else "full" for layer in range(depth))
    names: dict[Any, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
    if type(kinds) is not list or len(kinds) != depth or any(type(kind) is not str for kind in kinds):
        raise keys.bad("layer_types", f"a list of {depth}, one kind for each layer")
    for kind in kinds:
        if kind not in names:
            raise keys.bad("layer_types", f"full_attention or sliding_attention, not {shorten(kind)}")
    return tuple(names[kind] for kind in kinds)


def _config_rope(keys: "FileSettings") -> float:
    theta = keys.number("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        rope = FileSettings(f"{keys.source}: {key}", _of_all_layers(keys.table(key)))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedModel(f"{rope.source}: rope_type is {shorten(kind)}, needed 'default'")
        partial = rope.get("partial_rotary_factor") not in (None, 1)
        if partial or any(isinstance(value, dict) for value in rope.values.values()):
            seen = shorten(dict(rope.values))
            raise UnsupportedModel(
                f"{keys.source}: {key} is {seen}, needed one for whole heads of all layers"
            )
        theta = rope.number("rope_theta", theta)
    return theta


def _of_all_layers(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings that are given for each kind of layer, and equal, as one; others as they are."""
    kinds = list(rope.values())
    equal = bool(kinds) and all(isinstance(kind, dict) and kind == kinds[0] for kind in kinds)
    return kinds[0] if equal else rope


def _gguf_layers(keys: "FileSettings", depth: int) -> tuple[tuple[LayerKind, ...], int]:
    """Return the kinds of the layers and the window of the sliding ones."""
    window = keys.whole("dflash.attention.sliding_window", 0, low=0)
    key = "dflash.attention.sliding_window_pattern"
    pattern = keys.get(key)
    if pattern is None and not window:
        return ("full",) * depth, 0
    if type(pattern) is not list or len(pattern) != depth or any(type(flag) is not bool for flag in pattern):
        raise keys.bad(key, f"a list of {depth}, true or false for each layer")
    if any(pattern) and not window:
        raise keys.bad("dflash.attention.sliding_window", f"a window for {sum(pattern)} sliding layers")
    return tuple("sliding" if flag else "full" for flag in pattern), window if any(pattern) else 0


def _causality(layers: tuple[LayerKind, ...], causal: bool | None) -> tuple[bool, ...]:
    """Return `causal` for all layers; by default sliding layers are causal and full ones are not."""
    return tuple(kind == "sliding" if causal is None else causal for kind in layers)


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Untrusted values by key, checked when they are read; null counts as absent."""

    source: str
    values: Mapping[str, Any]
    read: set[str] = field(default_factory=set)  # keys that were asked for

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.values.get(key, default)

    def report_others(self, known: tuple[str, ...] = (), prefix: str = "") -> None:
        """Warn of settings with a value that were not read: they may change what the draft computes."""
        others = [
            key
            for key, value in self.values.items()
            if key.startswith(prefix) and value is not None and value is not False and value != {}
            if key not in self.read and key not in known
            if key.removeprefix(prefix) not in _IDLE and not key.startswith(_IDLE_PREFIXES)
        ]
        if others:
            names = ", ".join(shorten(key) for key in sorted(others))
            _warn_once(f"{self.source}: the draft's settings {names} are not known here and not used")

    def whole(self, key: str, default: int | None = None, *, low: int = 1, high: int = _LARGEST) -> int:
        value: Any = self.get(key)
        if value is None:
            value = default
        if type(value) is not int or not low <= value <= high:
            raise self.bad(key, f"a whole number from {low} to {high}")
        return value

    def optional(self, key: str) -> int | None:
        return None if self.get(key) is None else self.whole(key)

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        value: Any = self.get(key)
        if value is None:
            value = default
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if numeric and (0 < value <= _LARGEST_NUMBER or (zero and value == 0)):
            return float(value)
        raise self.bad(key, f"a number {'from' if zero else 'above'} 0 to {_LARGEST_NUMBER:g}")

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self.bad(key, "true or false")
        return value

    def layer_ids(self, key: str, *, low: int = 0) -> list[int] | None:
        value = self.get(key)
        if value is None:
            return None
        sound = type(value) is list and 0 < len(value) <= _MOST_LAYERS
        if not sound or any(type(item) is not int or not low <= item <= _LARGEST for item in value):
            raise self.bad(key, f"1 to {_MOST_LAYERS} whole numbers from {low}")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return value

    def bad(self, key: str, needed: str) -> ModelFileError:
        value = self.get(key)
        seen = "missing" if value is None else shorten(value)
        return ModelFileError(f"{self.source}: {key} is {seen}, needed {needed}")
