"""Rules that build GGUF tensors from checkpoint tensors, per family. Does no I/O."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bough.convert.families import ExpertSizes, Hybrid, ModelSizes

Shape = tuple[int, ...]
Build = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rule:
    """A GGUF tensor, the checkpoint tensors it is built from, and how; shapes in torch order."""

    name: str
    shape: Shape
    sources: tuple[tuple[str, Shape], ...]
    build: Build


def tensor_rules(sizes: ModelSizes, names: Container[str] = ()) -> list[Rule]:
    """Return a rule for every tensor of the GGUF file; `names` are the checkpoint's tensors."""
    embedding = (sizes.vocabulary, sizes.width)
    rules = [_copied("token_embd.weight", "model.embed_tokens.weight", embedding)]
    rules.append(_norm(sizes, "output_norm", "model.norm", sizes.width))
    if not sizes.tied:
        rules.append(_copied("output.weight", "lm_head.weight", embedding))
    if sizes.rope_factors:
        factors = torch.tensor(sizes.rope_factors, dtype=torch.float32)
        rules.append(Rule("rope_freqs.weight", tuple(factors.shape), (), partial(_of, factors)))
    block = partial(_block, sizes, names=names)
    for layer in range(sizes.layers):
        full_attention = (layer + 1) % sizes.interval == 0
        rules += block(f"model.layers.{layer}.", f"blk.{layer}.", full_attention=full_attention)
    for layer in range(sizes.mtp_layers):
        target = f"blk.{sizes.layers + layer}."
        rules += block(f"mtp.layers.{layer}.", target, full_attention=True)
        rules += _prediction(sizes, target + "nextn.")
    return rules


def tile_heads(tensor: torch.Tensor, dim: int, *, key_heads: int, head_dim: int) -> torch.Tensor:
    """Reorder value heads along `dim` from grouped to tiled: head h then uses key head h % key_heads."""
    shape = tensor.shape
    grouped = tensor.reshape(*shape[:dim], key_heads, -1, head_dim, *shape[dim + 1 :])
    return grouped.transpose(dim, dim + 1).reshape(shape)


def interleave_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from halves to adjacent pairs, for interleaved rope."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _plus_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0].float() + 1


def _of(constant: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return constant


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors))


def _copied(name: str, source: str, shape: Shape) -> Rule:
    return Rule(name, shape, ((source, shape),), _only)


def _norm(sizes: ModelSizes, target: str, source: str, size: int, *, centred: bool = False) -> Rule:
    # Qwen3.5 checkpoints store the difference from one, Muse-Glimmer's of norms in blocks; GGUF files the
    # factor itself
    build = _plus_one if sizes.hybrid or (centred and sizes.sliding) else _only
    return Rule(f"{target}.weight", (size,), ((f"{source}.weight", (size,)),), build)


def _block(
    sizes: ModelSizes, source: str, target: str, *, full_attention: bool, names: Container[str]
) -> list[Rule]:
    rules = [_norm(sizes, target + "attn_norm", source + "input_layernorm", sizes.width, centred=True)]
    if full_attention or sizes.hybrid is None:
        rules += _attention(sizes, source + "self_attn.", target)
    else:
        rules += _delta(sizes.hybrid, sizes.width, source + "linear_attn.", target)
    norms = {"post_attention": "post_attention_norm" if sizes.hybrid else "ffn_norm"}
    if sizes.sliding:
        norms = {
            "post_attention": "post_attention_norm",
            "pre_feedforward": "ffn_norm",
            "post_feedforward": "post_ffw_norm",
        }
    for original, norm in norms.items():
        rules.append(_norm(sizes, target + norm, f"{source}{original}_layernorm", sizes.width, centred=True))
    if sizes.experts is None:
        return rules + _feed_forward(source + "mlp.", target + "ffn_{}", sizes.feed_forward, sizes.width)
    return rules + _experts(sizes.experts, sizes.width, source + "mlp.", target, names=names)


def _attention(sizes: ModelSizes, source: str, target: str) -> list[Rule]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    # the hybrid's query projection includes the output gate
    query_rows = 2 * queries if sizes.hybrid else queries
    rules = []
    for letter, rows, rope_heads in (
        ("q", query_rows, sizes.heads),
        ("k", keys, sizes.kv_heads),
        ("v", keys, 0),
    ):
        paired = sizes.family.interleaved_rope and rope_heads > 0
        shape, name = (rows, sizes.width), f"{source}{letter}_proj"
        build = partial(_interleaved, heads=rope_heads) if paired else _only
        rules.append(Rule(f"{target}attn_{letter}.weight", shape, ((name + ".weight", shape),), build))
        if sizes.family.qkv_biases:
            rules.append(_copied(f"{target}attn_{letter}.bias", name + ".bias", (rows,)))
    rules.append(_copied(target + "attn_output.weight", source + "o_proj.weight", (sizes.width, queries)))
    if sliding := sizes.sliding:
        gate = (queries, sizes.width)
        rules.append(_copied(target + "attn_gate.weight", source + "gate_proj.weight", gate))
        for letter, factor in (("q", sliding.query_scale), ("k", 1.0)):
            constant = torch.full((sizes.head_dim,), factor)
            rules.append(
                Rule(f"{target}attn_{letter}_norm.weight", (sizes.head_dim,), (), partial(_of, constant))
            )
    if sizes.family.head_norms:
        rules.append(_norm(sizes, target + "attn_q_norm", source + "q_norm", sizes.head_dim))
        rules.append(_norm(sizes, target + "attn_k_norm", source + "k_norm", sizes.head_dim))
    return rules


def _interleaved(tensors: Sequence[torch.Tensor], *, heads: int) -> torch.Tensor:
    return interleave_halves(tensors[0], heads)


def _delta(hybrid: Hybrid, width: int, source: str, target: str) -> list[Rule]:
    keys, values = 2 * hybrid.key_heads * hybrid.head_dim, hybrid.value_heads * hybrid.head_dim
    channels, heads = keys + values, hybrid.value_heads
    tile = partial(tile_heads, key_heads=hybrid.key_heads)

    def value_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = tensors[0].reshape(channels, -1)
        return torch.cat([rows[:keys], tile(rows[keys:], 0, head_dim=hybrid.head_dim)])

    def head_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tile(tensors[0], 0, head_dim=tensors[0].shape[0] // heads)

    def columns(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tile(tensors[0], 1, head_dim=hybrid.head_dim)

    def decay(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return -head_rows(tensors).float().exp()

    def rule(name: str, original: str, build: Build, shape: Shape, stored: Shape | None = None) -> Rule:
        return Rule(target + name, shape, ((source + original, stored or shape),), build)

    stored_taps = (channels, 1, hybrid.kernel)
    return [
        rule("attn_qkv.weight", "in_proj_qkv.weight", value_rows, (channels, width)),
        rule("attn_gate.weight", "in_proj_z.weight", head_rows, (values, width)),
        rule("ssm_alpha.weight", "in_proj_a.weight", head_rows, (heads, width)),
        rule("ssm_beta.weight", "in_proj_b.weight", head_rows, (heads, width)),
        rule("ssm_a", "A_log", decay, (heads,)),
        rule("ssm_dt.bias", "dt_bias", head_rows, (heads,)),
        rule("ssm_conv1d.weight", "conv1d.weight", value_rows, (channels, hybrid.kernel), stored_taps),
        rule("ssm_norm.weight", "norm.weight", _only, (hybrid.head_dim,)),
        rule("ssm_out.weight", "out_proj.weight", columns, (width, values)),
    ]


def _feed_forward(source: str, target: str, size: int, width: int) -> list[Rule]:
    def rule(part: str, shape: Shape) -> Rule:
        return _copied(target.format(part) + ".weight", f"{source}{part}_proj.weight", shape)

    return [rule("gate", (size, width)), rule("up", (size, width)), rule("down", (width, size))]


def _experts(
    experts: ExpertSizes, width: int, source: str, target: str, *, names: Container[str]
) -> list[Rule]:
    count, size = experts.count, experts.feed_forward
    pair = source + "experts.gate_up_proj"
    shapes = {"gate": (count, size, width), "up": (count, size, width), "down": (count, width, size)}

    def stacked(part: str) -> Rule:
        names = [f"{source}experts.{expert}.{part}_proj.weight" for expert in range(count)]
        sources = tuple((name, shapes[part][1:]) for name in names)
        return Rule(f"{target}ffn_{part}_exps.weight", shapes[part], sources, _stack)

    def half(part: str, rows: slice) -> Rule:
        sources = ((pair, (count, 2 * size, width)),)
        return Rule(f"{target}ffn_{part}_exps.weight", shapes[part], sources, lambda x: x[0][:, rows])

    if pair in names:
        rules = [half("gate", slice(0, size)), half("up", slice(size, 2 * size))]
        rules.append(_copied(target + "ffn_down_exps.weight", source + "experts.down_proj", shapes["down"]))
    else:
        rules = [stacked(part) for part in shapes]
    rules = [_copied(target + "ffn_gate_inp.weight", source + "gate.weight", (count, width)), *rules]
    if not experts.shared_feed_forward:
        return rules
    shared_gate = ((source + "shared_expert_gate.weight", (1, width)),)
    return [
        *rules,
        Rule(target + "ffn_gate_inp_shexp.weight", (width,), shared_gate, lambda x: x[0].reshape(-1)),
        *_feed_forward(
            source + "shared_expert.", target + "ffn_{}_shexp", experts.shared_feed_forward, width
        ),
    ]


def _prediction(sizes: ModelSizes, target: str) -> list[Rule]:
    return [
        _copied(target + "eh_proj.weight", "mtp.fc.weight", (sizes.width, 2 * sizes.width)),
        _norm(sizes, target + "enorm", "mtp.pre_fc_norm_embedding", sizes.width),
        _norm(sizes, target + "hnorm", "mtp.pre_fc_norm_hidden", sizes.width),
        _norm(sizes, target + "shared_head_norm", "mtp.norm", sizes.width),
    ]
