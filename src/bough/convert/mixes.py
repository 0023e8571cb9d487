"""Quantisation mixes: which GGUF type each tensor gets. Imports no torch."""

import re
from types import MappingProxyType

from bough.errors import UsageError
from bough.gguf.types import QuantType

# Values of general.file_type: llama.cpp's number for the mix.
FILE_TYPES = MappingProxyType({"f32": 0, "f16": 1, "q8_0": 7, "q4_k_m": 15})
QUANTISATION_VERSION = 2  # general.quantization_version
_FLAT = {"f32": QuantType.F32, "f16": QuantType.F16, "q8_0": QuantType.Q8_0}
# Quantising these saves few bytes and costs quality: routers, the four-tap convolution.
_ALWAYS_FLOAT = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d")
# The q4_k_m of published Qwen3.5 files; every matrix not named here is Q4_K.
_Q4_K_M = {
    "output": QuantType.Q6_K,
    "attn_qkv": QuantType.Q5_K,
    "ssm_out": QuantType.Q5_K,
    "ssm_alpha": QuantType.Q8_0,
    "ssm_beta": QuantType.Q8_0,
}
_DOWN = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def check_mix(mix: str) -> None:
    if mix not in FILE_TYPES:
        raise UsageError(f"mix is {mix!r}, needed: one of {', '.join(FILE_TYPES)}")


def tensor_type(
    name: str, shape: tuple[int, ...], *, mix: str, layers: int, interval: int = 1, tied: bool = False
) -> QuantType:
    """Return the type of the tensor `name` of torch shape `shape`.

    layers: depth of the trunk; interval: every interval-th layer has full attention; tied: no output.weight.
    """
    kind = wanted_type(name, len(shape), mix=mix, layers=layers, interval=interval, tied=tied)
    return fitting_type(kind, shape[-1])


def wanted_type(
    name: str, dimensions: int, *, mix: str, layers: int, interval: int = 1, tied: bool = False
) -> QuantType:
    """Return the mix's type for a tensor, regardless of its row length."""
    match = _BLOCK.fullmatch(name)
    block, stem = (int(match[1]), match[2]) if match else (0, name)
    stem, _, suffix = stem.rpartition(".")
    if dimensions < 2 or suffix != "weight" or stem.endswith("norm") or stem in _ALWAYS_FLOAT:
        return QuantType.F32
    if mix in _FLAT:
        return _FLAT[mix]
    if stem == "token_embd" and tied:
        return _Q4_K_M["output"]
    if stem in _DOWN and _more_bits(block, layers):
        return QuantType.Q6_K
    # llama.cpp counts the attn_v tensors alone, but against all layers with attn_v or attn_qkv
    if stem == "attn_v" and _more_bits(block // interval, layers):
        return QuantType.Q6_K
    return _Q4_K_M.get(stem, QuantType.Q4_K)


def fitting_type(kind: QuantType, row: int) -> QuantType:
    """Return `wanted`, or the next type whose blocks divide a row of `row` weights."""
    if row % kind.block_elements == 0:
        return kind
    return QuantType.Q8_0 if row % QuantType.Q8_0.block_elements == 0 else QuantType.F16


def _more_bits(index: int, count: int) -> bool:
    """Return whether the mix gives this layer more bits: the first and last eighth, every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
