"""The CUDA C++ kernel of tree attention: its tiles and its launch."""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bough.kernels.attention.records import SINKS, PagedContext
from bough.kernels.attention.triton_kernels import LOG2_E, SPLITS, TAILS, TIERS, SplitResults
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.kv_cache.reference import TQ3_LEVELS
from bough.kernels.kv_cache.rotation import FIRST_SIGNS, LAST_SIGNS, group_size
from bough.kernels.kv_cache.triton_kernels import tensors
from bough.kernels.runtime.backends import runs
from bough.kernels.runtime.device import Card, card_of
from bough.kernels.runtime.driver import Kernel, cuda_module
from bough.kernels.runtime.sources import pdl_source, warp_group_mma

DIM = 256  # of a head
BLOCK = 64  # keys at a time
STORED = ("f16", "bf16", "q8_0", "q5_0", "q4_0", "tq3_0")
# Queries of a tile, with 4 warps and with 12. 24 rows of 6 query heads are one tile of 144.
NARROW, WIDE = (8, 16, 24), (48, 96, 144)
_MAX_STAGES = 4
# Rows of 128 bytes in shared memory, groups of eight rows 1024 bytes apart, in the 128-byte swizzle.
_SWIZZLED = 1024 >> 4 | 1 << 30
_RESERVED = 1024  # bytes of shared memory that the driver reserves for each block
# The fixed cost of a tile, in queries: each tile reads and decodes the whole KV cache again.
_TILE_COST = 48


@dataclass(frozen=True, slots=True)
class Tile:
    """The compile-time parameters of the kernel."""

    keys: str
    values: str
    page: int
    queries: int
    stages: int
    resident: int  # blocks an SM holds at a time
    window: bool
    grouped: bool  # warp-group mma, which only Hopper has

    @property
    def threads(self) -> int:
        return 128 if self.queries in NARROW else 256 if self.grouped else 384

    @property
    def teams(self) -> int:
        """Rows that a block of the grid assembles at a time: by four warps with a stage of the rings each."""
        return min(self.threads // 128, self.stages)

    @property
    def shared_bytes(self) -> int:
        return _fixed_bytes(self.queries, self.grouped) + self.stages * _stage_bytes(self.keys, self.values)

    def arch(self, card: Card) -> str:
        return f"{card.target}a" if self.grouped else card.target

    def source(self) -> str:
        """Return the CUDA C++ source, after the generated warp-group mma where it is used."""
        parts = []
        if self.grouped:
            groups = 1 if self.queries in NARROW else 2
            sizes = {"score_mma": (self.queries // groups, self.keys), "sum_mma": (self.queries, self.values)}
            sizes |= {"team_score_mma": (8, self.keys), "team_sum_mma": (8, self.values)}
            for name, (columns, stored) in sizes.items():
                parts.append(warp_group_mma(name, columns, _SWIZZLED, bf16=stored == "bf16"))
        return "\n".join([*parts, pdl_source("attention", "pages.cu", "tree.cu")])

    def defines(self, overlap: bool) -> dict[str, int]:
        levels = torch.tensor(TQ3_LEVELS).half().view(torch.int16).tolist()
        level_bytes = bytes(level >> shift & 255 for shift in (0, 8) for level in levels)
        macros = {
            "KEYS": STORED.index(self.keys),
            "VALUES": STORED.index(self.values),
            "PAGE": self.page,
            "QUERIES": self.queries,
            "STAGES": self.stages,
            "SHARED": self.shared_bytes,
            "RESIDENT": self.resident,
            "WINDOW": int(self.window),
            "GROUPED": int(self.grouped),
            "SPLITS": SPLITS,
            "SINKS": SINKS,
            "OVERLAP": int(overlap),
        }
        for i, (last, splits) in enumerate(TIERS):
            macros |= {f"TIER{i}": last, f"SPLITS{i}": splits}
        for i in range(4):
            macros[f"LEVEL{i}"] = int.from_bytes(level_bytes[4 * i : 4 * i + 4], "little")
            macros[f"FIRST{i}"] = FIRST_SIGNS >> 32 * i & 0xFFFFFFFF
            macros[f"LAST{i}"] = LAST_SIGNS >> 32 * i & 0xFFFFFFFF
        return macros


def _stage_bytes(keys: str, values: str) -> int:
    return BLOCK * (FORMATS[keys].row_bytes(DIM) + FORMATS[values].row_bytes(DIM))


def _fixed_bytes(queries: int, grouped: bool) -> int:
    """Return the bytes of shared memory outside the rings: the size of `Memory` in tree.cu."""
    of_query, unit = 2 * DIM + 2 * BLOCK + 4 * (4 + 4 + 2), 1024 if grouped else 128
    return -(-(queries * of_query + 3 * 4 * BLOCK + 4 * 8) // unit) * unit


def tile_of(
    card: Card, keys: str, values: str, queries: int, *, page: int = BLOCK, window: bool = False
) -> Tile | None:
    """Return the tile for `queries` queries of a KV head; None if two stages do not fit on the card.

    Where shared memory holds no wide tile (q8_0 in 99 KiB), many queries are several narrow ones.
    Whether it is None does not depend on `queries`: a row's result must not depend on the other rows.
    """
    stage, grouped = _stage_bytes(keys, values), card.arch == "sm_90"

    def tile(size: int) -> Tile:
        fixed = _fixed_bytes(size, grouped)
        half = (card.shared_per_processor // 2 - _RESERVED - fixed) // stage
        both = size in NARROW and half >= 2
        stages = half if both else (card.shared_per_block - fixed) // stage
        return Tile(keys, values, page, size, min(stages, _MAX_STAGES), 1 + int(both), window, grouped)

    wide = [size for size in WIDE if tile(size).stages >= 2]
    wide = wide or [size for size in NARROW[-1:] if tile(size).stages >= 2]
    if not wide:
        return None
    narrow = next((size for size in NARROW if queries <= size), None)
    if narrow is not None:
        return tile(narrow)
    return tile(min(wide, key=lambda size: (-(-queries // size) * (size + _TILE_COST), -size)))


def takes_paged_attention(q: Tensor, context: PagedContext, **options: object) -> bool:
    """Return whether the kernel takes them: for a tree, and with a window only one with sinks."""
    sinks = context.window is None or context.sinks == SINKS
    return sinks and context.ancestors is not None and takes(q, context.keys, context.values)


def takes(q: Tensor, keys: HeadPool, values: HeadPool) -> bool:
    """Return whether the kernel takes these queries and this KV cache on this card."""
    if q.dtype != torch.float32 or q.shape[-1] != DIM or keys.dim != DIM or values.dim != DIM:
        return False
    if keys.format.name not in STORED or values.format.name not in STORED or keys.page % BLOCK:
        return False
    if not runs("tree attention", "cuda", q.device):
        return False
    return tile_of(card_of(q.device), keys.format.name, values.format.name, 1) is not None


@cache
def _kernel(tile: Tile, device: torch.device) -> Kernel:
    card = card_of(device)
    module = cuda_module(tile.source(), tile.defines(card.pdl), device, arch=tile.arch(card))
    return module.kernel("tree_attention", threads=tile.threads, shared=tile.shared_bytes, overlap=card.pdl)


class _Arguments(ctypes.Structure):
    """`Arguments` of tree.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "key_codes", "key_scales", "value_codes", "value_scales")
        ),
        *((name, ctypes.c_void_p) for name in ("table", "lengths", "first", "ancestors")),
        *((name, ctypes.c_void_p) for name in ("part_top", "part_weight", "part_sum", "active")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rows", "sequences", "table_stride")),
        *((name, ctypes.c_int) for name in ("window", "kv_heads", "group")),
    ]


def paged_attention(q: Tensor, context: PagedContext, *, gate: Tensor | None = None) -> Tensor:
    """See cpu.paged_attention: of trees, whose rows may be ragged."""
    keys, values, page_table, lengths = context.keys, context.values, context.page_table, context.lengths
    shape, first = q.shape, context.first
    q, ancestors, gate = context.tree_rows(q, gate)
    (rows, heads, _), sequences = q.shape, len(lengths)
    kv_heads, page = keys.codes.shape[1:3]
    assert takes(q, keys, values), f"{q.shape}, {q.dtype}, {keys.format.name}, {values.format.name}"
    assert keys.codes.numel() // keys.codes.shape[-1] < 1 << 31, (
        f"{keys.codes.shape}: row numbers have 32 bits"
    )
    for numbers in (page_table, lengths, ancestors, *(() if first is None else (first,))):
        assert numbers.dtype == torch.int64 and numbers.stride(-1) == 1, f"{numbers.dtype}, needed int64"
    group = heads // kv_heads
    names, needed = (keys.format.name, values.format.name), -(-rows // sequences) * group
    tile = tile_of(card_of(q.device), *names, needed, page=page, window=context.window is not None)
    assert tile is not None
    parts = SplitResults(q, kv_heads, TAILS)
    tiles = (
        sequences * -(-needed // tile.queries) if first is None else rows * group // tile.queries + sequences
    )
    teams = -(-rows * kv_heads * -(-group // 8) // tile.teams)
    pointers = (q, *tensors(keys), *tensors(values), page_table, lengths, first, ancestors)
    results = (parts.tops, parts.weights, parts.sums, parts.active)
    numbers = (rows, sequences, page_table.stride(0), context.window or 0, kv_heads, group)
    arguments = _Arguments(
        *(None if pointer is None else pointer.data_ptr() for pointer in (*pointers, *results)),
        *(DIM**-0.5 * LOG2_E, *numbers),
    )
    grid = (tiles * kv_heads * (SPLITS + 1) + teams, 1)
    _kernel(tile, q.device)(grid, [arguments, ctypes.c_int(tiles), ctypes.c_int(teams)])
    end = None if first is None else first[-1:]
    return parts.merge(gate, group_size(DIM) if values.format.quantised else 0, end).view(shape)
