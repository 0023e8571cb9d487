"""A random DFlash checkpoint on disk, in either generation of its config, or as llama.cpp's GGUF."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from bough.gguf.header import ValueType
from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.dflash import DFlashDraft, DraftBuffers
from bough.models.spec import ModelSpec
from bough.state.draft_ring import draft_buffers

HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 4, 2, 16, 96


# z-lab's tensor names in llama.cpp's spelling.
GGUF_NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "lm_head": "output",
    "injection.message": "refine_message",
    "injection.receiver_gate": "refine_receiver",
    "injection.predecessor_gate": "refine_predecessor",
    "transfer_codes": "refine_codes",
    "ar_approximation.norm": "refine_norm",
    "ar_approximation.ug": "refine_ug",
    "ar_approximation.d": "refine_d",
    # Without a suffix in the checkpoint.
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
}
OWN_NAMES = {"injection.bias": "refine_gate.bias", "ar_approximation.ug.bias": "refine_ug.bias"}
LAYERED = {"injection.readouts": "refine_readout", "injection.writes": "refine_write"}
# Without a suffix in both.
BASE_KERNELS = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}
# Settings that make a config one of a head that refines rows: its architecture, and where they stand.
REFINED = {
    "transfer_rank": ("DSpineDraftModel", "dspine_config"),
    "ar_approximation": ("TreeFlashDraftModel", "treeflash_config"),
}
# Settings that make a config one of DFlash2.
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 24, "selector_top_k": 6}


def draft_config(
    target: ModelSpec,
    *,
    layers: int = 3,
    nested: bool = False,
    taps: Sequence[int] | None = None,
    method: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """z-lab's config.json: settings of the method at the top level (older) or nested (newer)."""
    settings = {
        "block_size": 16,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": list(taps or [1, 3, len(target.layers) - 3]),
        **(method or {}),
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": target.width,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": target.vocab_size,
        "num_target_layers": len(target.layers),
    }
    if "selector_rank" in settings:
        config["architectures"] = ["DFlash2DraftModel"]
    for key, (architecture, table) in REFINED.items():
        if key in settings:
            config["architectures"] = [architecture]
            config[table] = {name: settings.pop(name) for name in ("message_size", key) if name in settings}
    if nested:
        config |= {"dflash_config": settings, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    else:
        config |= {**settings, "rope_theta": 1e6}
    return config | changes


def draft_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    taps = len((config.get("dflash_config") or config)["target_layer_ids"])
    width, inner = config["hidden_size"], config["intermediate_size"]
    query, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, taps * width)}
    norms = {"hidden_norm.weight": width, "norm.weight": width}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (query, width),
            f"{prefix}self_attn.k_proj.weight": (kv, width),
            f"{prefix}self_attn.v_proj.weight": (kv, width),
            f"{prefix}self_attn.o_proj.weight": (width, query),
            f"{prefix}mlp.gate_proj.weight": (inner, width),
            f"{prefix}mlp.up_proj.weight": (inner, width),
            f"{prefix}mlp.down_proj.weight": (width, inner),
        }
        norms |= {f"{prefix}{name}.weight": width for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{prefix}self_attn.{name}.weight": config["head_dim"] for name in ("q_norm", "k_norm")}
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    settings = config.get("dflash_config") or config
    if "selector_rank" in settings:
        tensors |= _second_tensors(config, settings, generator)
    if "markov_rank" in settings:
        tensors |= _markov_tensors(
            config, settings["markov_rank"], settings.get("draft_vocab_size"), generator
        )
    if "dspine_config" in config:
        tensors |= _injection_tensors(config, config["dspine_config"], generator)
    if "treeflash_config" in config:
        tensors |= _mlp_tensors(config, generator)
    if "draft_vocab_size" in settings:
        tensors |= _own_vocabulary(config, settings["draft_vocab_size"], generator)
    for name, size in norms.items():
        tensors[name] = 1 + 0.3 * torch.randn(size, generator=generator)
    return tensors


def _second_tensors(
    config: Mapping[str, Any], settings: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    """The tensors that DFlash2 adds."""
    width, rank, taps = config["hidden_size"], settings["selector_rank"], settings["conv_kernel_size"]
    rows = 2 * taps * width // settings["conv_group_size"]

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    found = {
        f"candidate_selector.{name}_codebook": normal(config["vocab_size"], rank, scale=0.7)
        for name in ("predecessor", "successor")
    }
    found["candidate_selector.hidden_projection.weight"] = normal(rank, width, scale=width**-0.5)
    for layer in range(config["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{part}"
            base = normal(2, taps, width, scale=0.3)
            base[:, 0] += 1
            found[f"{name}.base_kernel"] = base
            found[f"{name}.kernel_projection.weight"] = normal(rows, width, scale=0.5 * width**-0.5)
    return found


def _markov_tensors(
    config: Mapping[str, Any], rank: int, own: int | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """The tensors that DSpark adds."""
    tables = {
        f"markov_head.markov_w{number}.weight": torch.randn(size, rank, generator=generator)
        for number, size in ((1, config["vocab_size"]), (2, own or config["vocab_size"]))
    }
    confidence = torch.randn(1, config["hidden_size"] + rank, generator=generator) * 0.3
    return {
        **{name: 0.5 * table for name, table in tables.items()},
        "confidence_head.proj.weight": confidence,
        "confidence_head.proj.bias": torch.tensor([0.4]),
    }


def _injection_tensors(
    config: Mapping[str, Any], settings: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """The tensors that DSpine adds."""
    width, rank, inner = config["hidden_size"], settings["transfer_rank"], settings["message_size"]
    shapes = {"message": (inner, rank), "receiver_gate": (inner, rank), "predecessor_gate": (inner, rank)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"readouts.{layer}": (rank, width), f"writes.{layer}": (width, inner)}
    tensors = {
        f"injection.{name}.weight": torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors["injection.bias"] = 0.5 * torch.randn(inner, generator=generator)
    codes = torch.randn(config["vocab_size"], rank, generator=generator)
    tensors["transfer_codes"] = torch.nn.functional.normalize(codes, dim=-1)
    return tensors | {"transfer_ready": torch.tensor(True)}


def _mlp_tensors(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors that an MLP over candidates adds."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    return {
        "ar_approximation.norm.weight": 1 + 0.3 * torch.randn(width, generator=generator),
        "ar_approximation.ug.weight": torch.randn(2 * inner, 2 * width, generator=generator) * width**-0.5,
        "ar_approximation.ug.bias": 0.5 * torch.randn(2 * inner, generator=generator),
        "ar_approximation.d.weight": torch.randn(width, inner, generator=generator) * 2 * inner**-0.5,
    }


def _own_vocabulary(config: Mapping[str, Any], size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A head for some of the target's tokens, and how far their ids are from those of the head's rows."""
    ids = torch.randperm(config["vocab_size"], generator=generator)[:size].sort().values
    known = torch.zeros(config["vocab_size"], dtype=torch.bool)
    known[ids] = True
    width = config["hidden_size"]
    head = torch.randn(size, width, generator=generator) * 2 * width**-0.5
    return {"lm_head.weight": head, "d2t": ids - torch.arange(size), "t2d": known}


def save_draft(
    folder: Path, config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Writes the checkpoint and returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in draft_tensors(config, seed=seed).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def gguf_name(name: str) -> str:
    if name in ("confidence_head.proj.bias", "d2t"):
        return name.replace("confidence_head.proj", "conf_proj")
    if name in OWN_NAMES:
        return OWN_NAMES[name]
    group, _, layer = name.removesuffix(".weight").rpartition(".")
    if group in LAYERED:
        return f"blk.{layer}.{LAYERED[group]}.weight"
    stem = name.removesuffix(".weight")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.weight"
    _, layer, part = stem.split(".", 2)
    if part in BASE_KERNELS:
        return f"blk.{layer}.{BASE_KERNELS[part]}"
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of a config, with mask and layers where they are today."""
    settings = {**config, **config.get("dflash_config", {})}
    keys: dict[str, Any] = {
        "dflash.block_count": config["num_hidden_layers"],
        "dflash.context_length": 4096,
        "dflash.embedding_length": config["hidden_size"],
        "dflash.feed_forward_length": config["intermediate_size"],
        "dflash.attention.head_count": config["num_attention_heads"],
        "dflash.attention.head_count_kv": config["num_key_value_heads"],
        "dflash.attention.key_length": config["head_dim"],
        "dflash.attention.value_length": config["head_dim"],
        "dflash.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "dflash.rope.freq_base": {**config, **config.get("rope_parameters", {})}["rope_theta"],
        "dflash.block_size": settings["block_size"],
        "dflash.target_layers": [layer + 1 for layer in settings["target_layer_ids"]],
        "tokenizer.ggml.mask_token_id": settings["mask_token_id"],
    }
    kinds = config.get("layer_types", [])
    if "sliding_attention" in kinds:
        keys["dflash.attention.sliding_window"] = config["sliding_window"]
        keys["dflash.attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    if config.get("is_causal") is False:
        keys["dflash.attention.causal"] = False
    keys |= {f"dflash.{name}": settings[name] for name in SECOND if name in settings}
    if "sample_from_anchor" in settings:
        keys["dflash.sample_from_anchor"] = settings["sample_from_anchor"]
    return keys


def save_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    types: Mapping[str, QuantType] | None = None,
    architecture: str = "dflash",
) -> Path:
    """Tensors by z-lab's names; matrices in the type of the last part of their GGUF name, F32 by default."""
    with GGUFWriter(path, architecture) as writer:
        for key, value in metadata.items():
            numbers = isinstance(value, list) and type(value[0]) is int
            writer.add(key, value, ValueType.INT32 if numbers else None)
        packed = {}
        for name, tensor in tensors.items():
            if name in ("t2d", "transfer_ready"):
                continue
            renamed = gguf_name(name)
            if name == "d2t":
                writer.add_tensor(name, tuple(tensor.shape), QuantType.I64)
                packed[name] = (tensor + torch.arange(len(tensor))).numpy()
                continue
            matrix = tensor.ndim == 2
            type_ = (types or {}).get(renamed.split(".")[-2], QuantType.F32) if matrix else QuantType.F32
            writer.add_tensor(renamed, tuple(tensor.shape), type_)
            packed[renamed] = quantise(tensor.float(), type_).numpy()
        writer.write_header()
        for name, data in packed.items():
            writer.write_tensor(name, data)
    return path


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {
        name: tensor.double().numpy() for name, tensor in tensors.items() if tensor.dtype is not torch.bool
    }


def poisoned(
    draft: DFlashDraft, *, max_ctx: int = 4096, context: int | None = None, slots: int = 1
) -> DraftBuffers:
    """Rings in which a place that was never written would be seen at once."""
    buffers = draft_buffers(draft.spec, max_ctx=max_ctx, context=context, slots=slots)
    for pool in (*buffers.keys, *buffers.values):
        pool.fill_(torch.nan)
    return buffers
