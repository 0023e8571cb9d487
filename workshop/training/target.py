"""A trainable qwen35 target whose parameters have the names of its Hugging Face checkpoint.

Master weights are float32; matmuls run in the model's compute dtype; norms, gates, decays and the loss in
float32. Every sequence starts from a zero state. Value heads are grouped by key head, as in checkpoints, not
tiled as in GGUF files.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from bough.kernels.causal_conv.reference import L2_EPS
from bough.kernels.norm_rope import l2_norm, rope_angles
from bough.train.draft_model import rope
from workshop.training.delta import CHUNK, delta_rule

# Rows of a fused projection are padded to a multiple of this, so that every matmul is aligned.
ALIGNED_ROWS = 16


@dataclass(frozen=True, slots=True)
class TargetConfig:
    vocabulary: int = 16384
    width: int = 512
    layers: int = 8
    interval: int = 4  # every interval-th layer has full attention
    inner: int = 1536
    heads: int = 6
    kv_heads: int = 1
    head_dim: int = 256
    theta: float = 1e7
    key_heads: int = 2
    value_heads: int = 6
    delta_dim: int = 128
    conv: int = 4
    eps: float = 1e-6
    context: int = 8192

    @property
    def rope_dim(self) -> int:
        return self.head_dim // 4

    @property
    def layer_types(self) -> list[str]:
        return [
            "linear_attention" if (layer + 1) % self.interval else "full_attention"
            for layer in range(self.layers)
        ]

    def to_hf(self) -> dict[str, Any]:
        """Return config.json of Qwen3_5ForCausalLM."""
        time = math.ceil(self.rope_dim / 2 / 3)
        height = math.ceil((self.rope_dim // 2 - time) / 2)
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "layer_types": self.layer_types,
            "full_attention_interval": self.interval,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.delta_dim,
            "linear_value_head_dim": self.delta_dim,
            "linear_conv_kernel_dim": self.conv,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.theta,
                "partial_rotary_factor": 0.25,
                "mrope_section": [time, height, self.rope_dim // 2 - time - height],
                "mrope_interleaved": True,
            },
            "dtype": "float32",
        }


class Weight(nn.Module):
    """A parameter named `<module>.weight`."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


def project(x: Tensor, *weights: Weight) -> list[Tensor]:
    """Multiply x with several matrices [rows, width] in one matmul."""
    sizes = [len(each.weight) for each in weights]
    spare = -sum(sizes) % ALIGNED_ROWS
    matrix = torch.cat([each.weight.to(x.dtype) for each in weights])
    if spare:
        matrix = F.pad(matrix, (0, 0, 0, spare))
    return list(F.linear(x, matrix).split([*sizes, *([spare] if spare else [])], -1))[: len(weights)]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: TargetConfig):
        super().__init__()
        self._config = config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj, self.k_proj = Weight(2 * queries, config.width), Weight(keys, config.width)
        self.v_proj, self.o_proj = Weight(keys, config.width), Weight(config.width, queries)
        self.q_norm, self.k_norm = Weight(config.head_dim), Weight(config.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dim, eps = self._config.head_dim, self._config.eps
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = q.unflatten(-1, (-1, 2 * dim)).chunk(2, -1)
        k, v = k.unflatten(-1, (-1, dim)), v.unflatten(-1, (-1, dim))
        q, k = (
            rope(rms_norm(heads.float(), 1 + norm.weight, eps), cos, sin).to(x.dtype)
            for heads, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        out = (out.float() * gate.float().sigmoid()).to(x.dtype)
        return project(out.flatten(-2), self.o_proj)[0]


class GatedDelta(nn.Module):
    def __init__(self, config: TargetConfig, *, chunk: int, fused: bool):
        super().__init__()
        self._config, self._chunk, self._fused = config, chunk, fused
        keys, values = config.key_heads * config.delta_dim, config.value_heads * config.delta_dim
        self.in_proj_qkv = Weight(2 * keys + values, config.width)
        self.in_proj_z = Weight(values, config.width)
        self.in_proj_b = Weight(config.value_heads, config.width)
        self.in_proj_a = Weight(config.value_heads, config.width)
        self.conv1d = Weight(2 * keys + values, 1, config.conv)
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = Weight(config.delta_dim)
        self.out_proj = Weight(config.width, values)

    def forward(self, x: Tensor) -> Tensor:
        config, dim = self._config, self._config.delta_dim
        keys, values = config.key_heads * dim, config.value_heads * dim
        mixed, z, b, a = project(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        # Shifted sums instead of a convolution: they fuse with adjacent kernels and need no transpose.
        padded, tokens = F.pad(mixed, (0, 0, config.conv - 1, 0)), x.shape[1]
        taps = self.conv1d.weight[:, 0].unbind(-1)
        shifted = [padded[:, i : i + tokens].float() * tap for i, tap in enumerate(taps)]
        mixed = F.silu(sum(shifted[1:], shifted[0]))
        q, k, v = (heads.unflatten(-1, (-1, dim)) for heads in mixed.split([keys, keys, values], -1))
        g = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        out = delta_rule(
            l2_norm(q, L2_EPS) * dim**-0.5,
            l2_norm(k, L2_EPS),
            v.to(x.dtype),
            g,
            b.float().sigmoid(),
            chunk=self._chunk,
            fused=self._fused,
        )
        out = F.rms_norm(out.float(), (dim,), self.norm.weight, config.eps)
        out = (out * F.silu(z.float().unflatten(-1, (-1, dim)))).to(x.dtype)
        return project(out.flatten(-2), self.out_proj)[0]


class FeedForward(nn.Module):
    def __init__(self, config: TargetConfig):
        super().__init__()
        self.gate_proj, self.up_proj = (Weight(config.inner, config.width) for _ in range(2))
        self.down_proj = Weight(config.width, config.inner)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return project((F.silu(gate.float()) * up.float()).to(x.dtype), self.down_proj)[0]


class Layer(nn.Module):
    """A token mixer, then a feed-forward; `rope` is passed only to attention layers."""

    def __init__(self, config: TargetConfig, kind: str, *, chunk: int, fused: bool):
        super().__init__()
        self._eps = config.eps
        self.input_layernorm, self.post_attention_layernorm = (Weight(config.width) for _ in range(2))
        if kind == "full_attention":
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDelta(config, chunk=chunk, fused=fused)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, *rope: Tensor) -> Tensor:
        mixer = self.self_attn if rope else self.linear_attn
        x = x + mixer(rms_norm(x, 1 + self.input_layernorm.weight, self._eps), *rope)
        return x + self.mlp(rms_norm(x, 1 + self.post_attention_layernorm.weight, self._eps))


class Trunk(nn.Module):
    def __init__(self, config: TargetConfig, *, chunk: int, fused: bool):
        super().__init__()
        self.embed_tokens = Weight(config.vocabulary, config.width)
        self.layers = nn.ModuleList(
            Layer(config, kind, chunk=chunk, fused=fused) for kind in config.layer_types
        )
        self.norm = Weight(config.width)


class Loss(NamedTuple):
    objective: Tensor  # what to differentiate
    cross_entropy: Tensor  # nats per counted token


class Target(nn.Module):
    """The qwen35 model. dtype: of the matmuls; fused: use the delta rule's Triton kernels, CUDA only."""

    def __init__(
        self,
        config: TargetConfig,
        *,
        dtype: torch.dtype = torch.float32,
        chunk: int = CHUNK,
        fused: bool = False,
    ):
        super().__init__()
        self.config, self._dtype = config, dtype
        self.model = Trunk(config, chunk=chunk, fused=fused)
        self._head = _head_loss
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                _initialise(name, parameter)

    def compile_layers(self) -> None:
        """Compile each kind of layer once, and the head with the loss; shapes must then stay the same."""
        # Triton 3.6 fails on one of these layers' persistent reductions (PassManager::run failed).
        options: dict[str, Any] = {"triton.persistent_reductions": False}
        for layer in self.model.layers:
            layer.compile(dynamic=False, fullgraph=True, options=options)
        self._head = torch.compile(_head_loss, dynamic=False, fullgraph=True, options=options)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the head's input [B, T, width] for tokens [B, T], T a multiple of the chunk."""
        config = self.config
        steps = torch.arange(0, config.rope_dim, 2, device=tokens.device, dtype=torch.float32)
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rope = rope_angles(positions[None], config.theta ** (-steps / config.rope_dim))
        x = F.embedding(tokens, self.model.embed_tokens.weight).to(self._dtype)
        for layer, kind in zip(self.model.layers, config.layer_types, strict=True):
            x = layer(x, *rope) if kind == "full_attention" else layer(x)
        return rms_norm(x, 1 + self.model.norm.weight, config.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()

    def loss(self, tokens: Tensor, labels: Tensor, mask: Tensor, *, z_loss: float = 0.0) -> Loss:
        """Return the cross entropy of labels [B, T] where mask [B, T] is not zero, plus z_loss * log(Z)^2."""
        hidden = self(tokens).flatten(0, 1)
        embedding = self.model.embed_tokens.weight
        return Loss(*self._head(hidden, embedding, labels.flatten(), mask.flatten().float(), z_loss))


def _head_loss(
    hidden: Tensor, embedding: Tensor, labels: Tensor, mask: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    total = logits.logsumexp(-1)
    # Not a gather: its gradient would be scattered into a second tensor of the logits' size.
    chosen = torch.arange(logits.shape[-1], device=labels.device) == labels[:, None]
    wanted = torch.where(chosen, logits, 0.0).sum(-1)
    counted = mask.sum().clamp(min=1)
    cross_entropy = ((total - wanted) * mask).sum() / counted
    objective = cross_entropy + z_loss * (total.square() * mask).sum() / counted
    return objective, cross_entropy.detach()


def _initialise(name: str, parameter: Tensor) -> None:
    if name.endswith("A_log"):
        parameter.uniform_(1, 16).log_()
    elif name.endswith("dt_bias"):
        # Time steps of 0.001 to 0.1: heads decay over tens to thousands of tokens.
        steps = parameter.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        parameter.copy_(steps + torch.log(-torch.expm1(-steps)))
    elif name.endswith("linear_attn.norm.weight"):
        parameter.fill_(1)
    elif "norm" in name or name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        # Norm weights are stored as the difference from one; output projections start at zero.
        parameter.zero_()
    elif "conv1d" in name:
        parameter.uniform_(-0.5, 0.5)
    elif "embed_tokens" in name:
        parameter.normal_(std=0.02)
    else:
        parameter.normal_(std=parameter.shape[-1] ** -0.5)


def save_target(target: Target, folder: Path, *, end_ids: list[int], pad_id: int) -> None:
    """Write config.json, generation_config.json and model.safetensors, not the tokenizer.

    end_ids: end-of-sequence tokens, the default one first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**target.config.to_hf(), "eos_token_id": end_ids[0], "pad_token_id": pad_id}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": end_ids, "pad_token_id": pad_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: value.detach().float().cpu().contiguous() for name, value in target.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
