"""A DFlash, DFlash2 or DSpark checkpoint in safetensors, with GGUF names; quantised while loading."""

import json
import re
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
from bough.models.draft_spec import TENSORS, unknown_tensor

# GGUF's names by those of a checkpoint; beside `TENSORS` the names of drafts that transformers has classes
# for, copies of the target's tensors that other tools leave, and a table of token ids.
_NAMES = {
    **{theirs: ours for part in TENSORS.values() for ours, theirs in part.items()},
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "enc.output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer
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
    return _renamed(name.removeprefix("model."), _NAMES)


def checkpoint_name(name: str) -> str:
    """Return the inverse of `gguf_name`, for a tensor of a draft."""
    theirs = _renamed(name, {ours: theirs for theirs, ours in reversed(_NAMES.items())})
    assert theirs is not None, name
    return theirs


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    number = _NUMBER.search(name)
    renamed = names.get(_NUMBER.sub("{}", name, count=1))
    if renamed is None or ("{}" in renamed) != (number is not None):
        return None
    return renamed if number is None else renamed.format(number[0])
