"""Loading a target's weights from its GGUF file, to continue training it: the inverse of convert.

Value heads are grouped by key head again, norm weights become the difference from one, decays their
logarithm. Quantisation error stays.
"""

from pathlib import Path

import torch
from torch import Tensor

from bough.convert.checkpoint import HFConfig
from bough.convert.families import read_sizes
from bough.convert.rules import Rule, tensor_rules, tile_heads
from bough.errors import UnsupportedModel
from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from workshop.training.target import TargetConfig


def read_target(path: Path, config: TargetConfig) -> dict[str, Tensor]:
    """Return float32 tensors under the names of `Target`'s parameters; raise if the shape differs."""
    rules = tensor_rules(read_sizes(HFConfig(config.to_hf(), "the shape to train")))
    with GGUFFile.open(path) as file:
        if file.architecture != "qwen35":
            raise UnsupportedModel(f"{path}: holds a {file.architecture} model, needed: qwen35")
        surplus = sorted(set(file.tensors) - {rule.name for rule in rules})
        if surplus:
            raise UnsupportedModel(
                f"{path}: holds {surplus[0]}, needed: a tied head and {config.layers} layers, nothing else"
            )
        return dict(_tensor(file, rule, config) for rule in rules)


def _tensor(file: GGUFFile, rule: Rule, config: TargetConfig) -> tuple[str, Tensor]:
    info = file.require_tensor(rule.name, rule.shape)
    ((name, stored),) = rule.sources
    values = dequantise(torch.from_numpy(file.raw(rule.name).copy()), info.type).reshape(rule.shape)
    return name, _original(name, values, config).reshape(stored).contiguous()


def _original(name: str, values: Tensor, config: TargetConfig) -> Tensor:
    # Grouping heads is tiling them with the two counts exchanged.
    group, dim = config.value_heads // config.key_heads, config.delta_dim
    keys = 2 * config.key_heads * dim
    match name.split(".")[-3:]:
        case [_, _, "A_log"]:
            return tile_heads((-values).log(), 0, key_heads=group, head_dim=1)
        case [_, _, "dt_bias"] | [_, "in_proj_a" | "in_proj_b", _]:
            return tile_heads(values, 0, key_heads=group, head_dim=1)
        case [_, "in_proj_z", _]:
            return tile_heads(values, 0, key_heads=group, head_dim=dim)
        case [_, "in_proj_qkv" | "conv1d", _]:
            return torch.cat([values[:keys], tile_heads(values[keys:], 0, key_heads=group, head_dim=dim)])
        case [_, "out_proj", _]:
            return tile_heads(values, 1, key_heads=group, head_dim=dim)
        case ["linear_attn", "norm", _]:
            return values
        case [*_, module, _] if "norm" in module:
            return values - 1
    return values
