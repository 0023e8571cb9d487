"""A random Weaver head on disk, in either generation of its layout and either form of file."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bough.models.weaver_spec import WeaverSpec

WIDTH, HEADS, INNER, LAYERS = 24, 2, 40, 2


def weaver_config(target_width: int, *, depth: int, **changes: Any) -> dict[str, Any]:
    config = {
        "d_model": target_width,
        "d_embed": target_width,
        "d_rank": WIDTH,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "mlp_dim": INNER,
        "K": depth,
        "candidate_pool_size": 512,
        "rope_base": 1e4,
    }
    return config | changes


def weaver_tensors(config: dict[str, Any], *, learned: bool, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter is random: norms and biases too, as zeros hide errors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in WeaverSpec.from_config(config, source="", learned=learned).shapes.items():
        tensor = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.3 * tensor
        elif name == "pos_emb":
            tensors[name] = 0.5 * tensor
        else:
            tensors[name] = tensor * (1.5 * shape[1] ** -0.5 if tensor.ndim == 2 else 0.3)
    return tensors


def save_weaver(
    folder: Path, config: dict[str, Any], *, learned: bool, form: str = "pth", seed: int = 0
) -> tuple[Path, dict[str, Tensor]]:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weaver_tensors(config, learned=learned, seed=seed)
    path = folder / f"weaver.{form}"
    if form == "safetensors":
        save_file(tensors, path)
        (folder / "config.json").write_text(json.dumps(config))
    else:
        torch.save({"config": config, "state_dict": tensors}, path)
    return path, tensors
