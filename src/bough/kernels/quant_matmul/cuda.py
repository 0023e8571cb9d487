"""The CUDA C++ kernels of tiles.cu: their variants, the partition of work, the launches."""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int, c_longlong
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from bough.kernels.quant_matmul.layout import COLUMN_BLOCK, ROW_BLOCK, Layout, PackedWeight
from bough.kernels.quant_matmul.partial_sums import PartialSums
from bough.kernels.quant_matmul.rows import BUCKETS, PackedRows, bucket_of, empty_rows
from bough.kernels.quant_matmul.tiling import Tiling, built_in_tilings
from bough.kernels.quant_matmul.tuned import TunedFile
from bough.kernels.runtime.device import Card, card_of, kind_of
from bough.kernels.runtime.driver import Kernel, Module, cuda_module
from bough.kernels.runtime.dry_run import cache_tensor
from bough.kernels.runtime.sources import pdl_source, warp_group_mma

_SCALES = {"none": 0, "six": 1, "byte": 2, "half": 3, "affine": 4}
_EXPANDED_TILES = 8  # of a block that expands
_UNWRITTEN = 0xFFFFDEAD - (1 << 32)  # marks a partial sum that has not arrived; a NaN no arithmetic makes
_RESERVED = 1024  # bytes of shared memory that the driver reserves for each block
_STATIC = 512  # bytes for barriers and row scales
_MIN_COLUMNS = 512  # of a block of rows that a block of the grid has at least
# With fewer stages none is refilled in the middle of the next unit: the thread that fills it would wait for
# other warps to leave it.
_MIN_HALFWAY_STAGES = 3
_MAX_GROUP = 4  # launches with the same x that may overlap
# Position of a launch in a group of launches with the same x.
_ALONE, _FIRST, _FOLLOWING = range(3)
# From this bucket on Hopper multiplies by warp-group mma, with the same bits. Q4_K 34816 x 5120, H200, at 8,
# 16, 24, 32, 48, 64 rows: single warps 29.3, 32.0, 36.1, 42.1, 53.0, 61.7 us, groups 30.0, 31.2, 33.5, 36.4,
# 41.5, 47.6.
GROUPED_FROM = 16
EIGHT_ROWS = 128 >> 4  # from eight rows of x to the next in shared memory, for warp-group mma, in 16 bytes


@cache
def tilings_of(device: torch.device) -> dict[int, Tiling]:
    """Return the tiling of each bucket: the tuned one for this kind of GPU, else the built-in one."""
    return {**built_in_tilings(card_of(device).arch), **TunedFile.default().load(kind_of(device))}


def resident_blocks(card: Card) -> int:
    """Return how many blocks an SM holds at a time, for any number of rows."""
    return 2 if card.shared_per_processor >= 160 * 1024 else 1


def block_tiles(card: Card, layout: Layout) -> int:
    """Return the tiles of 16 rows of a block: twice as many where an SM has one block, if two stages fit."""
    alone = resident_blocks(card) == 1 and not card.bulk_copies
    return 16 if alone and layout.low < 16 else 8


def stage_layout(card: Card, layout: Layout, bucket: int) -> Layout:
    """Return the layout with the columns of a stage: half of a tile's where two stages would not fit.

    Bulk copies are of whole tiles.
    """
    whole = _stage_bytes(card, layout, bucket)
    halved = layout.unit == COLUMN_BLOCK and not card.bulk_copies and 2 * whole > _room(card)
    return replace(layout, unit=COLUMN_BLOCK // 2) if halved else layout


def _room(card: Card) -> int:
    """Return the bytes of the ring of a block that is alone on its SM."""
    return card.shared_per_block - _STATIC


def _stage_bytes(card: Card, stage: Layout, bucket: int) -> int:
    return block_tiles(card, stage) * stage.tile_bytes + 2 * stage.unit * bucket


def grouped(card: Card, rows: int) -> bool:
    """Return whether so many rows are packed for warp-group mma there."""
    return card.arch == "sm_90" and (bucket_of(rows) or 0) >= GROUPED_FROM


def stage_bytes(card: Card, layout: Layout, bucket: int) -> int:
    return _stage_bytes(card, stage_layout(card, layout, bucket), bucket)


def stages(card: Card, layout: Layout, bucket: int, tiling: Tiling) -> int:
    """Return the stages of the ring: all resident blocks fit, else one block does; 0 if two stages do not.

    Whether it is 0 does not depend on the tiling.
    """
    size = stage_bytes(card, layout, bucket)
    share = card.shared_per_processor // resident_blocks(card) - _RESERVED
    count = (min(share, card.shared_per_block) - _STATIC) // size
    if count < 2:
        count = _room(card) // size
    most = tiling.stages + (stage_layout(card, layout, bucket).unit < COLUMN_BLOCK)
    return min(count, most) if count >= 2 else 0


@cache
def max_rows(card: Card, layout: Layout) -> int:
    """Return the largest bucket that fits, with any tiling."""
    tilings = built_in_tilings(card.arch)
    return max(bucket for bucket in BUCKETS if stages(card, layout, bucket, tilings[bucket]))


def layout_defines(layout: Layout) -> dict[str, int]:
    """Return the macros of weights.cu for a layout."""
    result = {
        "LOW": layout.low,
        "HIGH": layout.high,
        "SCALES": _SCALES[layout.scales],
        "OFFSET": layout.offset,
        "UNIT": layout.unit,
        "TABLE": int(bool(layout.table)),
    }
    for index in range(4 if layout.table else 0):
        result[f"TABLE{index}"] = int.from_bytes(bytes(layout.table[4 * index : 4 * index + 4]), "little")
    return result


def defines(
    card: Card, layout: Layout, bucket: int, tiling: Tiling, *, grouped: bool = False
) -> dict[str, int]:
    """Return the macros of tiles.cu for one variant."""
    depth = stages(card, layout, bucket, tiling)
    stage = stage_layout(card, layout, bucket)
    macros = layout_defines(stage) | {
        "HALVES": layout.unit // stage.unit,
        "BLOCK_TILES": block_tiles(card, layout),
        "TOKENS": bucket,
        "STAGES": depth,
        "BULK": int(card.bulk_copies),
        "OVERLAP": int(card.pdl),
        "HALFWAY": int(tiling.halfway and depth >= _MIN_HALFWAY_STAGES),
    }
    return macros | {"GROUPED": 1} if grouped else macros


def matmul_source() -> str:
    return pdl_source("quant_matmul", "weights.cu", "tiles.cu")


def grouped_source(bucket: int) -> str:
    """Return the same with warp-group mma."""
    mma = warp_group_mma("group_mma", bucket, EIGHT_ROWS)
    return "\n".join([mma, pdl_source("quant_matmul", "weights.cu", "group.cu", "tiles.cu")])


def rows_source() -> str:
    return pdl_source("quant_matmul", "rows.cu")


@dataclass(frozen=True, slots=True)
class Variant:
    matmul: Kernel
    expand: Kernel | None  # None: a variant that reads half tiles


@cache
def variant(layout: Layout, bucket: int, tiling: Tiling, device: torch.device, *, grouped: bool) -> Variant:
    card = card_of(device)
    macros = defines(card, layout, bucket, tiling, grouped=grouped)
    assert macros["STAGES"] >= 2, f"{bucket} rows of {layout} do not fit in {card.shared_per_block} bytes"
    text = grouped_source(bucket) if grouped else matmul_source()
    arch = f"{card.target}a" if grouped else card.target
    module = cuda_module(text, macros, device, arch=arch)
    return Variant(
        module.kernel(
            "matmul",
            threads=32 * macros["BLOCK_TILES"],
            shared=macros["STAGES"] * stage_bytes(card, layout, bucket),
            overlap=card.pdl,
        ),
        None if macros["HALVES"] > 1 else module.kernel("expand", threads=256),
    )


@cache
def _expand_kernel(layout: Layout, device: torch.device) -> Kernel:
    """Return the kernel of a variant that is there anyway, else one of its own."""
    card, tiling = card_of(device), tilings_of(device)[8]
    expand = variant(layout, 8, tiling, device, grouped=False).expand
    if expand is not None:
        return expand
    macros = defines(card, layout, 8, tiling) | layout_defines(layout) | {"HALVES": 1}
    return cuda_module(matmul_source(), macros, device).kernel("expand", threads=256)


@cache
def _pack_rows_kernel(device: torch.device) -> Kernel:
    pdl = card_of(device).pdl
    module = cuda_module(rows_source(), {"OVERLAP": int(pdl)}, device)
    return module.kernel("pack_rows", threads=512, overlap=pdl)


def prepare(layouts: Iterable[Layout], tilings: Mapping[int, Tiling], device: torch.device) -> None:
    """Compile the variants of these layouts and buckets in parallel, before they are timed or captured."""
    card = card_of(device)
    variants = [
        (layout, bucket, tiling)
        for layout in dict.fromkeys(layouts)
        for bucket, tiling in tilings.items()
        if stages(card, layout, bucket, tiling)
    ]

    modules = [
        variant(layout, bucket, tiling, device, grouped=grouped(card, bucket)).matmul.module
        for layout, bucket, tiling in variants
    ]
    modules.append(_pack_rows_kernel(device).module)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Module.load, modules))
    _workspace(device)


@cache_tensor
def _workspace(device: torch.device) -> Tensor:
    """Return the partial sums of a group of launches, all marked as not written.

    A static buffer, because captured graphs point at it: matmuls on one device must run in one stream.
    """
    card = card_of(device)
    words = 2 * card.processors * ROW_BLOCK * 64
    return torch.full((_MAX_GROUP, words), _UNWRITTEN, dtype=torch.int32, device=device)


def partition(card: Card, weight: PackedWeight) -> tuple[int, int, int]:
    """Return the blocks of the grid, the units of each, and how many blocks have one unit more."""
    blocks = -(-weight.data.shape[1] // block_tiles(card, weight.layout))
    units = blocks * weight.data.shape[0]
    most = resident_blocks(card) * card.processors
    grid = min(most, max(1, units * weight.layout.unit // _MIN_COLUMNS))
    return grid, units // grid, units % grid


def pack_rows(x: Tensor) -> PackedRows:
    rows, columns = x.shape
    packed = empty_rows(rows, columns, x.device, grouped=grouped(card_of(x.device), rows))
    group_stride, row_stride = packed.strides
    arguments = [
        x,
        packed.data,
        packed.scale,
        c_longlong(x.stride(0)),
        c_int(columns),
        c_int(-(-columns // 256) * 256),
        c_longlong(group_stride),
        c_longlong(row_stride),
    ]
    _pack_rows_kernel(x.device)((rows, 1), arguments)
    return packed


def matmul(x: PackedRows, weight: PackedWeight, out: Tensor) -> None:
    _launch(x, weight, out, parts=_workspace(out.device)[0])


def partial_matmul(x: PackedRows, weight: PackedWeight) -> PartialSums:
    """Return x times the weight, transposed, as split-K partial sums for a kernel with a fused reduction."""
    assert x.bucket is not None
    grid, share, extra = partition(card_of(weight.data.device), weight)
    out = torch.empty(x.rows, weight.rows, device=weight.data.device)
    rows = 16 * block_tiles(card_of(weight.data.device), weight.layout)
    parts = torch.empty(grid, 2, x.bucket, rows, device=weight.data.device)
    _launch(x, weight, out, parts=parts, partial_sums=True)
    return PartialSums(out, parts, weight.data.shape[0], share, extra)


def matmuls(
    x: PackedRows, weights: Sequence[PackedWeight], outs: Sequence[Tensor], tiling: Tiling | None = None
) -> None:
    """Multiply the same x with several matrices, in launches that overlap; `tiling` overrides the device's.

    The largest matrix goes first: it hides the wait for x. A small one in the middle is hidden by its
    neighbours.
    """
    pairs = sorted(zip(weights, outs, strict=True), key=lambda pair: pair[0].nbytes)
    pairs.insert(0, pairs.pop())
    for start in range(0, len(pairs), _MAX_GROUP):
        group = pairs[start : start + _MAX_GROUP]
        for number, (weight, out) in enumerate(group):
            position = _ALONE if len(group) == 1 else _FIRST if number == 0 else _FOLLOWING
            parts = _workspace(out.device)[number]
            _launch(x, weight, out, parts=parts, position=position, tiling=tiling)


def _launch(
    x: PackedRows,
    weight: PackedWeight,
    out: Tensor,
    *,
    parts: Tensor,
    position: int = _ALONE,
    partial_sums: bool = False,
    tiling: Tiling | None = None,
) -> None:
    assert x.bucket is not None
    grid, share, extra = partition(card_of(out.device), weight)
    sizes = (weight.data.shape[1], weight.data.shape[0], weight.rows, out.stride(0), x.rows)
    numbers = (*sizes, share, extra, position, int(partial_sums))
    choice = tiling or tilings_of(out.device)[x.bucket]
    variant(weight.layout, x.bucket, choice, out.device, grouped=x.grouped).matmul(
        (grid, 1), [weight.data, weight.row_scale, x.data, x.scale, out, parts, *map(c_int, numbers)]
    )


def expand(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Write rows from `first` on as float16 to out [rows, padded columns], times weight.expand_factor."""
    tiles = len(out) // 16
    numbers = (first // 16, tiles, weight.data.shape[1], weight.data.shape[0])
    _expand_kernel(weight.layout, out.device)(
        (-(-tiles // _EXPANDED_TILES), weight.data.shape[0]),
        [weight.data, weight.expand_factor, out, *map(c_int, numbers)],
    )
