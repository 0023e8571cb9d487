"""What a converted file must hold, spelled out head by head; shares no code with the converter."""

from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


def tiled(tensor: torch.Tensor, config: Any, head_dim: int) -> torch.Tensor:
    """Value heads of the first axis one at a time: head j * keys + k of the file was head k * ratio + j."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    ratio = values // keys
    heads = tensor.split(head_dim)
    assert len(heads) == values
    return torch.cat([heads[k * ratio + j] for j in range(ratio) for k in range(keys)])


def paired(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head as 0, half, 1, half + 1, ..."""
    rows = []
    for head in tensor.split(head_dim):
        for i in range(head_dim // 2):
            rows += [head[i], head[i + head_dim // 2]]
    return torch.stack(rows)


def _hybrid_attention(source: Tensors, config: Any) -> Tensors:
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    size = config.linear_value_head_dim
    mixed, taps = source["in_proj_qkv.weight"], source["conv1d.weight"][:, 0]
    return {
        "attn_qkv.weight": torch.cat([mixed[:keys], tiled(mixed[keys:], config, size)]),
        "attn_gate.weight": tiled(source["in_proj_z.weight"], config, size),
        "ssm_alpha.weight": tiled(source["in_proj_a.weight"], config, 1),
        "ssm_beta.weight": tiled(source["in_proj_b.weight"], config, 1),
        "ssm_a": tiled(-torch.exp(source["A_log"].float()), config, 1),
        "ssm_dt.bias": tiled(source["dt_bias"], config, 1),
        "ssm_conv1d.weight": torch.cat([taps[:keys], tiled(taps[keys:], config, size)]),
        "ssm_norm.weight": source["norm.weight"],
        "ssm_out.weight": tiled(source["out_proj.weight"].T.contiguous(), config, size).T,
    }


def _feed_forward(source: Tensors, config: Any) -> Tensors:
    if "gate_proj.weight" in source:
        return {f"ffn_{part}.weight": source[f"{part}_proj.weight"] for part in ("gate", "up", "down")}
    stacked = source["experts.gate_up_proj"]
    size = config.moe_intermediate_size
    made = {
        "ffn_gate_inp.weight": source["gate.weight"],
        "ffn_gate_exps.weight": stacked[:, :size],
        "ffn_up_exps.weight": stacked[:, size:],
        "ffn_down_exps.weight": source["experts.down_proj"],
    }
    if "shared_expert_gate.weight" not in source:
        return made
    made["ffn_gate_inp_shexp.weight"] = source["shared_expert_gate.weight"][0]
    for part in ("gate", "up", "down"):
        made[f"ffn_{part}_shexp.weight"] = source[f"shared_expert.{part}_proj.weight"]
    return made


def _below(tensors: Tensors, prefix: str) -> Tensors:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _block(source: Tensors, config: Any, family: str) -> Tensors:
    one = 1.0 if family.startswith("qwen35") else 0.0
    second = "post_attention_norm" if one else "ffn_norm"
    made = {
        "attn_norm.weight": source["input_layernorm.weight"].float() + one,
        f"{second}.weight": source["post_attention_layernorm.weight"].float() + one,
        **_feed_forward(_below(source, "mlp."), config),
    }
    if "linear_attn.A_log" in source:
        return made | _hybrid_attention(_below(source, "linear_attn."), config)
    for theirs, ours in (
        ("q_proj", "attn_q"),
        ("k_proj", "attn_k"),
        ("v_proj", "attn_v"),
        ("o_proj", "attn_output"),
    ):
        for kind in ("weight", "bias"):
            if f"self_attn.{theirs}.{kind}" in source:
                made[f"{ours}.{kind}"] = source[f"self_attn.{theirs}.{kind}"]
    for letter in "qk":
        if f"self_attn.{letter}_norm.weight" in source:
            made[f"attn_{letter}_norm.weight"] = source[f"self_attn.{letter}_norm.weight"].float() + one
        if family.startswith("llama"):
            made[f"attn_{letter}.weight"] = paired(made[f"attn_{letter}.weight"], config.head_dim)
    return made


def expected_tensors(tensors: Tensors, config: Any, family: str) -> dict[str, np.ndarray]:
    """GGUF tensors, in float32, for a checkpoint of `family` (rope_freqs.weight apart)."""
    one = 1.0 if family.startswith("qwen35") else 0.0
    made = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"].float() + one,
    }
    if "lm_head.weight" in tensors:
        made["output.weight"] = tensors["lm_head.weight"]
    depth = config.num_hidden_layers
    blocks = [_below(tensors, f"model.layers.{i}.") for i in range(depth)]
    if "mtp.fc.weight" in tensors:
        blocks.append(_below(tensors, "mtp.layers.0."))
        made[f"blk.{depth}.nextn.eh_proj.weight"] = tensors["mtp.fc.weight"]
        for theirs, ours in (
            ("pre_fc_norm_embedding", "enorm"),
            ("pre_fc_norm_hidden", "hnorm"),
            ("norm", "shared_head_norm"),
        ):
            made[f"blk.{depth}.nextn.{ours}.weight"] = tensors[f"mtp.{theirs}.weight"].float() + one
    for i, source in enumerate(blocks):
        made |= {f"blk.{i}.{name}": tensor for name, tensor in _block(source, config, family).items()}
    return {name: tensor.float().contiguous().numpy() for name, tensor in made.items()}
