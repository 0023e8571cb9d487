"""The CUDA C++ kernels of tiles.cu: which variants exist, how work is cut over a GPU, how it is launched."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int, c_longlong
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from treeflash.kernels.quant_matmul.layout import COLUMN_BLOCK, ROW_BLOCK, Layout, PackedWeight
from treeflash.kernels.quant_matmul.partial_sums import OpenSums
from treeflash.kernels.quant_matmul.rows import PackedRows, empty_rows
from treeflash.kernels.quant_matmul.tiling import Tiling, tiling_of
from treeflash.kernels.quant_matmul.tuned import TunedFile
from treeflash.kernels.runtime.driver import Kernel, Module
from treeflash.kernels.runtime.nvrtc import compile_cubin, nvrtc

_SCALES = {"none": 0, "six": 1, "byte": 2, "half": 3, "affine": 4}
_BLOCK_TILES = ROW_BLOCK // 16
_UNWRITTEN = 0xFFFFDEAD - (1 << 32)  # marks a partial sum that has not arrived; a NaN no arithmetic makes
_RESERVED = 1024  # bytes of shared memory that each block costs beside its own
_STATIC = 512  # bytes for barriers and row scales
_LEAST_COLUMNS = 512  # of a block of rows that a block of the grid has at least
# With fewer stages none is filled again in the middle of the unit after it: the thread that fills would wait
# for other warps to leave it.
_HALFWAY_FROM = 3
_TOGETHER = 4  # launches with the same x that may be under way at a time


@dataclass(frozen=True, slots=True)
class Card:
    """What decides over the variants: the same numbers give the same sums, whatever was `tuned`."""

    arch: str
    processors: int
    shared_per_processor: int
    shared_per_block: int
    tuned: tuple[tuple[int, Tiling], ...] = ()  # by rows; for others what the architecture gets

    def tiling(self, bucket: int) -> Tiling:
        return dict(self.tuned).get(bucket) or tiling_of(self.arch, bucket)

    @property
    def bulk(self) -> bool:
        """Bulk copies, mbarriers and overlapping launches."""
        return int(self.arch.removeprefix("sm_")) >= 90

    @property
    def resident(self) -> int:
        """Blocks an SM is given at a time, whatever the number of rows."""
        return 2 if self.shared_per_processor >= 160 * 1024 else 1


def usable(device: torch.device) -> bool:
    """Whether these kernels run there: an NVIDIA card from Ampere on, and NVRTC installed."""
    if torch.version.cuda is None or nvrtc() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def card_of(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    return Card(
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin,
        tuple(TunedFile.usual().load(kind_of(device)).items()),
    )


def kind_of(device: torch.device) -> str:
    """What a GPU shares with those that run the same variants at the same speed."""
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {capability}, {properties.multi_processor_count} SMs"


def row_tiles(card: Card, bucket: int) -> int:
    """Row tiles of a warp. Half the warps need a second block beside them."""
    return 2 if card.bulk and card.resident > 1 and card.tiling(bucket).wide else 1


def stage_bytes(layout: Layout, bucket: int) -> int:
    return _BLOCK_TILES * layout.tile_bytes + 2 * layout.unit * bucket


def stages(card: Card, layout: Layout, bucket: int) -> int:
    """Depth of the ring: what lets all resident blocks fit, else what one block may have; 0: not even two."""
    size = stage_bytes(layout, bucket)
    share = card.shared_per_processor // card.resident - _RESERVED
    count = (min(share, card.shared_per_block) - _STATIC) // size
    if count < 2:
        count = (card.shared_per_block - _STATIC) // size
    most = card.tiling(bucket).stages + (layout.unit < COLUMN_BLOCK)
    return min(count, most) if count >= 2 else 0


def defines(card: Card, layout: Layout, bucket: int) -> dict[str, int]:
    """The macros of tiles.cu for one variant."""
    result = {
        "LOW": layout.low,
        "HIGH": layout.high,
        "SCALES": _SCALES[layout.scales],
        "OFFSET": layout.offset,
        "UNIT": layout.unit,
        "TOKENS": bucket,
        "STAGES": (depth := stages(card, layout, bucket)),
        "BULK": int(card.bulk),
        "ROW_TILES": row_tiles(card, bucket),
        "HALFWAY": int(card.tiling(bucket).halfway and depth >= _HALFWAY_FROM),
        "TABLE": int(bool(layout.table)),
    }
    for index in range(4 if layout.table else 0):
        result[f"TABLE{index}"] = int.from_bytes(bytes(layout.table[4 * index : 4 * index + 4]), "little")
    return result


@cache
def source(*names: str, package: str = "quant_matmul") -> str:
    """A package's files of CUDA C++, one behind the other; those of the products if none is named."""
    folder = files(f"treeflash.kernels.{package}")
    return "\n".join(folder.joinpath(name).read_text() for name in names or ("weights.cu", "tiles.cu"))


def early(package: str, *names: str) -> str:
    """Files of kernels that may start before the one in front of them has ended, behind what they share."""
    return "\n".join((source("pdl.cu", package="runtime"), source(*names, package=package)))


@dataclass(frozen=True, slots=True)
class Variant:
    matmul: Kernel
    expand: Kernel


@cache
def variant(card: Card, layout: Layout, bucket: int, device: torch.device) -> Variant:
    macros = defines(card, layout, bucket)
    assert macros["STAGES"] >= 2, f"{bucket} rows of {layout} do not fit in {card.shared_per_block} bytes"
    module = Module(compile_cubin(source(), defines=macros, arch=card.arch), device)
    return Variant(
        module.kernel(
            "matmul",
            threads=32 * _BLOCK_TILES // macros["ROW_TILES"],
            shared=macros["STAGES"] * stage_bytes(layout, bucket),
            overlap=card.bulk,
        ),
        module.kernel("expand", threads=256),
    )


@cache
def _pack_rows_kernel(device: torch.device) -> Kernel:
    card = card_of(device)
    cubin = compile_cubin(source("rows.cu"), defines={"BULK": int(card.bulk)}, arch=card.arch)
    return Module(cubin, device).kernel("pack_rows", threads=512, overlap=card.bulk)


def prepare(
    layouts: Iterable[Layout], buckets: Iterable[int], device: torch.device, card: Card | None = None
) -> None:
    """Compiles what these layouts and row counts need, several at a time, before it is timed or captured.

    `card`: the device's, tuned otherwise.
    """
    card, buckets = card or card_of(device), list(buckets)
    wanted = [
        (layout, bucket)
        for layout in dict.fromkeys(layouts)
        for bucket in buckets
        if stages(card, layout, bucket)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda pair: compile_cubin(source(), defines=defines(card, *pair), arch=card.arch), wanted
            )
        )
    for pair in wanted:
        variant(card, *pair, device)
    _pack_rows_kernel(device)
    _workspace(device)


@cache
def _workspace(device: torch.device) -> Tensor:
    """Partial sums of launches that go together, all marked as not yet written. Never moved, because captured
    graphs point at them; so products on one device must follow one another in one stream."""
    card = card_of(device)
    words = card.resident * card.processors * ROW_BLOCK * 64
    return torch.full((_TOGETHER, words), _UNWRITTEN, dtype=torch.int32, device=device)


def partition(card: Card, weight: PackedWeight) -> tuple[int, int, int]:
    """Blocks of the grid, units for each of them, and how many of them have one more."""
    units = weight.padded_rows // ROW_BLOCK * weight.data.shape[0]
    grid = min(card.resident * card.processors, max(1, units * weight.layout.unit // _LEAST_COLUMNS))
    return grid, units // grid, units % grid


def pack_rows(x: Tensor) -> PackedRows:
    rows, columns = x.shape
    packed = empty_rows(rows, columns, x.device)
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
    _launch(x, weight, out, parts=_workspace(out.device)[0], place=0)


def open_product(x: PackedRows, weight: PackedWeight) -> OpenSums:
    """The product, its sums left open where several blocks of the grid have parts of them."""
    assert x.bucket is not None
    grid, share, extra = partition(card_of(weight.data.device), weight)
    out = torch.empty(x.rows, weight.rows, device=weight.data.device)
    parts = torch.empty(grid, 2, x.bucket, ROW_BLOCK, device=weight.data.device)
    _launch(x, weight, out, parts=parts, place=0, left_open=True)
    return OpenSums(out, parts, weight.data.shape[0], share, extra)


def products(
    x: PackedRows, weights: Sequence[PackedWeight], outs: Sequence[Tensor], card: Card | None = None
) -> None:
    """Products with the same x, which overlap. The largest goes first: it hides the wait for x. A small one
    in the middle is hidden by its neighbours. `card`: the device's, tuned otherwise."""
    pairs = sorted(zip(weights, outs, strict=True), key=lambda pair: pair[0].nbytes)
    pairs.insert(0, pairs.pop())
    for start in range(0, len(pairs), _TOGETHER):
        group = pairs[start : start + _TOGETHER]
        for number, (weight, out) in enumerate(group):
            place = 0 if len(group) == 1 else 1 if number == 0 else 2
            _launch(x, weight, out, parts=_workspace(out.device)[number], place=place, card=card)


def _launch(
    x: PackedRows,
    weight: PackedWeight,
    out: Tensor,
    *,
    parts: Tensor,
    place: int,
    left_open: bool = False,
    card: Card | None = None,
) -> None:
    """`place`: 0 alone, of several that go together 1 the first and 2 any other."""
    assert x.bucket is not None
    card = card or card_of(out.device)
    blocks = weight.padded_rows // ROW_BLOCK
    grid, share, extra = partition(card, weight)
    sizes = (blocks, weight.data.shape[0], weight.rows, out.stride(0), x.rows)
    numbers = (*sizes, share, extra, place, int(left_open))
    variant(card, weight.layout, x.bucket, out.device).matmul(
        (grid, 1),
        [weight.data, weight.row_scale, x.data, x.scale, out, parts, *map(c_int, numbers)],
    )


def expand(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Rows from `first` on as float16 into out [rows, padded columns], times weight.expand_factor."""
    tiles = len(out) // 16
    numbers = (first // 16, tiles, weight.data.shape[1], weight.data.shape[0])
    variant(card_of(out.device), weight.layout, 8, out.device).expand(
        (-(-tiles // _BLOCK_TILES), weight.data.shape[0]),
        [weight.data, weight.expand_factor, out, *map(c_int, numbers)],
    )
