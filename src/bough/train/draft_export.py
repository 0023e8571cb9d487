"""Export of a trained draft: z-lab's safetensors folder and llama.cpp's GGUF."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from bough.convert.mixes import FILE_TYPES, QUANTISATION_VERSION
from bough.gguf.header import ValueType
from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.hub.names import DRAFT_ARCHITECTURES
from bough.models.draft_spec import DraftSpec
from bough.models.safetensors_source import gguf_name
from bough.models.spec import ModelSpec
from bough.text.tokenizer import KEY, Tokenizer
from bough.train.files import write_json, write_whole

WEIGHTS, CONFIG, GGUF = "model.safetensors", "config.json", "draft-q8_0.gguf"


def draft_config(
    spec: DraftSpec, target: ModelSpec, tokenizer: Tokenizer, dtype: torch.dtype
) -> dict[str, Any]:
    """Return config.json with DFlash's settings both at the top level, for older readers, and nested."""
    method = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_id,
        "target_layer_ids": list(spec.taps),
        **_second(spec),
    }
    return {
        "architectures": [_architecture(spec)],
        "model_type": "qwen3",
        **method,
        "dflash_config": method,
        **_refine(spec),
        "num_target_layers": len(target.layers),
        "num_hidden_layers": len(spec.layers),
        "layer_types": [f"{kind}_attention" for kind in spec.layers],
        "use_sliding_window": "sliding" in spec.layers,
        "sliding_window": spec.window or None,
        "hidden_size": spec.width,
        "intermediate_size": spec.feed_forward,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": spec.eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": target.tied_head,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _architecture(spec: DraftSpec) -> str:
    dflash, dflash2, _, mlp = DRAFT_ARCHITECTURES
    if spec.refine is not None:
        return mlp
    return dflash if spec.second is None else dflash2


def _refine(spec: DraftSpec) -> dict[str, dict[str, Any]]:
    """Return the settings of an MLP over candidates, as arXiv 2606.03819's authors write them."""
    if spec.refine is None:
        return {}
    return {"treeflash_config": {"ar_approximation": "swiglu", "candidate_tokens": spec.refine.candidates}}


def _second(spec: DraftSpec) -> dict[str, int]:
    """Return DFlash2's own settings."""
    second = spec.second
    if second is None:
        return {}
    return {
        "conv_kernel_size": second.kernel,
        "conv_group_size": second.group,
        "selector_rank": second.rank,
        "selector_top_k": second.candidates,
    }


def export_draft(
    folder: Path,
    spec: DraftSpec,
    weights: Mapping[str, Tensor],
    target: ModelSpec,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the weights under z-lab's names, and their config.json."""
    data = save(
        {name: tensor.to(dtype).cpu().contiguous() for name, tensor in weights.items()}, {"format": "pt"}
    )
    write_whole(folder / WEIGHTS, lambda file: file.write(data), needed=len(data))
    write_json(folder / CONFIG, draft_config(spec, target, tokenizer, dtype))


def export_gguf(
    path: Path,
    spec: DraftSpec,
    weights: Mapping[str, Tensor],
    target: ModelSpec,
    metadata: Mapping[str, Any],
) -> Path:
    """Write a `dflash` file with Q8_0 matrices; `metadata` is the target's and supplies the vocabulary."""
    types = {name: tensor_type(tensor) for name, tensor in weights.items()}
    with GGUFWriter(path, "dflash") as writer:
        for key, value, kind in _entries(spec, target, metadata):
            writer.add(key, value, kind)
        for name, tensor in weights.items():
            writer.add_tensor(_renamed(name), tuple(tensor.shape), types[name])
        writer.write_header()
        for name, tensor in weights.items():
            writer.write_tensor(_renamed(name), quantise(tensor.float().cpu(), types[name]).numpy())
    return path


def _entries(
    spec: DraftSpec, target: ModelSpec, metadata: Mapping[str, Any]
) -> list[tuple[str, Any, ValueType | None]]:
    entries: list[tuple[str, Any, ValueType | None]] = [
        ("general.type", "model", None),
        ("general.name", f"{target.name} DFlash", None),
        ("general.file_type", FILE_TYPES["q8_0"], None),
        ("general.quantization_version", QUANTISATION_VERSION, None),
        ("dflash.block_count", len(spec.layers), None),
        ("dflash.vocab_size", target.vocab_size, None),
        ("dflash.context_length", target.context_length, None),
        ("dflash.embedding_length", spec.width, None),
        ("dflash.feed_forward_length", spec.feed_forward, None),
        ("dflash.attention.head_count", spec.heads, None),
        ("dflash.attention.head_count_kv", spec.kv_heads, None),
        ("dflash.attention.key_length", spec.head_dim, None),
        ("dflash.attention.value_length", spec.head_dim, None),
        ("dflash.attention.layer_norm_rms_epsilon", spec.eps, ValueType.FLOAT32),
        ("dflash.rope.freq_base", spec.rope_theta, ValueType.FLOAT32),
        ("dflash.block_size", spec.block_size, None),
        # llama.cpp counts layers by their inputs: the output of layer i is the input of layer i + 1.
        ("dflash.target_layers", [tap + 1 for tap in spec.taps], ValueType.INT32),
    ]
    entries += [(f"dflash.{key}", value, None) for key, value in _second(spec).items()]
    if "sliding" in spec.layers:
        pattern = [kind == "sliding" for kind in spec.layers]
        entries += [
            ("dflash.attention.sliding_window", spec.window, None),
            ("dflash.attention.sliding_window_pattern", pattern, None),
        ]
    mask = f"{KEY}mask_token_id"
    for key, value in metadata.items():
        if key.startswith("tokenizer.") and key != mask and value != []:
            entries.append((key, value, ValueType.INT32 if key.endswith("token_type") else None))
    return [*entries, (mask, spec.mask_id, None)]


def tensor_type(tensor: Tensor) -> QuantType:
    """Return the type that a trained tensor is exported in."""
    if tensor.ndim != 2:
        return QuantType.F32
    return QuantType.Q8_0 if tensor.shape[1] % QuantType.Q8_0.block_elements == 0 else QuantType.F16


def _renamed(name: str) -> str:
    renamed = gguf_name(name)
    assert renamed is not None, name
    return renamed
