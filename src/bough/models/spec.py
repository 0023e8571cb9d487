"""A model's shapes, layer kinds, rope and experts, from a GGUF file's metadata. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.gguf.rotation import rotation_of

_SOFTMAX = 1  # of expert_gating_func
_SEEING = ("qwen35", "qwen35moe")  # whose rope takes images, the axes' frequencies interleaved

LayerKind = Literal["attention", "delta"]


@dataclass(frozen=True, slots=True)
class Family:
    """The differences between architectures that their metadata does not hold."""

    hybrid: bool = False  # Gated DeltaNet layers between the attention layers
    gated_query: bool = False  # attn_q holds a query and an output gate for every head
    query_key_norm: bool = False
    rope_interleaved: bool = False  # pairs (0,1), (2,3), ... instead of the two halves
    experts: bool = False
    shared_expert: bool = False  # one that every row takes, beside the routed experts
    feed_forward_norm: str = "ffn_norm"
    output_gate: bool = False  # attn_gate, of its own input rows, gates the attention's output
    sliding: bool = False  # some layers attend to the newest tokens alone, and only they have rope
    normed_embedding: bool = False  # by a norm without weights
    closing_eps: float = 0.0  # of the norms of what attention and feed-forward return; 0: there are none


FAMILIES = {
    "qwen35": Family(
        hybrid=True, gated_query=True, query_key_norm=True, feed_forward_norm="post_attention_norm"
    ),
    "qwen35moe": Family(
        hybrid=True,
        gated_query=True,
        query_key_norm=True,
        experts=True,
        shared_expert=True,
        feed_forward_norm="post_attention_norm",
    ),
    "qwen3moe": Family(query_key_norm=True, experts=True),
    "qwen3": Family(query_key_norm=True),
    "qwen2": Family(),
    "llama": Family(rope_interleaved=True),
    "muse-glimmer": Family(
        query_key_norm=True,
        rope_interleaved=True,
        output_gate=True,
        sliding=True,
        normed_embedding=True,
        closing_eps=1e-8,
    ),
}


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated DeltaNet: value head h reads with query and key of head h % key_heads."""

    key_heads: int
    value_heads: int
    head_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def inner(self) -> int:
        return self.value_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What differs between the attention of one layer and another's."""

    rope_theta: float  # 0: its heads are the same at every position
    window: int | None = None  # the newest tokens that a row attends to, itself included; None: all


@dataclass(frozen=True, slots=True)
class LogitSpec:
    """What the head's output becomes before it is sampled: cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    cap: float = 0.0  # 0: none


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    count: int
    used: int
    width: int
    shared_width: int  # 0: no shared expert


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str
    name: str
    family: Family
    layers: tuple[LayerKind, ...]  # without MTP blocks
    attention: tuple[LayerAttention, ...]  # of each of them, read where it has attention
    mtp_layers: int
    width: int
    feed_forward: int  # 0 where every layer has experts
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    rope_factor: float  # positions are divided by it (linear scaling)
    rope_sections: tuple[int, ...]  # of frequencies for time, height, width of an image; (): it sees none
    eps: float
    vocab_size: int
    context_length: int
    tied_head: bool
    delta: DeltaSpec | None
    experts: ExpertSpec | None
    logits: LogitSpec = LogitSpec()

    @property
    def gated(self) -> bool:
        """Return whether the attention's output is multiplied by a gate as wide as it."""
        return self.family.gated_query or self.family.output_gate

    @property
    def attention_layers(self) -> int:
        return self.layers.count("attention")

    @property
    def delta_layers(self) -> int:
        return self.layers.count("delta")

    @property
    def rope_axes(self) -> list[int]:
        """Return which of an image's axes turns each pair of a head: 0 time, 1 height, 2 width."""
        _, height, width = self.rope_sections or (0, 0, 0)
        ends = (0, 3 * height, 3 * width)
        return [pair % 3 if pair < ends[pair % 3] else 0 for pair in range(self.rope_dim // 2)]

    def kv_bytes_per_token(self, key_row: int, value_row: int) -> int:
        """Return the bytes of a token in the KV cache, from the bytes of a head's key and of its value."""
        return self.attention_layers * self.kv_heads * (key_row + value_row)

    def recurrent_bytes(self) -> int:
        """Return the float32 bytes of one sequence's recurrent and convolution state."""
        if self.delta is None:
            return 0
        delta = self.delta
        matrix = delta.value_heads * delta.head_dim**2
        return 4 * self.delta_layers * (matrix + (delta.conv_width - 1) * delta.channels)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "ModelSpec":
        architecture = file.architecture
        family = FAMILIES.get(architecture)
        if family is None:
            raise UnsupportedModel(
                f"{file.path}: general.architecture is {architecture!r}, supported are {', '.join(FAMILIES)}",
                "bough show FILE lists what the file holds",
            )
        rotation_of(file)  # refuses what is not known of it, before weights are read
        keys = _Keys(file, architecture)
        layers, mtp = _layers(keys, family)
        heads = keys.count("attention.head_count")
        width = keys.count("embedding_length")
        head_dim = keys.count("attention.key_length", default=width // heads)
        if not head_dim:
            raise keys.unsupported("attention.key_length", "a positive number")
        if keys.count("attention.value_length", default=head_dim) != head_dim:
            raise keys.unsupported("attention.value_length", f"the same as attention.key_length ({head_dim})")
        kv_heads = keys.count("attention.head_count_kv", default=heads)
        if not kv_heads or heads % kv_heads:
            raise keys.unsupported("attention.head_count_kv", f"a divisor of attention.head_count ({heads})")
        rope_dim = keys.count("rope.dimension_count", default=head_dim)
        if rope_dim > head_dim or rope_dim % 2:
            raise keys.unsupported(
                "rope.dimension_count", f"an even number up to attention.key_length ({head_dim})"
            )
        if not family.experts and keys.count("expert_count", default=0):
            raise keys.unsupported("expert_count", "0: this architecture's experts are not supported")
        embedding = file.require_tensor("token_embd.weight")
        if len(embedding.shape) != 2 or embedding.shape[1] != width:
            raise UnsupportedModel(
                f"{file.path}: token_embd.weight has shape {list(embedding.shape)}, "
                f"needed [vocabulary, {width}] by {architecture}.embedding_length"
            )
        return cls(
            architecture=architecture,
            name=file.get("general.name", str, "") or file.path.stem,
            family=family,
            layers=layers,
            attention=_attention(keys, family, len(layers)),
            mtp_layers=mtp,
            width=width,
            feed_forward=0 if family.experts else keys.count("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            rope_theta=keys.positive("rope.freq_base", 10000.0),
            rope_factor=_rope_factor(keys),
            rope_sections=_rope_sections(keys, rope_dim),
            eps=keys.positive("attention.layer_norm_rms_epsilon"),
            vocab_size=embedding.shape[0],
            context_length=keys.count("context_length"),
            tied_head="output.weight" not in file.tensors,
            delta=_delta(keys) if family.hybrid else None,
            experts=_experts(keys, family) if family.experts else None,
            logits=_logits(keys) if family.sliding else LogitSpec(),
        )


def has_mtp(file: GGUFFile, spec: ModelSpec) -> bool:
    """Return whether the file has a multi-token-prediction block that can propose tokens."""
    block = f"blk.{len(spec.layers)}.nextn"
    # Other families' blocks may have an embedding and a head of their own.
    names = (f"{block}.embed_tokens.weight", f"{block}.shared_head_head.weight")
    known = spec.family.hybrid and spec.mtp_layers == 1 and f"{block}.eh_proj.weight" in file.tensors
    return known and not any(name in file.tensors for name in names)


@dataclass(frozen=True, slots=True)
class _Keys:
    file: GGUFFile
    prefix: str

    def count(self, key: str, default: int | None = None) -> int:
        full = f"{self.prefix}.{key}"
        if isinstance(self.file.metadata.get(full), list):
            # Ollama's own exports write an array here, with other tensor layouts besides.
            raise self.unsupported(key, "a single number (files written by llama.cpp have one)")
        value = self.file.require(full, int) if default is None else self.file.get(full, int, default)
        if value < (1 if default is None else 0):
            raise self.unsupported(key, "a positive number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        full = f"{self.prefix}.{key}"
        value = self.file.require(full, float) if default is None else self.file.get(full, float, default)
        if not 0 < value < float("inf"):
            raise self.unsupported(key, "a positive number")
        return float(value)

    def unsupported(self, key: str, needed: str) -> UnsupportedModel:
        seen = str(self.file.metadata.get(f"{self.prefix}.{key}"))
        return UnsupportedModel(f"{self.file.path}: {self.prefix}.{key} is {seen[:80]}, needed {needed}")


def _layers(keys: _Keys, family: Family) -> tuple[tuple[LayerKind, ...], int]:
    blocks, mtp = keys.count("block_count"), keys.count("nextn_predict_layers", default=0)
    depth = blocks - mtp
    if depth < 1:
        raise keys.unsupported("nextn_predict_layers", f"fewer than {keys.prefix}.block_count ({blocks})")
    if depth > 4096:
        raise keys.unsupported("block_count", "at most 4096")
    if not family.hybrid:
        return ("attention",) * depth, mtp
    recurrent = keys.file.get(f"{keys.prefix}.attention.recurrent_layers", list, None)
    if recurrent is not None:
        if len(recurrent) < depth:
            raise keys.unsupported("attention.recurrent_layers", f"one flag for each of {depth} layers")
        if all(recurrent[:depth]):
            raise keys.unsupported("attention.recurrent_layers", "at least one layer with attention")
        return tuple("delta" if flag else "attention" for flag in recurrent[:depth]), mtp
    interval = keys.count("full_attention_interval", default=4)
    if interval < 1:
        raise keys.unsupported("full_attention_interval", "a positive number")
    if depth < interval:
        raise keys.unsupported("block_count", f"at least {interval} layers, one of them with attention")
    return tuple("delta" if (i + 1) % interval else "attention" for i in range(depth)), mtp


def _attention(keys: _Keys, family: Family, depth: int) -> tuple[LayerAttention, ...]:
    theta = keys.positive("rope.freq_base", 10000.0)
    if not family.sliding:
        return (LayerAttention(theta),) * depth
    window = keys.count("attention.sliding_window")
    near = LayerAttention(keys.positive("rope.freq_base_swa", theta), window)
    return tuple(near if slides else LayerAttention(0.0) for slides in _sliding(keys, depth))


def _sliding(keys: _Keys, depth: int) -> list[bool]:
    """Return which layers slide: by a flag for each, or all but every n-th."""
    key = "attention.sliding_window_pattern"
    flags = keys.file.metadata.get(f"{keys.prefix}.{key}")
    if not isinstance(flags, list):
        period = keys.count(key, default=4)
        if not period:
            raise keys.unsupported(key, "a positive number, or a flag for each layer")
        return [(layer + 1) % period != 0 for layer in range(depth)]
    if len(flags) != depth or not all(isinstance(flag, bool) for flag in flags):
        raise keys.unsupported(key, f"a flag for each of {depth} layers")
    return flags


def _logits(keys: _Keys) -> LogitSpec:
    cap = keys.file.get(f"{keys.prefix}.final_logit_softcapping", float, 0.0)
    return LogitSpec(
        scale=keys.positive("logit_scale", 1.0), cap=keys.positive("final_logit_softcapping") if cap else 0.0
    )


def _rope_factor(keys: _Keys) -> float:
    kind = keys.file.get(f"{keys.prefix}.rope.scaling.type", str, "none")
    if kind == "linear":
        return keys.positive("rope.scaling.factor")
    if kind != "none":
        raise keys.unsupported("rope.scaling.type", "none or linear")
    return 1.0


def _rope_sections(keys: _Keys, rope_dim: int) -> tuple[int, ...]:
    sections = keys.file.get(f"{keys.prefix}.rope.dimension_sections", list, [])[:3]
    return tuple(sections) if keys.prefix in _SEEING and 2 * sum(sections) == rope_dim else ()


def _delta(keys: _Keys) -> DeltaSpec:
    spec = DeltaSpec(
        key_heads=keys.count("ssm.group_count"),
        value_heads=keys.count("ssm.time_step_rank"),
        head_dim=keys.count("ssm.state_size"),
        conv_width=keys.count("ssm.conv_kernel"),
    )
    if spec.value_heads % spec.key_heads:
        raise keys.unsupported("ssm.time_step_rank", f"a multiple of ssm.group_count ({spec.key_heads})")
    if keys.count("ssm.inner_size", default=spec.inner) != spec.inner:
        raise keys.unsupported("ssm.inner_size", f"time_step_rank times state_size ({spec.inner})")
    if keys.file.get(f"{keys.prefix}.ssm.v_head_reordered", bool, True) is False:
        raise keys.unsupported("ssm.v_head_reordered", "true: value heads in tiled order")
    return spec


def _experts(keys: _Keys, family: Family) -> ExpertSpec:
    count, used = keys.count("expert_count"), keys.count("expert_used_count")
    if used > count:
        raise keys.unsupported("expert_used_count", f"at most expert_count ({count})")
    width = keys.count("expert_feed_forward_length", default=0)
    shared_key = "expert_shared_feed_forward_length"
    shared = keys.count(shared_key, default=None if family.shared_expert else 0)
    if shared and not family.shared_expert:
        raise keys.unsupported(shared_key, "none: this architecture's experts are all routed")
    if not keys.file.get(f"{keys.prefix}.expert_weights_norm", bool, True):
        raise keys.unsupported("expert_weights_norm", "true: weights that are renormalised")
    if keys.count("expert_gating_func", default=_SOFTMAX) != _SOFTMAX:
        raise keys.unsupported("expert_gating_func", f"{_SOFTMAX}: a softmax")
    if keys.file.get(f"{keys.prefix}.expert_weights_scale", float, 1.0) not in (0.0, 1.0):
        raise keys.unsupported("expert_weights_scale", "1")
    return ExpertSpec(count, used, width or keys.count("feed_forward_length") // used, shared)
