"""A DFlash, DFlash2 or DSpark checkpoint in safetensors, with GGUF names; quantised while loading."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from bough.errors import ModelFileError, ModelNotFound, UnsupportedModel
from bough.gguf.header import TensorInfo
from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.hub.names import SHARD, one_checkpoint
from bough.models.draft_spec import unknown_tensor

_GLOBAL = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    # As transformers names the drafts that it has classes for.
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "enc.output_norm.weight",
    # Copies of the target's tensors that other tools leave in a checkpoint.
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "d2t": "d2t",
    "ar_approximation.norm.weight": "refine_norm.weight",
    "ar_approximation.ug.weight": "refine_ug.weight",
    "ar_approximation.ug.bias": "refine_ug.bias",
    "ar_approximation.d.weight": "refine_d.weight",
    "injection.message.weight": "refine_message.weight",
    "injection.receiver_gate.weight": "refine_receiver.weight",
    "injection.predecessor_gate.weight": "refine_predecessor.weight",
    "injection.bias": "refine_gate.bias",
    "transfer_codes": "refine_codes.weight",
}
_LAYER = {
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
}
_INJECTIONS = {"injection.readouts": "refine_readout", "injection.writes": "refine_write"}
_BASE_KERNELS = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}
_TYPES = {"F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16}
# Which of the target's tokens are in a reduced vocabulary: the other table says it, too. Whether codes of
# tokens are there: they are needed.
_IGNORED = ("t2d", "transfer_ready")
# A mask that is not a row of the target's embedding.
_MASK_FILE = "mask_embedding.pt"


class SafetensorsSource:
    """The `TensorSource` of a safetensors file, or of all shards of a checkpoint by the path of one."""

    metadata: Mapping[str, Any] = {}

    def __init__(self, path: Path, *, quant: QuantType | None = None):
        self.path = path
        self._quant = quant
        self._names: dict[str, str] = {}
        self._files: dict[str, Any] = {}  # the open shard of each tensor, by its name in the checkpoint
        self.tensors: dict[str, TensorInfo] = {}
        for shard in _shards(path):
            self._add(shard)

    def _add(self, path: Path) -> None:
        try:
            file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path}: not a readable safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a dict
            renamed = gguf_name(name)
            if name in _IGNORED:
                continue
            if renamed is None:
                raise unknown_tensor(str(path), name)
            if renamed in self._names:
                raise ModelFileError(
                    f"{path}: tensor {name} is there as {self._names[renamed]} too, needed one of them"
                )
            self._names[renamed] = name
            self._files[name] = file
            self.tensors[renamed] = self._describe(renamed)

    def _describe(self, renamed: str) -> TensorInfo:
        name = self._names[renamed]
        part = self._files[name].get_slice(name)
        dtype, shape = part.get_dtype(), tuple(part.get_shape())
        if renamed == "d2t" and dtype == "I64" and len(shape) == 1:
            return TensorInfo(renamed, shape, QuantType.I64)
        if dtype not in _TYPES:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is of type {dtype}, needed {', '.join(_TYPES)}"
            )
        dimensions = (3,) if "_conv_base" in renamed else (1, 2)
        if len(shape) not in dimensions:
            needed = " or ".join(map(str, dimensions))
            raise ModelFileError(
                f"{self.path}: tensor {name} has shape {list(shape)}, needed {needed} dimensions"
            )
        quant = self._quant
        quantised = quant is not None and len(shape) == 2 and shape[1] % quant.block_elements == 0
        return TensorInfo(renamed, shape, quant if quant is not None and quantised else _TYPES[dtype])

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            needed = "" if shape is None else f" of shape {list(shape)}"
            raise ModelFileError(
                f"{self.path}: tensor {checkpoint_name(name)}{needed} is missing; "
                f"the file has {len(self.tensors)} others"
            )
        if shape is not None and info.shape != shape:
            raise ModelFileError(
                f"{self.path}: tensor {self._names[name]} has shape {list(info.shape)}, needed {list(shape)}"
            )
        return info

    def raw(self, name: str) -> np.ndarray:
        """Return a tensor as uint8 [*shape[:-1], row bytes]."""
        info = self.require_tensor(name)
        tensor = self._files[self._names[name]].get_tensor(self._names[name])
        if info.type is QuantType.I64:
            tensor = tensor + torch.arange(len(tensor))  # stored as the distance to the draft's own id
        if info.type == self._quant:
            try:
                return quantise(tensor.float(), info.type).numpy()
            except ModelFileError as error:
                where = f"{self.path}: tensor {self._names[name]}"
                raise type(error)(f"{where}: {error.message}", error.hint) from error
        return tensor.contiguous().view(torch.uint8).reshape(*info.shape[:-1], -1).numpy()

    def release(self, name: str) -> None:
        """Nothing is mapped once a tensor has been read."""


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """Return the weights (of several shards the first) and the config of a folder or a safetensors file."""
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or folder")
    folder = path if path.is_dir() else path.parent
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.is_dir() and files and all(SHARD.fullmatch(file.name) for file in files):
        _shards(files[0])  # raises for one that is missing
    if not one_checkpoint([file.name for file in files]) and path.is_dir():
        names = ", ".join(file.name for file in files[:4]) or "none"
        raise ModelNotFound(
            f"{path}: needed one .safetensors file for a draft, or all shards of one, "
            f"found {len(files)} ({names})",
            "name the file itself, or its folder without the others",
        )
    if (folder / _MASK_FILE).exists():
        raise UnsupportedModel(
            f"{folder}: the draft has {_MASK_FILE}, needed one whose mask is a token of the target"
        )
    return files[0], folder / "config.json"


def _shards(path: Path) -> list[Path]:
    """Return all shards of the checkpoint that a file is of; a file that is no shard alone."""
    match = SHARD.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    if match is None or count == 1:
        return [path]
    names = [f"{match['stem']}-{number:05d}-of-{match['count']}" for number in range(1, count + 1)]
    shards = [path.with_name(f"{name}.safetensors") for name in names]
    for shard in shards:
        if not shard.exists():
            raise ModelNotFound(f"{shard}: no such file, needed all {count} shards of the draft")
    return shards


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the object in a config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(
            f"{path} is missing: a DFlash checkpoint needs its config.json beside the weights"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFileError(f"{path}: holds {type(config).__name__}, needed an object")
    return config


def gguf_name(name: str) -> str | None:
    """Return GGUF's name of z-lab's tensor name; None if it is not part of a draft."""
    name = name.removeprefix("model.")
    if name in _GLOBAL:
        return _GLOBAL[name]
    group, _, index = name.removesuffix(".weight").rpartition(".")
    if group in _INJECTIONS and index.isdecimal() and name.endswith(".weight"):
        return f"blk.{index}.{_INJECTIONS[group]}.weight"
    part, _, rest = name.removeprefix("layers.").partition(".")
    stem = rest.removesuffix(".weight")
    if name.startswith("layers.") and part.isdecimal() and stem in _LAYER and rest.endswith(".weight"):
        return f"blk.{part}.{_LAYER[stem]}.weight"
    if name.startswith("layers.") and part.isdecimal() and rest in _BASE_KERNELS:
        return f"blk.{part}.{_BASE_KERNELS[rest]}.weight"
    return None


def checkpoint_name(name: str) -> str:
    """Return the inverse of `gguf_name`, for a tensor of a draft."""
    for ours, theirs in _GLOBAL.items():
        if theirs == name:
            return ours
    _, layer, part, _ = name.split(".")
    for ours, theirs in _INJECTIONS.items():
        if theirs == part:
            return f"{ours}.{layer}.weight"
    for ours, theirs in _BASE_KERNELS.items():
        if theirs == part:
            return f"layers.{layer}.{ours}"
    ours = next(ours for ours, theirs in _LAYER.items() if theirs == part)
    return f"layers.{layer}.{ours}.weight"
