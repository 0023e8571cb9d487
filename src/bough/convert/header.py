"""Files that have a model's header and holes instead of weights, for plans before anything is downloaded."""

import json
import struct
from pathlib import Path
from typing import Any

from bough.convert.checkpoint import HFConfig
from bough.convert.convert import Entry, heading
from bough.convert.families import ModelSizes, metadata, read_sizes
from bough.convert.mixes import tensor_type
from bough.convert.rules import tensor_rules
from bough.gguf.writer import GGUFWriter
from bough.hub.catalog import FROM_CARD, ModelCard, Shape
from bough.models.draft_spec import default_taps

MIX = "q4_k_m"
_CLASSES = {
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "muse-glimmer": "MuseGlimmerForConditionalGeneration",
}
_DRAFT_HEADS, _DRAFT_KV_HEADS, _DRAFT_DIM = 32, 8, 128  # of every published DFlash draft


def write_target(card: ModelCard, shape: Shape, path: Path) -> Path:
    """Write the header of a card's target in the q4_k_m mix; the file has the whole one's size."""
    sizes = _sizes(card, shape)
    entries: list[Entry] = [
        *heading(card.title, MIX),
        *metadata(sizes),
        (FROM_CARD, card.name, None),
    ]
    vocabulary = f"{sizes.family.architecture}.vocab_size"
    if all(key != vocabulary for key, _, _ in entries):
        entries.append((vocabulary, sizes.vocabulary, None))
    with GGUFWriter(path, sizes.family.architecture) as writer:
        for key, value, kind in entries:
            writer.add(key, value, kind)
        options = {"mix": MIX, "layers": sizes.layers, "interval": sizes.interval, "tied": sizes.tied}
        for rule in tensor_rules(sizes):
            writer.add_tensor(rule.name, rule.shape, tensor_type(rule.name, rule.shape, **options))
        writer.write_header(holes=True)
    return path


def _sizes(card: ModelCard, shape: Shape) -> ModelSizes:
    match = card.match
    heads, kv_heads, head_dim = shape.heads
    values: dict[str, Any] = {
        "architectures": [_CLASSES[match.architecture]],
        "num_hidden_layers": match.layers,
        "hidden_size": match.width,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.theta,
    }
    if shape.feed_forward:
        values["intermediate_size"] = shape.feed_forward
    if shape.window:
        values |= {"sliding_window": shape.window, "output_multiplier": (match.width / 256) ** -0.5}
        values |= {"final_logit_softcapping": 20.0}
    if shape.delta is not None:
        key_heads, value_heads = shape.delta
        values |= {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "rope_parameters": {"rope_theta": 10000000.0, "mrope_section": [11, 11, 10]},
        }
    if shape.experts is not None:
        count, used, width = shape.experts
        values |= {"num_experts": count, "num_experts_per_tok": used}
        values |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
        values |= {"norm_topk_prob": True}
    return read_sizes(HFConfig(values, card.name))


def write_draft(card: ModelCard, shape: Shape, folder: Path) -> Path:
    """Write the config and the header of a DFlash draft in the card's sizes; return the weights' path."""
    assert shape.draft is not None
    layers, feed_forward = shape.draft
    width, count = card.match.width, max(2, layers)
    heads, kv_heads = _DRAFT_HEADS * _DRAFT_DIM, _DRAFT_KV_HEADS * _DRAFT_DIM
    taps = default_taps(card.match.layers, count)
    config = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_attention_heads": _DRAFT_HEADS,
        "num_key_value_heads": _DRAFT_KV_HEADS,
        "head_dim": _DRAFT_DIM,
        "block_size": 16,
        "rope_theta": 10000000.0,
        "target_layer_ids": taps,
        "mask_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(taps) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(layers):
        block = f"layers.{layer}"
        shapes |= {
            f"{block}.self_attn.q_proj.weight": (heads, width),
            f"{block}.self_attn.k_proj.weight": (kv_heads, width),
            f"{block}.self_attn.v_proj.weight": (kv_heads, width),
            f"{block}.self_attn.o_proj.weight": (width, heads),
            f"{block}.self_attn.q_norm.weight": (_DRAFT_DIM,),
            f"{block}.self_attn.k_norm.weight": (_DRAFT_DIM,),
            f"{block}.input_layernorm.weight": (width,),
            f"{block}.post_attention_layernorm.weight": (width,),
            f"{block}.mlp.gate_proj.weight": (feed_forward, width),
            f"{block}.mlp.up_proj.weight": (feed_forward, width),
            f"{block}.mlp.down_proj.weight": (width, feed_forward),
        }
    tensors, end = {}, 0
    for name, dims in shapes.items():
        size = 2 * dims[0] * (dims[1] if len(dims) > 1 else 1)
        tensors[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [end, end + size]}
        end += size
    header, path = json.dumps(tensors).encode(), folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return path
