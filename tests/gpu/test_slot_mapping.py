"""Padded trees, the slot mapping of a step's rows, and the commit of an accepted path."""

import pytest
import torch
from torch import Tensor

from bough.kernels.commit import reference as commit_reference
from bough.kernels.commit import triton_kernels as commit_kernel
from bough.kernels.slot_mapping import reference as mapping_reference
from bough.kernels.slot_mapping import triton_kernels as mapping_kernel
from tests.gpu.inputs import DEVICE, HEAD_DIM, KV_HEADS, PAGE, random_trees
from tests.gpu.numerics import assert_same_bits, nan_filled_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape).to(DEVICE)


@pytest.mark.parametrize(("count", "size"), [(1, 8), (8, 8), (5, 16), (24, 24), (33, 48), (64, 64)])
def test_a_tree_is_padded_as_by_the_reference(count: int, size: int) -> None:
    tree, lengths = integers(1 << 40, 4, 64), integers(262144, 3)
    arguments = (tree, torch.tensor([count], device=DEVICE), torch.tensor([2], device=DEVICE), lengths)
    with nan_filled_memory():
        found = mapping_kernel.padded_tree(*arguments, size=size)
    assert_same_bits(found, mapping_reference.padded_tree(*arguments, size=size))


@pytest.mark.parametrize(("rows", "pages"), [(1, 5), (8, 33), (64, 4097), (2048, 4097)])
def test_rows_are_mapped_as_by_the_reference(rows: int, pages: int) -> None:
    """Up to the end of 262,144 tokens."""
    table = torch.randperm(3 * pages).view(3, pages).to(DEVICE)
    lengths = torch.tensor([0, 7, max(0, PAGE * pages - rows)], device=DEVICE)
    slots = torch.tensor([2, 0], device=DEVICE)
    arguments = (slots, lengths, table, integers(64, 3, 64), integers(9, 3))
    with nan_filled_memory():
        found = mapping_kernel.slot_mapping(*arguments, rows=rows, page=PAGE)
    expected = mapping_reference.slot_mapping(*arguments, rows=rows, page=PAGE)
    for name in ("lengths", "page_table", "pages", "offsets", "path", "count"):
        assert_same_bits(getattr(found, name), getattr(expected, name), name)


@pytest.mark.parametrize("rows", [1, 8, 24, 64])
@pytest.mark.parametrize("last", ["the last row and none", "the root and a middle row"])
def test_a_commit_moves_the_rows_of_the_accepted_path(rows: int, last: str) -> None:
    """Pages are in any order, and planes have odd widths."""
    tree, slots = random_trees(rows, 2), torch.tensor([2, 0], device=DEVICE)
    accepted = [rows - 1, -1] if last == "the last row and none" else [0, rows // 2]
    buffers = [integers(64, 3, 64), *integers(9, 2, 3)]
    planes = [
        torch.randint(0, 255, (2, 40, KV_HEADS, PAGE, width)).to(DEVICE).to(dtype)
        for width, dtype in ((HEAD_DIM, torch.float16), (6, torch.float16), (21, torch.uint8))
    ]
    table = torch.randperm(39).view(3, 13).to(DEVICE)
    results = []
    for implementation in (commit_kernel, commit_reference):
        path, count, lengths = (buffer.clone() for buffer in buffers)
        committed = implementation.commit_path(
            tree.ancestors, torch.tensor(accepted, device=DEVICE), slots, path=path, count=count,
            lengths=lengths,
        )  # fmt: skip
        moved = [plane.clone() for plane in planes]
        implementation.move_rows(moved, committed, slots, table)
        results.append((committed.counts, committed.starts, committed.source, path, count, lengths, *moved))
    names = ("counts", "starts", "source", "path", "count", "lengths", *(f"plane {i}" for i in range(3)))
    for name, found, expected in zip(names, *results, strict=True):
        assert_same_bits(found, expected, name)
