"""Padded trees, the slot mapping of a step's rows, and the commit of an accepted path, bit for bit."""

import pytest
import torch
from torch import Tensor

from bough.kernels.commit import reference as commit_reference
from bough.kernels.commit import triton_kernels as commit_kernel
from bough.kernels.slot_mapping import reference as mapping_reference
from bough.kernels.slot_mapping import triton_kernels as mapping_kernel
from tests.gpu.inputs import DEVICE, HEAD_DIM, INTERPRETED, KV_HEADS, PAGE, random_trees
from tests.gpu.numerics import assert_same_bits, nan_filled_memory

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted, pytest.mark.usefixtures("inference_mode")]

MAPPED = ((1, 5), (9, 33), (300, 33)) if INTERPRETED else ((1, 5), (8, 33), (64, 4097), (2048, 4097))
# Widths of planes: odd ones are moved in smaller words.
WIDTHS = ((HEAD_DIM, torch.float16), (6, torch.float16), (21, torch.uint8), (24, torch.float32))
ONE = torch.tensor([1], device=DEVICE)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape).to(DEVICE)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize(("count", "size"), [(1, 8), (8, 8), (5, 16), (24, 24), (33, 48), (64, 64)])
def test_a_tree_is_padded_as_by_the_reference(count: int, size: int) -> None:
    arguments = (integers(1 << 40, 4, 64), numbers(count), numbers(2), integers(262144, 3))
    with nan_filled_memory():
        found = mapping_kernel.padded_tree(*arguments, size=size)
    assert_same_bits(found, mapping_reference.padded_tree(*arguments, size=size))


@pytest.mark.parametrize("sizes", [(3, 5), (1, 0, 4), (30, 2, 16)])
def test_ragged_rows_are_those_of_the_reference(sizes: tuple[int, ...]) -> None:
    """Rows of several trees and padding: their positions and owners, pages and pending rows."""
    rows, lengths = integers(1 << 40, 4, 64), numbers(5, 1 << 33, 37)
    rows[3] = integers(9, 64)
    slots, first = numbers(1, 0, 2)[: len(sizes)], numbers(0, *sizes).cumsum(0)
    found = mapping_kernel.ragged_rows(rows, first, slots, lengths, size=48)
    assert_same_bits(found, mapping_reference.ragged_rows(rows, first, slots, lengths, size=48))
    lengths[1] = 77
    options = {"rows": 48, "page": 4, "first": first, "spare_page": 1234}
    expected = check_mapping(slots, lengths, 400, **options)
    assert expected.pages[sum(sizes) :].tolist() == [1234] * (48 - sum(sizes))


@pytest.mark.parametrize(("rows", "pages"), MAPPED)
def test_rows_are_mapped_as_by_the_reference(rows: int, pages: int) -> None:
    """Up to the end of 262,144 tokens."""
    lengths = numbers(0, 7, max(0, PAGE * pages - rows))
    check_mapping(numbers(2, 0), lengths, pages, rows=rows, page=PAGE)


def check_mapping(slots: Tensor, lengths: Tensor, pages: int, **options) -> mapping_reference.SlotMapping:
    table = torch.randperm(3 * pages).view(3, pages).to(DEVICE)
    arguments = (slots, lengths, table, integers(64, 3, 64), integers(9, 3))
    with nan_filled_memory():
        found = mapping_kernel.slot_mapping(*arguments, **options)
    expected = mapping_reference.slot_mapping(*arguments, **options)
    for name in ("lengths", "page_table", "pages", "offsets", "path", "count"):
        assert_same_bits(getattr(found, name), getattr(expected, name), name)
    return expected


@pytest.mark.parametrize("rows", [1, 5, 8, 24, 33, 64])
@pytest.mark.parametrize("last", ["the last row and none", "the root and a middle row"])
def test_a_commit_moves_the_rows_of_the_accepted_path(rows: int, last: str) -> None:
    """Pages are in any order, and planes have odd widths."""
    tree, slots = random_trees(rows, 2), numbers(2, 0)
    accepted = numbers(*([rows - 1, -1] if last == "the last row and none" else [0, rows // 2]))
    check_commit(tree.ancestors, accepted, slots, None, [rows, rows], WIDTHS)


@pytest.mark.parametrize("sizes", [(12, 1), (7, 9)])
@pytest.mark.parametrize("spare", [0, 3])
def test_a_commit_of_ragged_rows(sizes: tuple[int, int], spare: int) -> None:
    """Slots in any order; one without rows has another's number, and changes nothing."""
    trees = [random_trees(rows, seed=rows).ancestors for rows in sizes]
    ancestors = torch.cat([*trees, ONE.expand(1, spare)], 1)
    first = numbers(0, sizes[0], sum(sizes), sum(sizes))
    last = numbers(sizes[0] - 1, -1 if spare else sizes[1] // 2, -1)
    check_commit(ancestors, last, numbers(2, 0, 2), first, [*sizes, 0], ())


def check_commit(
    ancestors: Tensor, last: Tensor, slots: Tensor, first: Tensor | None, sizes: list[int], widths: tuple
) -> None:
    buffers = [integers(64, 3, 64), *integers(9, 2, 3)]
    planes = [integers(255, 2, 40, KV_HEADS, PAGE, width).to(dtype) for width, dtype in widths]
    table, results = torch.randperm(39).view(3, 13).to(DEVICE), []
    for implementation in (commit_kernel, commit_reference):
        state = dict(zip(("path", "count", "lengths"), (buffer.clone() for buffer in buffers), strict=True))
        committed = implementation.commit_path(ancestors, last, slots, first, **state)
        moved = [plane.clone() for plane in planes]
        if moved:
            implementation.move_rows(moved, committed, slots, table)
        live = [item for item, size in enumerate(sizes) if size]  # the others mean nothing
        sources = [committed.source[item, : sizes[item]] for item in live]
        results.append([committed.counts, committed.starts[live], *sources, *state.values(), *moved])
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        assert_same_bits(found, expected, f"result {number}")
