"""Writing and expanding the paged KV cache in every format."""

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
    KV_FORMATS,
    KV_HEADS,
    PAGE,
    ROTARY_DIM,
    random_trees,
)
from tests.gpu.numerics import assert_close, nan_filled_memory
from tests.kernels.paths import rows_of
from tests.kernels.pools import filled

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

ROWS = 24
QUANTISED = tuple(name for name in KV_FORMATS if FORMATS[name].quantised)
# Relative RMS errors of what is stored. One step of a code is that large a part of a row: tq3_0 has 8 codes.
TOLERANCES = {"f16": 1e-3, "bf16": 1e-2, "q8_0": 5e-3, "q5_0": 5e-3, "q4_0": 5e-3, "tq3_0": 2e-2}
DIFFERING_CODES = 1e-3  # share of the codes


@pytest.mark.parametrize("format", KV_FORMATS)
@pytest.mark.parametrize(("dim", "interleaved"), [(256, False), (128, True), (64, False)])
def test_written_rows_match_the_reference(format: str, dim: int, interleaved: bool) -> None:
    """Where the last bits of a sum differ, a value may be rounded to the next code."""
    k, v = torch.randn(2, 1, ROWS, KV_HEADS, 2 * dim, device=DEVICE)[..., :dim] * 3
    weight = torch.randn(dim, device=DEVICE)
    positions = torch.randint(0, 200000, (1, ROWS), device=DEVICE)
    angles = norm_reference.rope_angles(positions, torch.rand(ROTARY_DIM // 2, device=DEVICE))
    slots = torch.randperm(4 * PAGE, device=DEVICE)[:ROWS]
    mapping = {"pages": slots // PAGE, "offsets": slots % PAGE, "interleaved": interleaved}
    pools = []
    for implementation in (cache_kernel, norm_reference):
        both = HeadPool.empty(FORMATS[format], (2, 4, KV_HEADS, PAGE), dim, DEVICE)
        heads = (k, k, v, (weight, weight), EPS, *angles)
        implementation.cache_heads(*heads, keys=both[0], values=both[1], **mapping)
        pools.append(both)
    if format not in QUANTISED:
        assert_close(pools[0].codes, pools[1].codes, tolerance=TOLERANCES[format])
        return
    found, expected = (decode(pool.codes, pool.scales, pool.format, dim) for pool in pools)
    assert_close(found, expected, tolerance=TOLERANCES[format])
    levels = [unpack(pool.codes, pool.format, dim) for pool in pools]
    share = float((levels[0] != levels[1]).sum() / (2 * ROWS * KV_HEADS * dim))
    assert share < DIFFERING_CODES, f"{share:.1e} of the codes differ"


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


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("first", "count"), [(0, 1), (77, 1999)])
def test_expanded_rows_match_the_reference(format: str, first: int, count: int) -> None:
    pool = filled(format, (40, KV_HEADS, PAGE), HEAD_DIM, device=DEVICE)
    page_table = torch.randperm(40, device=DEVICE)
    rows = rotate_back(decode(pool.codes, pool.scales, pool.format, HEAD_DIM))
    rows = rows[page_table].transpose(1, 2).flatten(0, 1)
    with nan_filled_memory():
        found = cache_kernel.expand(pool, page_table, first, count)
    assert_close(found, rows[first : first + count], tolerance=1e-3)
