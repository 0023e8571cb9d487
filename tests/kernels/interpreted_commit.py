"""The kernels of slot mappings and commits against their references, in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.kernels.commit import reference, triton_kernels
from bough.kernels.slot_mapping import reference as slot_mapping
from bough.kernels.slot_mapping import triton_kernels as slot_mapping_kernel
from bough.models.step import Step

torch.set_num_threads(1)
SLOTS, SAVED = 3, 64


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_path_that_stays(data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([1, 2, 5, 8, 33, 64]))
    parents = [[-1] + [data.draw(st.integers(-1, row - 1)) for row in range(1, rows)] for _ in range(2)]
    last = torch.tensor([data.draw(st.integers(-1, rows - 1)) for _ in range(2)])
    slots, zeros = torch.tensor([2, 0]), torch.zeros(2, dtype=torch.int64)
    step = Step.tree(slots, torch.zeros(2, rows, dtype=torch.int64), torch.tensor(parents), zeros)
    assert step.ancestors is not None
    before = (
        torch.randint(0, 64, (SLOTS, SAVED)),
        torch.randint(0, 9, (SLOTS,)),
        torch.randint(0, 99, (SLOTS,)),
    )
    results = []
    for implementation in (triton_kernels, reference):
        path, count, lengths = (part.clone() for part in before)
        kept = implementation.commit_path(
            step.ancestors, last, slots, path=path, count=count, lengths=lengths
        )
        results.append((kept.counts, kept.starts, kept.source, path, count, lengths))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_the_paths_of_ragged_rows(data: st.DataObject) -> None:
    """Slots in any order; one without rows has another's number, and changes nothing."""
    sizes = [data.draw(st.integers(1, 12)) for _ in range(2)]
    trees = [
        ([0] * rows, [-1] + [data.draw(st.integers(0, row - 1)) for row in range(1, rows)]) for rows in sizes
    ]
    slots = torch.tensor([2, 0])
    step = Step.ragged(slots, trees, torch.zeros(2, dtype=torch.int64))
    assert step.ancestors is not None and step.first is not None
    spare = torch.ones(1, data.draw(st.integers(0, 3)), dtype=torch.int64)
    ancestors, slots = torch.cat([step.ancestors, spare], 1), torch.tensor([2, 0, 2])
    first = torch.cat([step.first, step.first[-1:]])
    last = torch.tensor([data.draw(st.integers(-1, rows - 1)) for rows in sizes] + [-1])
    before = (
        torch.randint(0, 64, (SLOTS, SAVED)),
        torch.randint(0, 9, (SLOTS,)),
        torch.randint(0, 99, (SLOTS,)),
    )
    results = []
    for implementation in (triton_kernels, reference):
        state = dict(zip(("path", "count", "lengths"), (part.clone() for part in before), strict=True))
        kept = implementation.commit_path(ancestors, last, slots, first, **state)
        sources = [kept.source[item, :rows] for item, rows in enumerate(sizes)]
        results.append((kept.counts, kept.starts[:2], *sources, *state.values()))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(24, torch.float32), (6, torch.float16), (16, torch.bfloat16), (20, torch.uint8), (1, torch.float16)],
)
def test_rows_move_across_pages(width: int, dtype: torch.dtype) -> None:
    layers, heads, page = 2, 2, 4
    plane = torch.randint(0, 99, (layers, 40, heads, page, width)).to(dtype)
    table = torch.randperm(39)[:36].view(SLOTS, 12) + 1
    slots = torch.tensor([1, 2])
    source = torch.arange(9).repeat(2, 1)
    source[0, :4], source[1, :6] = torch.tensor([0, 2, 5, 8]), torch.tensor([0, 1, 3, 4, 6, 7])
    kept = reference.AcceptedPath(torch.tensor([4, 6]), torch.tensor([7, 2]), source)
    planes = plane.clone(), plane.clone()
    triton_kernels.move_rows([planes[0]], kept, slots, table)
    reference.move_rows([planes[1]], kept, slots, table)
    assert torch.equal(*planes)
    assert not torch.equal(planes[0], plane)


@pytest.mark.parametrize(("count", "size"), [(1, 8), (5, 8), (24, 24), (64, 64), (17, 48)])
def test_trees_filled_up(count: int, size: int) -> None:
    tree, lengths = torch.randint(-(2**40), 2**40, (4, 64)), torch.tensor([5, 2**33])
    arguments = (tree, torch.tensor([count]), torch.tensor([1]), lengths)
    found = slot_mapping_kernel.padded_tree(*arguments, size=size)
    assert torch.equal(found, slot_mapping.padded_tree(*arguments, size=size))


@pytest.mark.parametrize("sizes", [(3, 5), (1, 0, 4), (30, 2, 16)])
def test_ragged_rows(sizes: tuple[int, ...]) -> None:
    """Rows of several trees and padding: their positions and owners, pages and pending rows."""
    rows, lengths = torch.randint(0, 2**40, (4, 64)), torch.tensor([5, 2**33, 37])
    rows[3] = torch.randint(0, 9, (64,))
    slots, first = torch.tensor([1, 0, 2])[: len(sizes)], torch.tensor([0, *sizes]).cumsum(0)
    found = slot_mapping_kernel.ragged_rows(rows, first, slots, lengths, size=48)
    assert torch.equal(found, slot_mapping.ragged_rows(rows, first, slots, lengths, size=48))
    lengths[1] = 77
    table, path, count = (
        torch.randperm(1200).view(3, 400),
        torch.randint(0, 64, (3, 64)),
        torch.tensor([3, 4, 7]),
    )
    options = {"rows": 48, "page": 4, "first": first, "spare_page": 1234}
    mapped, wanted = (
        each.slot_mapping(slots, lengths, table, path, count, **options)
        for each in (slot_mapping_kernel, slot_mapping)
    )
    for name in ("lengths", "page_table", "pages", "offsets", "path", "count"):
        assert torch.equal(getattr(mapped, name), getattr(wanted, name)), name
    assert wanted.pages[sum(sizes) :].tolist() == [1234] * (48 - sum(sizes))


@pytest.mark.parametrize("rows", [1, 9, 300])
def test_where_rows_stand(rows: int) -> None:
    slots, lengths, count = torch.tensor([2, 0]), torch.tensor([5, 0, 37]), torch.tensor([3, 0, 7])
    table, path = torch.randperm(1200).view(3, 400), torch.randint(0, 64, (3, 64))
    options = {"rows": rows, "page": 4}
    found = slot_mapping_kernel.slot_mapping(slots, lengths, table, path, count, **options)
    wanted = slot_mapping.slot_mapping(slots, lengths, table, path, count, **options)
    for name in ("lengths", "page_table", "pages", "offsets", "path", "count"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
