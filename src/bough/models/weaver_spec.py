"""A Weaver head's file: its shapes, and its tensors, in either generation of the layout."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bough.errors import ModelFileError, ModelNotFound, UnsupportedModel
from bough.gguf.header import TensorInfo, shorten
from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.models.draft_spec import DraftSpec, FileSettings
from bough.models.safetensors_source import read_config
from bough.models.spec import ModelSpec

POSITIONS = "pos_emb"  # learned, of the first generation
_MOST_LAYERS = 64
_ROPE_BASE = 1e4
_TYPES = {torch.float32: QuantType.F32, torch.float16: QuantType.F16, torch.bfloat16: QuantType.BF16}
_ACTIVATIONS = {True: "gelu", False: "swiglu"}


@dataclass(frozen=True, slots=True)
class WeaverSpec:
    source: str  # the file, for messages
    target_width: int
    width: int
    layers: int
    heads: int
    inner: int
    depth: int  # positions after the anchor that it was trained for
    candidates: int  # of a position that it was trained to compare
    learned: bool  # positions, a GELU and three projections: the first generation; else rope and SwiGLU
    rope_theta: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, source: str, learned: bool) -> "WeaverSpec":
        keys = FileSettings(source, config)
        width, heads = keys.whole("d_rank"), keys.whole("num_heads")
        activation = keys.get("activation")
        if activation not in (None, _ACTIVATIONS[learned]):
            raise UnsupportedModel(
                f"{source}: activation is {shorten(activation)}, needed {_ACTIVATIONS[learned]!r} "
                f"{'with' if learned else 'without'} {POSITIONS}"
            )
        if width % heads or width // heads % 2:
            raise UnsupportedModel(
                f"{source}: num_heads is {heads}, needed heads of an even size in a d_rank of {width}"
            )
        if keys.whole("d_embed") != keys.whole("d_model"):
            raise UnsupportedModel(
                f"{source}: d_embed is {config['d_embed']}, needed d_model, {config['d_model']}"
            )
        spec = cls(
            source=source,
            target_width=keys.whole("d_model"),
            width=width,
            layers=keys.whole("num_layers", high=_MOST_LAYERS),
            heads=heads,
            inner=keys.whole("mlp_dim"),
            depth=keys.whole("K"),
            candidates=keys.whole("candidate_pool_size"),
            learned=learned,
            rope_theta=keys.number("rope_base", _ROPE_BASE),
        )
        keys.report_others()
        return spec

    def check(self, target: ModelSpec, draft: DraftSpec) -> None:
        """Raise for a target or a draft that this head was not trained for, naming both values."""
        if self.target_width != target.width:
            raise UnsupportedModel(
                f"{self.source}: d_model is {self.target_width}, needed the target's width, {target.width}",
                "a head belongs to one target and one draft of it",
            )
        if self.depth < draft.depth:
            raise UnsupportedModel(
                f"{self.source}: K is {self.depth}, needed the positions of the draft, {draft.depth}",
                "a head belongs to one target and one draft of it",
            )
        if draft.second or draft.markov or draft.refine or draft.reduced or draft.from_anchor:
            raise UnsupportedModel(
                f"{draft.source}: the draft has a head or a vocabulary of its own, needed a DFlash draft",
                "a Weaver head takes the place of any other",
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the file."""
        width, target, inner = self.width, self.target_width, self.inner
        shapes: dict[str, tuple[int, ...]] = {
            **_normed("embed_norm", target),
            **_normed("output_norm", target),
            **_normed("out_norm", width),
            **_linear("token_in", width, target),
            **_linear("proposal_in", width, target),
            "lm_head_query_in.weight": (target, width),
        }
        if self.learned:
            shapes[POSITIONS] = (self.depth, width)
        for layer in range(self.layers):
            block = f"blocks.{layer}."
            shapes |= _normed(f"{block}norm_attn", width) | _normed(f"{block}norm_mlp", width)
            shapes[f"{block}o_proj.weight"] = (width, width)
            if self.learned:
                shapes |= {f"{block}{name}_proj.weight": (width, width) for name in "qkv"}
                shapes |= _linear(f"{block}fc1", inner, width) | _linear(f"{block}fc2", width, inner)
            else:
                shapes[f"{block}qkv_proj.weight"] = (3 * width, width)
                shapes |= _linear(f"{block}gate_up_proj", 2 * inner, width)
                shapes |= _linear(f"{block}down_proj", width, inner)
        return shapes


def _normed(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


class WeaverFile:
    """The `TensorSource` of a Weaver head: a pickle of config and state_dict, or a safetensors file."""

    metadata: Mapping[str, Any] = {}

    def __init__(self, path: Path, *, quant: QuantType | None = None):
        self.path, self._quant = path, quant
        config, self._weights = _read(path)
        self.spec = WeaverSpec.from_config(config, source=str(path), learned=POSITIONS in self._weights)
        needed = self.spec.shapes
        for name in [*needed, *self._weights]:
            tensor = self._weights.get(name)
            if name not in needed or tensor is None or tuple(tensor.shape) != needed[name]:
                seen = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
                shape = list(needed[name]) if name in needed else "no such tensor"
                raise UnsupportedModel(f"{path}: tensor {shorten(name)} {seen}, needed {shape}")
            if tensor.dtype not in _TYPES:
                raise UnsupportedModel(
                    f"{path}: tensor {name} is of type {tensor.dtype}, needed {', '.join(map(str, _TYPES))}"
                )

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(name, tuple(w.shape), self._type(name)) for name, w in self._weights.items()}

    def _type(self, name: str) -> QuantType:
        weight, quant = self._weights[name], self._quant
        is_matrix = weight.ndim == 2 and name != POSITIONS
        if quant is not None and is_matrix and weight.shape[1] % quant.block_elements == 0:
            return quant
        return _TYPES[weight.dtype]

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        info = self.tensors[name]
        assert shape in (None, info.shape), f"{name} has shape {info.shape}, not {shape}"
        return info

    def raw(self, name: str) -> np.ndarray:
        """Return a tensor as uint8 [*shape[:-1], row bytes]."""
        weight, type = self._weights[name], self.tensors[name].type
        if type == self._quant:
            return quantise(weight.float(), type).numpy()
        return weight.contiguous().view(torch.uint8).reshape(*weight.shape[:-1], -1).numpy()

    def release(self, name: str) -> None:
        """The file was read as a whole."""


def _read(path: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the config and the weights of a file."""
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file")
    if path.suffix == ".safetensors":
        try:
            return read_config(path.parent / "config.json"), load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path}: not a readable safetensors file: {error}") from error
    try:
        # Tensors and plain values alone: what else a pickle names is not built, and no code of it runs.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFileError(f"{path}: not a readable file of tensors: {reason}") from error
    config, weights = (
        content.get(k) if isinstance(content, dict) else None for k in ("config", "state_dict")
    )
    sound = isinstance(weights, dict) and all(isinstance(each, Tensor) for each in weights.values())
    if not isinstance(config, dict) or not sound:
        raise ModelFileError(f"{path}: holds {type(content).__name__}, needed a config and a state_dict")
    return config, weights
