"""The model families that can be converted: sizes from config.json, and the GGUF metadata."""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from bough.convert.checkpoint import HFConfig
from bough.errors import UnsupportedModel
from bough.gguf.writer import ValueType

# key, value, kind (None: the one the writer picks for the Python type)
Entry = tuple[str, Any, ValueType | None]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The differences between the supported architectures."""

    architecture: str
    hybrid: bool = False
    experts: bool = False
    shared_expert: bool = False
    head_norms: bool = False
    qkv_biases: bool = False
    # llama.cpp rotates adjacent pairs for llama and halves for the others
    interleaved_rope: bool = False
    # sliding layers with rope between full ones without, and all that comes with them in Muse-Glimmer
    sliding: bool = False


_QWEN35 = ModelFamily("qwen35", hybrid=True, head_norms=True)
_QWEN35_MOE = ModelFamily("qwen35moe", hybrid=True, experts=True, shared_expert=True, head_norms=True)
_LLAMA = ModelFamily("llama", interleaved_rope=True)
_MUSE = ModelFamily("muse-glimmer", interleaved_rope=True, sliding=True)
# With the classes and the model types that configurations name.
_FAMILIES = (
    (_QWEN35, "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration", "qwen3_5 qwen3_5_text"),
    (_QWEN35_MOE, "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe qwen3_5_moe_text"),
    (ModelFamily("qwen3", head_norms=True), "Qwen3ForCausalLM", "qwen3"),
    (ModelFamily("qwen3moe", experts=True, head_norms=True), "Qwen3MoeForCausalLM", "qwen3_moe"),
    (ModelFamily("qwen2", qkv_biases=True), "Qwen2ForCausalLM", "qwen2"),
    (_LLAMA, "LlamaForCausalLM", "llama"),
    (_MUSE, "MuseGlimmerForConditionalGeneration", "muse_glimmer muse_glimmer_text"),
)
_BY_CLASS = {name: family for family, classes, _ in _FAMILIES for name in classes.split()}
_BY_TYPE = {name: family for family, _, types in _FAMILIES for name in types.split()}


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Sizes of the gated delta layers; every interval-th layer has full attention instead."""

    interval: int
    key_heads: int
    value_heads: int
    # of a key and of a value head
    head_dim: int
    kernel: int


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    count: int
    used: int
    feed_forward: int
    shared_feed_forward: int  # 0: no shared expert


@dataclass(frozen=True, slots=True)
class SlidingSizes:
    """What Muse-Glimmer has beside its shapes."""

    window: int
    slides: tuple[bool, ...]  # a flag for each layer
    query_scale: float  # of queries after their norm
    logit_scale: float
    logit_cap: float


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The values of config.json that determine tensor shapes and metadata."""

    family: ModelFamily
    layers: int
    # multi-token prediction layers after the trunk, 0 or 1
    mtp_layers: int
    width: int
    vocabulary: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    # per frequency: the divisor of Llama 3's rope scaling; empty without scaling
    rope_factors: tuple[float, ...]
    # frequencies for time, height, width and an unused section; empty for text-only rope
    rope_sections: tuple[int, ...]
    theta: float
    epsilon: float
    tied: bool
    feed_forward: int
    hybrid: Hybrid | None
    experts: ExpertSizes | None
    sliding: SlidingSizes | None

    @property
    def interval(self) -> int:
        return self.hybrid.interval if self.hybrid else 1


def family_of(config: HFConfig) -> ModelFamily:
    """Return the family that the configuration names by class, or by model_type if it names no class."""
    classes = config.get("architectures")
    if isinstance(classes, list) and classes:
        family, seen = _BY_CLASS.get(str(classes[0])), f"architecture {classes[0]}"
    else:
        family, seen = _BY_TYPE.get(str(config.get("model_type"))), f"model_type {config.get('model_type')}"
    if family is None:
        raise UnsupportedModel(
            f"{config.source}: {seen} is not supported, needed: one of {', '.join(_BY_CLASS)}"
        )
    return family


def read_sizes(config: HFConfig, *, mtp_layers: int = 0) -> ModelSizes:
    """Return the sizes in `config`; raise for variants that are not supported."""
    family = family_of(config)
    _refuse_variants(config)
    if mtp_layers > 1 or (mtp_layers and not family.hybrid):
        _refuse(config, f"{mtp_layers} prediction layers in {family.architecture}", "at most one, in Qwen3.5")
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", width // heads)
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        _refuse(config, f"{heads} attention heads", f"a multiple of {kv_heads}, the KV heads")
    rope = _rope(config)
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", _share(family)))
    if (share != 1 and not family.hybrid) or not 0 < share <= 1 or head_dim * share % 2:
        needed = "on a part of it, an even number" if family.hybrid else "on all of it, an even number"
        _refuse(config, f"rope on {share} of {head_dim}", needed)
    layers = config.integer("num_hidden_layers")
    return ModelSizes(
        family=family,
        layers=layers,
        mtp_layers=mtp_layers,
        width=width,
        vocabulary=config.integer("vocab_size"),
        context=config.integer("max_position_embeddings"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * share),
        rope_factors=_rope_factors(config, family, rope, head_dim=head_dim, theta=theta),
        rope_sections=_sections(config, rope) if family.hybrid else (),
        theta=theta,
        epsilon=config.number("rms_norm_eps"),
        tied=config.flag("tie_word_embeddings", False),
        feed_forward=0 if family.experts else config.integer("intermediate_size"),
        hybrid=_hybrid(config, layers) if family.hybrid else None,
        experts=_experts(config, family) if family.experts else None,
        sliding=_sliding(config, layers) if family.sliding else None,
    )


def metadata(sizes: ModelSizes) -> list[Entry]:
    """Return the architecture's metadata, typed as in llama.cpp's files."""
    entries: list[Entry] = [
        ("block_count", sizes.layers + sizes.mtp_layers, None),
        ("context_length", sizes.context, None),
        ("embedding_length", sizes.width, None),
    ]
    if not sizes.experts:
        entries.append(("feed_forward_length", sizes.feed_forward, None))
    entries += [
        ("attention.head_count", sizes.heads, None),
        ("attention.head_count_kv", sizes.kv_heads, None),
        ("attention.key_length", sizes.head_dim, None),
        ("attention.value_length", sizes.head_dim, None),
        ("attention.layer_norm_rms_epsilon", sizes.epsilon, None),
        ("rope.freq_base", sizes.theta, None),
    ]
    if sizes.hybrid or sizes.family.interleaved_rope:
        entries.append(("rope.dimension_count", sizes.rotary_dim, None))
    if sizes.rope_sections:
        entries.append(("rope.dimension_sections", list(sizes.rope_sections), ValueType.INT32))
    if sizes.family is _LLAMA:
        entries.append(("vocab_size", sizes.vocabulary, None))
    if sizes.hybrid:
        entries += [
            ("ssm.conv_kernel", sizes.hybrid.kernel, None),
            ("ssm.state_size", sizes.hybrid.head_dim, None),
            ("ssm.group_count", sizes.hybrid.key_heads, None),
            ("ssm.time_step_rank", sizes.hybrid.value_heads, None),
            ("ssm.inner_size", sizes.hybrid.value_heads * sizes.hybrid.head_dim, None),
            ("full_attention_interval", sizes.hybrid.interval, None),
        ]
    if sizes.experts:
        entries += [
            ("expert_count", sizes.experts.count, None),
            ("expert_used_count", sizes.experts.used, None),
            ("expert_feed_forward_length", sizes.experts.feed_forward, None),
        ]
        if sizes.experts.shared_feed_forward:
            shared = sizes.experts.shared_feed_forward
            entries.append(("expert_shared_feed_forward_length", shared, None))
    if sliding := sizes.sliding:
        entries += [
            ("attention.sliding_window", sliding.window, None),
            ("attention.sliding_window_pattern", list(sliding.slides), ValueType.BOOL),
            ("logit_scale", sliding.logit_scale, None),
            ("final_logit_softcapping", sliding.logit_cap, None),
        ]
    if sizes.mtp_layers:
        entries.append(("nextn_predict_layers", sizes.mtp_layers, None))
    return [(f"{sizes.family.architecture}.{key}", value, kind) for key, value, kind in entries]


def llama3_factors(
    *, factor: float, low: float, high: float, context: float, dimensions: int, theta: float
) -> tuple[float, ...]:
    """Return the divisors of the dimensions / 2 rope frequencies under Llama 3's scaling."""
    factors = []
    for pair in range(0, dimensions, 2):
        wavelength = 2 * math.pi * theta ** (pair / dimensions)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def _refuse(config: HFConfig, seen: str, needed: str, hint: str = "") -> NoReturn:
    raise UnsupportedModel(f"{config.source}: {seen}, needed: {needed}", hint)


def _refuse_variants(config: HFConfig) -> None:
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        _refuse(
            config, f"weights quantised as {method}", "BF16, F16 or F32", "convert the original checkpoint"
        )
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key, "silu") != "silu":
            _refuse(config, f"{key} {config.get(key)}", "silu")
    if config.flag("use_sliding_window", False):
        _refuse(config, "use_sliding_window true", "attention to the whole context")


def _share(family: ModelFamily) -> float:
    """Return the share of a head's dimensions that rope rotates."""
    return 0.25 if family.hybrid else 1.0


def _rope(config: HFConfig) -> HFConfig:
    rope = config.get("rope_parameters", config.get("rope_scaling", {}))
    if not isinstance(rope, dict):
        _refuse(config, f"rope parameters {rope}", "an object")
    return HFConfig(rope, config.source)


def _rope_factors(
    config: HFConfig, family: ModelFamily, rope: HFConfig, *, head_dim: int, theta: float
) -> tuple[float, ...]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ()
    if kind != "llama3" or family is not _LLAMA:
        allowed = "default or llama3" if family is _LLAMA else "default"
        _refuse(config, f"rope type {kind} for {family.architecture}", allowed)
    return llama3_factors(
        factor=rope.number("factor"),
        low=rope.number("low_freq_factor"),
        high=rope.number("high_freq_factor"),
        context=rope.number("original_max_position_embeddings"),
        dimensions=head_dim,
        theta=theta,
    )


def _sections(config: HFConfig, rope: HFConfig) -> tuple[int, ...]:
    # the sections of every published Qwen3.5; a text-only configuration may omit them
    sections = rope.get("mrope_section", [11, 11, 10])
    if not isinstance(sections, list) or len(sections) > 4 or not all(isinstance(n, int) for n in sections):
        _refuse(config, f"mrope_section {sections}", "up to four whole numbers")
    return (*sections, 0, 0, 0, 0)[:4]


def _hybrid(config: HFConfig, layers: int) -> Hybrid:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        interval = config.integer("full_attention_interval", 4)
    else:
        interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
        regular = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        if kinds != regular:
            _refuse(config, "irregular layer_types", f"full attention in every n-th of {layers} layers")
    hybrid = Hybrid(
        interval=interval,
        key_heads=config.integer("linear_num_key_heads"),
        value_heads=config.integer("linear_num_value_heads"),
        head_dim=config.integer("linear_key_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
    )
    value_dim = config.integer("linear_value_head_dim")
    if value_dim != hybrid.head_dim:
        _refuse(config, f"linear_value_head_dim {value_dim}", f"{hybrid.head_dim}, the key heads' size")
    if hybrid.value_heads % hybrid.key_heads:
        _refuse(
            config, f"{hybrid.value_heads} linear value heads", f"a multiple of {hybrid.key_heads} key heads"
        )
    return hybrid


def _sliding(config: HFConfig, layers: int) -> SlidingSizes:
    known = ("sliding_attention", "full_attention")
    usual = [known[(layers - 1 - layer) % 4 == 0] for layer in range(layers)]
    kinds, thetas = config.get("layer_types", usual), config.get("layer_rope_theta")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        _refuse(config, f"layer_types {kinds}", f"{' or '.join(known)} for each of {layers} layers")
    slides = tuple(kind == known[0] for kind in kinds)
    if isinstance(thetas, list) and tuple(theta != 0 for theta in thetas) != slides:
        _refuse(config, f"layer_rope_theta {thetas}", "0 for the layers of full attention, and only them")
    if config.flag("attention_bias", False):
        _refuse(config, "attention_bias true", "no biases")
    if (eps := config.number("post_norm_eps", 1e-8)) != 1e-8:
        _refuse(config, f"post_norm_eps {eps}", "1e-08, which GGUF has no key for")
    return SlidingSizes(
        window=config.integer("sliding_window"),
        slides=slides,
        query_scale=config.number("qk_scale_factor", 3.87),
        logit_scale=config.number("output_multiplier"),
        logit_cap=config.number("final_logit_softcapping"),
    )


def _experts(config: HFConfig, family: ModelFamily) -> ExpertSizes:
    if not family.shared_expert and not config.flag("norm_topk_prob", False):
        _refuse(config, "norm_topk_prob false", "true: weights that are renormalised")
    if config.integer("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        _refuse(config, "layers without experts", "decoder_sparse_step 1 and no mlp_only_layers")
    return ExpertSizes(
        # transformers 5 writes the second name
        count=config.integer("num_experts" if "num_experts" in config.values else "num_local_experts"),
        used=config.integer("num_experts_per_tok"),
        feed_forward=config.integer("moe_intermediate_size"),
        shared_feed_forward=config.integer("shared_expert_intermediate_size") if family.shared_expert else 0,
    )
