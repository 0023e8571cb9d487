"""A random DFlash checkpoint on disk, in either generation of its config."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from treeflash.models.spec import ModelSpec

HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 4, 2, 16, 96


def draft_config(target: ModelSpec, *, layers: int = 3, nested: bool = False, **changes: Any) -> dict[str, Any]:
    """z-lab's config.json: settings of the method at the top level (older) or nested (newer)."""
    method = {
        "block_size": 16,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": [1, 3, len(target.layers) - 3],
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
    if nested:
        config |= {"dflash_config": method, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    else:
        config |= {**method, "rope_theta": 1e6}
    return config | changes


def draft_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
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
    for name, size in norms.items():
        tensors[name] = 1 + 0.3 * torch.randn(size, generator=generator)
    return tensors


def save_draft(
    folder: Path, config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Writes the checkpoint and returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype) for name, tensor in draft_tensors(config, seed=seed).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors
