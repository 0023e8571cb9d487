"""The rotated basis in which a file stores some of its weights: keys `prism.hadamard.*`. Imports no torch.

Of W are stored, for each block of columns, W diag(s) H: H is the normalised Walsh-Hadamard matrix in
Sylvester's order, which is its own inverse, and s one sign for each column. So W x is the stored matrix times
H (s * x), and a row of an embedding table is s * (H z). A loader that ignored it would write fluent nonsense.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from bough.errors import UnsupportedModel
from bough.gguf.header import TensorInfo, shorten
from bough.gguf.types import QuantType

PREFIX = "prism."
NAMES = f"{PREFIX}hadamard.weight_names"
_CONTRACT = {"version": 1, "transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension"}
_KEYS = {*_CONTRACT, "block_size", "sign_mode", "sign_widths", "sign_values", "gdn_v_grouped"}
_KEYS |= {"weight_names", "inverse_weight_names"}
# Matrices whose input is rotated; experts and small tables are read in other ways.
_MULTIPLIED = re.compile(
    r"(output|fc|blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ssm_(out|alpha|beta)|ffn_(gate|up|down)|nextn\.eh_proj))"
    r"\.weight"
)
_EMBEDDING = "token_embd.weight"
_PRIVATE = (QuantType.PQ2_0, QuantType.PTQ1_0)


class KeyedTensors(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...


@dataclass(frozen=True, slots=True)
class RotatedWeights:
    """Which weights of a file are rotated, and how."""

    names: frozenset[str]
    block: int
    signs: Mapping[int, np.ndarray]  # float32 [columns] by columns; empty: all 1
    # int64 [columns]: of our tiled value heads, the columns in the order in which `ssm_out` has them
    grouped: np.ndarray | None

    def signs_of(self, name: str, columns: int) -> np.ndarray | None:
        """Return the signs of a tensor's columns, float32; None: it is not rotated."""
        if name not in self.names:
            return None
        return self.signs.get(columns, np.ones(columns, np.float32))

    def order_of(self, name: str) -> np.ndarray | None:
        """Return which columns of its input a tensor reads in turn; None: as they are."""
        return self.grouped if name.endswith("ssm_out.weight") else None


def rotation_of(file: KeyedTensors) -> RotatedWeights | None:
    """Return how a file's weights are rotated, None if they are not; refuse it unless all of it is known."""
    if not any(key.startswith(PREFIX) for key in file.metadata):
        _check_private_types(file)
        return None
    keys = _Contract(file)
    keys.check()
    block = keys.value("block_size", int)
    if block < 2 or block & (block - 1):
        keys.refuse("block_size", "a power of two")
    matrices, inverse = keys.names("weight_names"), keys.names("inverse_weight_names", default=[])
    names = frozenset((*matrices, *inverse))
    for name in matrices:
        if not _MULTIPLIED.fullmatch(name):
            keys.refuse("weight_names", f"matrices that are multiplied with a row: {name} is not")
    if any(name != _EMBEDDING for name in inverse):
        keys.refuse("inverse_weight_names", f"{_EMBEDDING} alone")
    if inverse and "output.weight" not in file.tensors:
        keys.refuse("inverse_weight_names", "none in a file whose embedding is its head, too")
    signs = keys.signs()
    for name in names:
        info = file.tensors.get(name)
        if info is None or len(info.shape) != 2 or info.shape[1] % block:
            seen = "missing" if info is None else f"of shape {list(info.shape)}"
            keys.refuse("weight_names", f"matrices whose columns are blocks of {block}: {name} is {seen}")
        if signs and info.shape[1] not in signs:
            keys.refuse("sign_widths", f"the {info.shape[1]} columns of {name} among them")
    return RotatedWeights(names, block, signs, _grouped(keys, names))


def require_usual_basis(file: KeyedTensors, names: Collection[str]) -> None:
    """Raise if one of these tensors is rotated, for what copies or trains weights as they are stored."""
    rotation = rotation_of(file)
    if rotation is not None and (rotated := rotation.names.intersection(names)):
        raise UnsupportedModel(
            f"{file.path}: tensor {min(rotated)} is in a rotated basis, needed: weights in the usual one",
            "choose a file of an unrotated model",
        )


def _check_private_types(file: KeyedTensors) -> None:
    """Refuse PrismML's types where neither keys nor a name say so: another program has a type 143, too."""
    private = next((info for info in file.tensors.values() if info.type in _PRIVATE), None)
    if private is None:
        return
    title = f"{file.path.name} {file.metadata.get('general.name', '')}"
    # The second generation is rotated: a file of it without the keys lost them.
    if not re.search(r"bonsai", title, re.IGNORECASE) or re.search(r"bonsai[-_ ]2\b", title, re.IGNORECASE):
        raise UnsupportedModel(
            f"{file.path}: tensor {private.name} has type {int(private.type)} ({private.type.name}) and the "
            f"file no {PREFIX}hadamard keys, needed: these, or an unrotated model named Bonsai",
            "choose a published file, or another quantisation such as Q4_K_M",
        )


@dataclass(frozen=True, slots=True)
class _Contract:
    file: KeyedTensors

    def check(self) -> None:
        """Refuse keys that are unknown, and known ones with other values."""
        for key in self.file.metadata:
            if key.startswith(PREFIX) and key.removeprefix(f"{PREFIX}hadamard.") not in _KEYS:
                raise UnsupportedModel(
                    f"{self.file.path}: key {key} is not known, needed: {', '.join(sorted(_KEYS))}",
                    "choose a file of an unrotated model",
                )
        for key, needed in _CONTRACT.items():
            if self.value(key, type(needed)) != needed:
                self.refuse(key, repr(needed))

    def value(self, key: str, kind: type, *, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{PREFIX}hadamard.{key}", default)
        if type(value) is not kind:
            self.refuse(key, f"a value of type {kind.__name__}")
        return value

    def names(self, key: str, *, default: list[str] | None = None) -> list[str]:
        names = self.value(key, list, default=default)
        if len(set(map(str, names))) < len(names) or not all(isinstance(name, str) for name in names):
            self.refuse(key, "different names of tensors")
        return names

    def signs(self) -> dict[int, np.ndarray]:
        """Return the signs of each width."""
        mode = self.value("sign_mode", str)
        if mode not in ("explicit", "identity"):
            self.refuse("sign_mode", "explicit or identity")
        explicit, empty = mode == "explicit", None if mode == "explicit" else []
        widths, values = (self.value(f"sign_{part}", list, default=empty) for part in ("widths", "values"))
        if not all(type(width) is int and width > 0 for width in widths) or len(set(widths)) < len(widths):
            self.refuse("sign_widths", "different numbers of columns")
        complete = bool(widths) == explicit and sum(widths) == len(values)
        if not complete or not all(value in (-1, 1) for value in values):
            self.refuse("sign_values", f"{sum(widths)} values of 1 or -1 where sign_mode is {mode}")
        parts = np.split(np.array(values, np.float32), np.cumsum(widths)[:-1]) if widths else []
        return dict(zip(widths, parts, strict=True))

    def refuse(self, key: str, needed: str) -> NoReturn:
        seen = shorten(self.file.metadata.get(f"{PREFIX}hadamard.{key}", "missing"))
        raise UnsupportedModel(
            f"{self.file.path}: {PREFIX}hadamard.{key} is {seen}, needed {needed}",
            "the weights are in a rotated basis: choose a published file, or an unrotated model",
        )


def _grouped(keys: _Contract, names: frozenset[str]) -> np.ndarray | None:
    """Return the order of `ssm_out`'s columns where it was rotated by groups of value heads."""
    outputs = [keys.file.tensors[name].shape[1] for name in names if name.endswith("ssm_out.weight")]
    if not keys.value("gdn_v_grouped", bool, default=False) or not outputs:
        return None
    metadata = keys.file.metadata
    prefix = f"{metadata.get('general.architecture')}.ssm"
    groups, heads = metadata.get(f"{prefix}.group_count"), metadata.get(f"{prefix}.time_step_rank")
    if not isinstance(groups, int) or not isinstance(heads, int) or min(groups, heads) < 1 or heads % groups:
        keys.refuse(
            "gdn_v_grouped", f"false where {prefix}.group_count is {groups} and time_step_rank {heads}"
        )
    columns = outputs[0]
    if len(set(outputs)) > 1 or columns % heads:
        keys.refuse("gdn_v_grouped", f"false where the heads of ssm_out have {sorted(set(outputs))} columns")
    return np.arange(columns).reshape(heads // groups, groups, -1).transpose(1, 0, 2).reshape(-1)
