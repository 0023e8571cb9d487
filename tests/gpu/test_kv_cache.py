"""Writing and expanding the paged KV cache in every format."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from bough.kernels.commit import commit_path, move_rows
from bough.kernels.kv_cache import triton_kernels as cache_kernel
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.kv_cache.reference import decode, unpack
from bough.kernels.kv_cache.rotation import rotate_back
from bough.kernels.norm_rope import reference as norm_reference
from bough.kernels.norm_rope import rope_angles
from tests.gpu.inputs import (
    DEVICE,
    EPS,
    HEAD_DIM,
    INTERPRETED,
    KV_FORMATS,
    KV_HEADS,
    PAGE,
    ROTARY_DIM,
    random_trees,
)
from tests.gpu.numerics import assert_close, assert_same_bits, nan_filled_memory
from tests.kernels.paths import rows_of
from tests.kernels.pools import filled

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

ROWS, HEADS_OF_KV = (3, 1) if INTERPRETED else (24, 6)  # half the query heads of a KV head
QUANTISED = tuple(name for name in KV_FORMATS if FORMATS[name].quantised)
# Relative RMS errors of what is stored. One step of a code is that large a part of a row: tq3_0 has 8 codes.
TOLERANCES = {
    "f32": 2e-6,
    "f16": 5e-4 if INTERPRETED else 1e-4,
    "bf16": 1e-2,
    "q8_0": 5e-3,
    "q5_0": 5e-3,
    "q4_0": 5e-3,
    "tq3_0": 2e-2,
}
DIFFERING_CODES = 1e-2 if INTERPRETED else 1e-3  # share of the codes
FLOAT32 = 2e-6 if INTERPRETED else 1e-6
# Formats of K and V, dims of a head, rope of adjacent pairs.
WRITTEN = [
    ((name, name), dim, turned)
    for name in KV_FORMATS
    for dim, turned in ((256, False), (128, True), (64, False))
]
EXPANDED = ((0, 1), (77, 1999))
WRITERS = (cache_kernel, norm_reference)
if INTERPRETED:
    WRITTEN = [
        (("f16", "f32"), 24, False),
        (("f32", "q4_0"), 64, True),
        (("q8_0", "tq3_0"), 128, False),
        (("q5_0", "f16"), 256, True),
        (("tq3_0", "q8_0"), 64, False),
    ]
    EXPANDED = ((0, 1), (5, 33), (64, 32))


@dataclass(frozen=True, slots=True)
class Written:
    """Both pools, and q as the layers take it, after heads were written to distinct slots."""

    pools: list[HeadPool]
    queries: torch.Tensor

    @classmethod
    def by(cls, implementation: ModuleType, pair: tuple[str, str], heads: tuple, **mapping) -> "Written":
        k = heads[1]
        pools = [HeadPool.empty(FORMATS[name], (4, k.shape[2], PAGE), k.shape[-1], DEVICE) for name in pair]
        with nan_filled_memory():
            queries = implementation.cache_heads(*heads, keys=pools[0], values=pools[1], **mapping)
        return cls(pools, queries)


def slots_for(rows: int) -> dict[str, torch.Tensor]:
    slots = torch.randperm(4 * PAGE, device=DEVICE)[:rows]
    return {"pages": slots // PAGE, "offsets": slots % PAGE}


@pytest.mark.interpreted
@pytest.mark.parametrize(("pair", "dim", "interleaved"), WRITTEN, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_written_rows_match_the_reference(
    pair: tuple[str, str], dim: int, interleaved: bool, normed: bool
) -> None:
    """Where the last bits of a sum differ, a value may be rounded to the next code."""
    q = torch.randn(2, ROWS, 2 * HEADS_OF_KV * KV_HEADS, 2 * dim, device=DEVICE)[..., dim:]
    k, v = torch.randn(2, 2, ROWS, KV_HEADS, 2 * dim, device=DEVICE)[..., :dim] * 3
    weight = torch.randn(dim, device=DEVICE)
    norms = (1 - weight, weight) if normed else (None, None)
    positions = torch.randint(0, 200000, (2, ROWS), device=DEVICE)
    angles = norm_reference.rope_angles(positions, torch.rand(min(dim, ROTARY_DIM) // 2, device=DEVICE))
    heads, mapping = (q, k, v, norms, EPS, *angles), slots_for(2 * ROWS) | {"interleaved": interleaved}
    found, expected = (
        Written.by(module, pair, heads, **mapping) for module in (cache_kernel, norm_reference)
    )
    assert_close(found.queries, expected.queries, tolerance=FLOAT32, name="queries")
    for one, other in zip(found.pools, expected.pools, strict=True):
        format, allowed = one.format, TOLERANCES[one.format.name]
        if one.scales is None or other.scales is None:
            assert_close(one.codes.float(), other.codes.float(), tolerance=allowed, name=format.name)
            continue
        values = (decode(pool.codes, pool.scales, format, dim) for pool in (one, other))
        assert_close(*values, tolerance=allowed, name=format.name)
        levels = [unpack(pool.codes, format, dim) for pool in (one, other)]
        written = 2 * ROWS * KV_HEADS * dim
        share = float((levels[0] != levels[1]).sum() / written)
        assert share < DIFFERING_CODES, f"{share:.1e} of the codes differ"


@pytest.mark.interpreted
@pytest.mark.parametrize("dim", [32, 64, 256])
@pytest.mark.parametrize("name", QUANTISED)
def test_codes_of_exact_sums_are_the_references_bit_by_bit(name: str, dim: int) -> None:
    """Whole numbers, whose sums and differences no order of adding rounds."""
    k, v = (torch.randn(2, 2, 3, 2, dim, device=DEVICE) * 60).round()
    k[0, 0], v[0, 1] = 0, 0
    k[0, 1] *= 1e-12
    v[0, 0, :, :3] *= 2.0**22
    v[1, 0] = torch.tensor([1.0, -1.0], device=DEVICE).repeat(dim // 2)
    angles = norm_reference.rope_angles(torch.zeros(2, 3, device=DEVICE), torch.rand(4, device=DEVICE))
    heads, mapping = (k, k, v, (None, None), EPS, *angles), slots_for(6) | {"interleaved": False}
    pair = (name, name)
    found, expected = (
        Written.by(module, pair, heads, **mapping) for module in (cache_kernel, norm_reference)
    )
    for one, other in zip(found.pools, expected.pools, strict=True):
        assert one.scales is not None and other.scales is not None
        if name == "tq3_0":
            # A group's length is a sum of many squares: its last bit depends on their order.
            assert_close(one.scales.float(), other.scales.float(), tolerance=2e-4)
            apart = unpack(one.codes, one.format, dim) != unpack(other.codes, other.format, dim)
            assert float(apart.float().mean()) < 1e-3
        else:
            assert_same_bits(one.codes, other.codes, "codes")
            assert_same_bits(one.scales, other.scales, "scales")


@pytest.mark.parametrize("format", KV_FORMATS)
@pytest.mark.parametrize("rows", [8, 24, 64])
def test_a_committed_path_has_the_bytes_that_plain_decoding_writes(format: str, rows: int) -> None:
    """Written as rows of a tree and moved, or one at a time to their places."""
    length, tree = 50, random_trees(rows)
    k, v = torch.randn(2, 1, rows, KV_HEADS, HEAD_DIM, device=DEVICE) * 3
    weight, frequencies = torch.randn(HEAD_DIM, device=DEVICE), torch.rand(ROTARY_DIM // 2, device=DEVICE)
    positions, page_table = length + tree.depths, torch.tensor([[2, 0, 1]], device=DEVICE)
    whole, single = (
        HeadPool.empty(FORMATS[format], (2, 3, KV_HEADS, PAGE), HEAD_DIM, DEVICE) for _ in range(2)
    )

    def write(pool: HeadPool, chosen: slice, at: torch.Tensor) -> None:
        angles = rope_angles(positions[:, chosen], frequencies)
        heads = (k[:, chosen], k[:, chosen], v[:, chosen], (weight, weight), EPS, *angles)
        mapping = {"pages": page_table[0, at // PAGE], "offsets": at % PAGE, "interleaved": False}
        cache_kernel.cache_heads(*heads, keys=pool[0], values=pool[1], **mapping)

    last = int(tree.depths.argmax())
    path = rows_of(int(tree.ancestors[0, last]))
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    state = {"path": torch.zeros(1, rows, dtype=torch.int64, device=DEVICE), "count": torch.zeros_like(slots)}
    write(whole, slice(None), length + torch.arange(rows, device=DEVICE))
    kept = commit_path(tree.ancestors, torch.full_like(slots, last), slots, lengths=slots + length, **state)
    move_rows(whole.planes, kept, slots, page_table)
    for depth, row in enumerate(path):
        write(single, slice(row, row + 1), torch.tensor([length + depth], device=DEVICE))
    index = length + torch.arange(len(path), device=DEVICE)
    for found, expected in zip(whole.planes, single.planes, strict=True):
        moved, plain = (
            plane[:, page_table[0, index // PAGE], :, index % PAGE] for plane in (found, expected)
        )
        assert torch.equal(moved.view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.interpreted
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("first", "count"), EXPANDED)
def test_expanded_rows_match_the_reference(format: str, first: int, count: int) -> None:
    dim = 64 if INTERPRETED else HEAD_DIM
    pool = filled(format, (40, KV_HEADS, PAGE), dim, device=DEVICE)
    page_table = torch.randperm(40, device=DEVICE)
    rows = rotate_back(decode(pool.codes, pool.scales, pool.format, dim))
    rows = rows[page_table].transpose(1, 2).flatten(0, 1)
    with nan_filled_memory():
        found = cache_kernel.expand(pool, page_table, first, count)
    assert found.dtype == torch.float16
    assert_close(found.float(), rows[first : first + count], tolerance=1e-3)
