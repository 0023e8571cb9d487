"""Finds and opens the native library for this CPU, and mirrors its structures (native.h)."""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from bough.kernels.native.build import VARIANTS, digest, here, library_path

MAX_ROWS = 64  # of one call of `tf_step`
INT8, INT16 = 0, 1
CACHE_FORMATS = {"f32": 0, "f16": 1, "q8_0": 2}
# Flags of /proc/cpuinfo ("Features" on ARM) that a variant needs, the fastest variant first.
_BASE = {"avx2", "fma", "f16c", "bmi2", "movbe"}
_NEEDS = {
    "avx512vnni": _BASE | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"},
    "avxvnni": _BASE | {"avx_vnni"},
    "avx2": _BASE,
    "neon": {"asimd", "asimddp"},
}
assert set(_NEEDS) == set(VARIANTS)


class NativeMatrix(Structure):
    _fields_ = [
        ("kind", c_int32), ("rows", c_int32), ("columns", c_int32), ("data", c_void_p), ("bias", c_void_p),
        ("rotation", c_void_p),
    ]  # fmt: skip


class NativeRotation(Structure):
    _fields_ = [("block", c_int32), ("signs", c_void_p), ("order", c_void_p)]


class Layer(Structure):
    _fields_ = [
        ("attention", c_int32), ("inputs", c_int32), ("in_", NativeMatrix * 4), ("out", NativeMatrix),
        ("gate", NativeMatrix), ("up", NativeMatrix), ("down", NativeMatrix), ("norm", c_void_p),
        ("ffn_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("conv", c_void_p),
        ("decay", c_void_p), ("time_bias", c_void_p), ("state_norm", c_void_p),
    ]  # fmt: skip


class Model(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("width", "ffn", "heads", "kv_heads", "head_dim", "rope_dim")),
        *((name, c_int32) for name in ("interleaved", "gated", "key_heads", "value_heads", "state_dim")),
        *((name, c_int32) for name in ("conv_width", "mode", "layers", "features")),
        ("eps", c_float), ("frequencies", c_void_p), ("axes", c_void_p), ("norm", c_void_p),
        ("embedding", NativeMatrix), ("head", NativeMatrix), ("layer", POINTER(Layer)),
    ]  # fmt: skip


class Cache(Structure):
    _fields_ = [
        ("data", c_void_p), ("page_stride", c_int64), ("head_stride", c_int64), ("scales", c_void_p),
        ("scales_page", c_int64), ("scales_head", c_int64), ("format", c_int32),
    ]  # fmt: skip


class LayerState(Structure):
    _fields_ = [
        ("k", Cache), ("v", Cache), ("state", c_void_p), ("window", c_void_p), ("inputs", c_void_p),
        ("gates", c_void_p),
    ]  # fmt: skip


class NativeStep(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("rows", "chunk", "pending", "taps", "skipped")),
        *((name, c_int32) for name in ("page", "pages", "table", "saved")),
        ("length", c_int64), ("offset", c_int64), ("rope", c_void_p), ("embedded", c_void_p),
        ("tokens", c_void_p), ("parents", c_void_p), ("page_table", c_void_p),
        ("path", c_void_p), ("tap", c_void_p), ("features", c_void_p), ("hidden", c_void_p),
        ("logits", c_void_p),
    ]  # fmt: skip


class Ring(Structure):
    _fields_ = [
        ("k", c_void_p), ("v", c_void_p), ("ring", c_int32), ("window", c_int32), ("causal", c_int32),
    ]  # fmt: skip


class NativeBlock(Structure):
    _fields_ = [
        ("rows", c_int32), ("length", c_int64), ("start", c_int64), ("in_", c_void_p), ("norm", c_void_p),
        ("hidden", c_void_p),
    ]  # fmt: skip


class NativeProposal(Structure):
    _fields_ = [
        ("anchor", c_int64),
        *((name, c_int32) for name in ("depths", "width", "lines", "chain_count", "nodes", "rows")),
        ("edge_count", c_int32), ("spine", c_float),
        *((name, c_void_p) for name in ("ids", "scores", "chains", "chain_scores", "edges", "table")),
        ("depth_bins", c_void_p),
    ]  # fmt: skip


# name: result, arguments
_FUNCTIONS = {
    "tf_digest": (c_char_p, []),
    "tf_pool_new": (c_void_p, [c_int]),
    "tf_pool_free": (None, [c_void_p]),
    "tf_pool_threads": (c_int, [c_void_p]),
    "tf_packed_bytes": (c_size_t, [c_int, c_int, c_int]),
    "tf_packed_kind": (c_int, [c_int]),
    "tf_pack": (None, [c_void_p, c_int, c_void_p, c_int, c_int, c_void_p]),
    "tf_embed": (None, [POINTER(NativeMatrix), c_void_p, c_int, c_void_p]),
    "tf_argmax": (None, [c_void_p, c_int, c_int, c_void_p]),
    "tf_rank": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]),
    "tf_best_tree": (c_int, [POINTER(NativeProposal), c_void_p, c_void_p]),
    "tf_matmul_scratch": (c_size_t, [c_int]),
    "tf_matmul": (None, [c_void_p, POINTER(NativeMatrix), c_int, c_void_p, c_int, c_void_p, c_void_p]),
    "tf_step_scratch": (c_size_t, [POINTER(Model), c_int]),
    "tf_step_scores": (c_size_t, [c_int, c_int64]),
    "tf_draft_block": (
        c_int,
        [c_void_p, POINTER(Model), POINTER(Ring), POINTER(NativeBlock), c_void_p, c_void_p, c_int64],
    ),
    "tf_draft_append": (c_int, [c_void_p, POINTER(Model), POINTER(Ring), POINTER(NativeBlock), c_void_p]),
    "tf_step": (
        c_int,
        [c_void_p, POINTER(Model), POINTER(LayerState), POINTER(NativeStep), c_void_p, c_void_p],
    ),
}


@cache
def cpu_flags() -> frozenset[str]:
    if here() == ("darwin", "arm64"):
        return frozenset(_NEEDS["neon"])  # every such machine has them
    try:
        return parsed_flags(Path("/proc/cpuinfo").read_text())
    except OSError:
        return frozenset()


def parsed_flags(cpuinfo: str) -> frozenset[str]:
    """Return the flags of the first CPU."""
    lines = (line.split(":", 1) for line in cpuinfo.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next((flags.split() for _, flags in lines), ()))


def usable_variants(flags: frozenset[str] | None = None) -> list[str]:
    """Return the variants that a CPU with these flags (None: this one) can run, the fastest first."""
    flags = cpu_flags() if flags is None else flags
    return [variant for variant, needed in _NEEDS.items() if needed <= flags]


def open_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.tf_digest().decode() != digest():
        raise OSError("it was made from other sources")
    return library


@cache
def find_library() -> tuple[ctypes.CDLL | None, str]:
    """Return the library for this CPU and the name of its variant; without one None and why."""
    usable = usable_variants()
    if not usable:
        return None, "this CPU has neither AVX2 nor NEON dot products, or the system is not supported"
    for variant in usable:
        if library_path(variant).exists():
            try:
                return open_library(library_path(variant)), variant
            except (OSError, AttributeError) as error:
                return None, f"{library_path(variant).name} cannot be loaded: {error}"
    return None, "the package was built without a C compiler, or with BOUGH_NATIVE=0"
