"""A DFlash checkpoint in safetensors, seen through GGUF's tensor names, quantised on the way if asked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from treeflash.errors import BadGGUF, ModelFileError, ModelNotFound, UnsupportedModel
from treeflash.gguf.quantise import quantise
from treeflash.gguf.reader import TensorInfo
from treeflash.gguf.types import QuantType

_GLOBAL = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
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
}
_TYPES = {"F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16}
# Files that other tools leave in a checkpoint; the target's own are used.
_SHARED = ("embed_tokens.weight", "lm_head.weight")


class SafetensorsSource:
    """`tensors`, `require_tensor` and `raw` as a GGUF file has them."""

    def __init__(self, path: Path, *, quant: QuantType | None = None):
        self.path, self.config_path = find_checkpoint(path)
        self._quant = quant
        try:
            self._file = safe_open(str(self.path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{self.path}: not a readable safetensors file: {error}") from error
        self._names: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name in self._file.keys():  # noqa: SIM118 - not a dict
            renamed = gguf_name(name)
            if renamed is None:
                if not name.endswith(_SHARED):
                    raise UnsupportedModel(f"{self.path}: tensor {name} is not part of a DFlash draft")
                continue
            part = self._file.get_slice(name)
            if part.get_dtype() not in _TYPES:
                raise UnsupportedModel(
                    f"{self.path}: tensor {name} is of type {part.get_dtype()}, needed {', '.join(_TYPES)}"
                )
            shape = tuple(part.get_shape())
            type = _TYPES[part.get_dtype()]
            if quant is not None and len(shape) == 2 and shape[1] % quant.block_elements == 0:
                type = quant
            self._names[renamed] = name
            self.tensors[renamed] = TensorInfo(renamed, shape, type)

    def config(self) -> Mapping[str, Any]:
        try:
            config = json.loads(self.config_path.read_text())
        except FileNotFoundError:
            raise ModelNotFound(
                f"{self.config_path} is missing: a DFlash checkpoint needs its config.json beside the weights"
            ) from None
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{self.config_path}: not readable as JSON: {error}") from error
        if not isinstance(config, dict):
            raise ModelFileError(f"{self.config_path}: holds {type(config).__name__}, needed an object")
        return config

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise BadGGUF(f"{self.path}: no tensor for {name}")
        if shape is not None and info.shape != shape:
            raise BadGGUF(
                f"{self.path}: tensor {self._names[name]} has shape {list(info.shape)}, needed {list(shape)}"
            )
        return info

    def raw(self, name: str) -> np.ndarray:
        """uint8 [*shape[:-1], row bytes]."""
        info = self.require_tensor(name)
        tensor = self._file.get_tensor(self._names[name])
        if info.type == self._quant:
            return quantise(tensor.float(), info.type).numpy()
        return tensor.contiguous().view(torch.uint8).reshape(*info.shape[:-1], -1).numpy()


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """The weights and the config of a folder, or of a safetensors file."""
    if not path.is_dir():
        return path, path.parent / "config.json"
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ModelNotFound(f"{path}: needed one .safetensors file for a draft, found {names}")
    return found[0], path / "config.json"


def gguf_name(name: str) -> str | None:
    """z-lab's tensor name in GGUF's spelling."""
    name = name.removeprefix("model.")
    if name in _GLOBAL:
        return _GLOBAL[name]
    part, _, rest = name.removeprefix("layers.").partition(".")
    stem = rest.removesuffix(".weight")
    if name.startswith("layers.") and part.isdigit() and stem in _LAYER and rest.endswith(".weight"):
        return f"blk.{part}.{_LAYER[stem]}.weight"
    return None
