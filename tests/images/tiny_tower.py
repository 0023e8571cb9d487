"""Tiny random vision towers: transformers' model, and the file that llama.cpp's converter makes of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

# Published towers have heads of 64 and of 72; of the latter the MLP's rows (4304) fit no Q8_0.
SHAPES: dict[str, dict[str, int]] = {
    "small": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
    "wide": {"depth": 3, "hidden_size": 72, "intermediate_size": 104, "num_heads": 1},
    "heads": {"depth": 1, "hidden_size": 96, "intermediate_size": 136, "num_heads": 8},
    "heads of 64": {"depth": 2, "hidden_size": 192, "intermediate_size": 768, "num_heads": 3},
    "heads of 72": {"depth": 2, "hidden_size": 144, "intermediate_size": 538, "num_heads": 2},
}
TYPES = {"F32": Type.F32, "F16": Type.F16, "BF16": Type.BF16, "Q8_0": Type.Q8_0}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_NAMES = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_OTHERS = {
    "patch_embed.proj.bias": "v.patch_embd.bias",
    "pos_embed.weight": "v.position_embd.weight",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}


def vision_settings(shape: str = "small", *, out: int = 64, side: int = 8) -> dict[str, Any]:
    return {**SHAPES[shape], "out_hidden_size": out, "num_position_embeddings": side * side}


def hf_tower(settings: Mapping[str, Any], *, seed: int = 3) -> Any:
    from transformers.models.qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    from tests.convert.hf_models import randomise

    config = Qwen3_5VisionConfig(**settings)
    config._attn_implementation = "eager"
    model = randomise(Qwen3_5VisionModel(config), seed)
    with torch.no_grad():  # small enough that a norm's epsilon counts
        model.patch_embed.proj.weight.mul_(0.02)
        model.patch_embed.proj.bias.mul_(0.02)
        model.pos_embed.weight.mul_(0.02)
    return model


def random_weights(settings: Mapping[str, Any], *, seed: int = 3) -> dict[str, torch.Tensor]:
    """Return weights of a tower under transformers' names, where nobody needs its model."""
    width, inner, merged = settings["hidden_size"], settings["intermediate_size"], 4 * settings["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 3, 2, 16, 16),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (settings["num_position_embeddings"], width),
        **_linear("merger.linear_fc1", merged, merged),
        **_linear("merger.linear_fc2", settings["out_hidden_size"], merged),
        **_linear("merger.norm", width),
    }
    for index in range(settings["depth"]):
        block = f"blocks.{index}"
        shapes |= _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        shapes |= _linear(f"{block}.mlp.linear_fc1", inner, width) | _linear(f"{block}.norm1", width)
        shapes |= _linear(f"{block}.mlp.linear_fc2", width, inner) | _linear(f"{block}.norm2", width)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] if len(shape) > 1 else 4) ** -0.5
        for name, shape in shapes.items()
    }


def _linear(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _name(name: str) -> str:
    """Return a tensor's name in the file."""
    if name in _OTHERS:
        return _OTHERS[name]
    stem, _, part = name.rpartition(".")
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.{part}"
    _, index, rest = stem.split(".", 2)
    return f"v.blk.{index}.{_NAMES[rest]}.{part}"


def write_mmproj(
    path: Path,
    settings: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    *,
    kind: str = "F32",
    **changes: Any,
) -> Path:
    """Write the file as llama.cpp's converter does, with its mixture of types; `changes` of keys."""
    writer = gguf.GGUFWriter(path, "clip")
    vision = "clip.vision."
    keys = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "qwen3vl_merger",
        "clip.use_gelu": True,
        f"{vision}image_size": round(settings["num_position_embeddings"] ** 0.5) * 16,
        f"{vision}patch_size": 16,
        f"{vision}spatial_merge_size": 2,
        f"{vision}embedding_length": settings["hidden_size"],
        f"{vision}feed_forward_length": settings["intermediate_size"],
        f"{vision}block_count": settings["depth"],
        f"{vision}attention.head_count": settings["num_heads"],
        f"{vision}projection_dim": settings["out_hidden_size"],
        f"{vision}image_mean": [0.5] * 3,
        f"{vision}image_std": [0.5] * 3,
        f"{vision}is_deepstack_layers": [False] * settings["depth"],
        f"{vision}attention.layer_norm_epsilon": 1e-6,
        **changes,
    }
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.add_file_type(_FILE_TYPES[kind])
    for name, tensor in weights.items():
        if name == "patch_embed.proj.weight":
            type = Type.F16 if kind == "F16" else Type.F32
            _add(writer, "v.patch_embd.weight", tensor[:, :, 0], type)
            _add(writer, "v.patch_embd.weight.1", tensor[:, :, 1], type)
        else:
            matrix = tensor.dim() > 1 and name != "pos_embed.weight"
            _add(writer, _name(name), tensor, TYPES[kind] if matrix else Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, type: Type) -> None:
    data = np.ascontiguousarray(tensor.detach().numpy())
    if type is Type.Q8_0 and data.shape[-1] % 32:
        type = Type.F16  # as the converter does
    writer.add_tensor(name, gguf.quants.quantize(data, type), raw_dtype=type)
