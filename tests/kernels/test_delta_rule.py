"""The delta rule in its chunk and tree forms: against the plain recurrence in float64, and bit for bit."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bough.kernels.delta_rule import DeltaHeads, DeltaRows, chunk_delta, tree_delta, tree_order
from bough.kernels.delta_rule.cpu import Visit, saved_states
from bough.kernels.delta_rule.reference import recurrence
from bough.kernels.norm_rope import l2_norm
from bough.kernels.tree import MAX_ROWS
from bough.models.step import Step, visibility
from tests.kernels.delta_layer import DeltaLayer, ancestors_of, check_cuts_into_steps, packed_order

TOLERANCE = 1e-10  # float64: what is left is rounding


def make(
    batch: int,
    rows: int,
    *,
    key_heads: int = 2,
    value_heads: int = 6,
    dim: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[DeltaHeads, Tensor]:
    """Return random inputs, and a state for each batch item."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    heads = DeltaHeads(
        l2_norm(normal(batch, rows, key_heads, dim), 1e-6) * dim**-0.5,
        l2_norm(normal(batch, rows, key_heads, dim), 1e-6),
        normal(batch, rows, value_heads, dim),
        # Strong decay in places: ratios of exponentials would overflow where differences do not.
        -8 * torch.rand(batch, rows, value_heads, generator=generator, dtype=dtype) ** 3,
        torch.rand(batch, rows, value_heads, generator=generator, dtype=dtype),
    )
    return heads, normal(batch, value_heads, dim, dim)


def of_rows(heads: DeltaHeads, queries: slice | list[int], rows: slice | list[int]) -> DeltaHeads:
    """Return some queries, and other inputs of other rows."""
    return DeltaHeads(heads.q[:, queries], *(part[:, rows] for part in heads[1:]))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_chunk_is_the_recurrence(tokens: int) -> None:
    heads, before = make(2, tokens, seed=tokens)
    out, state = chunk_delta(heads, before)
    for item in range(2):
        for row in {0, tokens // 2, tokens - 1}:
            expected, _ = recurrence(heads, before[item], item, list(range(row + 1)))
            assert (out[item, row] - expected).abs().max() < TOLERANCE
        expected = recurrence(heads, before[item], item, list(range(tokens)))[1]
        assert (state[item] - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("rows", "path"), [(1, 0), (1, 1), (2, 3), (7, 1), (23, 0), (64, 9)])
def test_a_path_and_the_tree_below_it_are_the_recurrence(rows: int, path: int) -> None:
    """Of three slots two have a tree; the second one's path is a row shorter."""
    (heads, initial), choose = make(2, path + rows, seed=rows), random.Random(rows)
    parents = torch.tensor([[-1] + [choose.randrange(row) for row in range(1, rows)] for _ in range(2)])
    step = Step.tree(torch.tensor([2, 0]), parents, parents, torch.zeros(2, dtype=torch.int64))
    assert step.ancestors is not None
    count = torch.tensor([path, max(0, path - 1)])
    state = torch.stack([initial[1], initial[0] + initial[1], initial[0]])  # slots 2 and 0 are initial's
    before = state.clone()
    step_rows = DeltaRows(step.slots, count, tree_order(step.ancestors))
    out = tree_delta(of_rows(heads, slice(path, None), slice(None)), state, step_rows)
    visible = visibility(parents)
    for item, (slot, taken) in enumerate(zip((2, 0), count.tolist(), strict=True)):
        committed = list(range(taken))
        for row in range(rows):
            above = committed + [path + i for i in visible[item, row].nonzero()[:, 0].tolist()]
            assert (out[item, row] - recurrence(heads, initial[item], item, above)[0]).abs().max() < TOLERANCE
        assert (state[slot] - recurrence(heads, initial[item], item, committed)[1]).abs().max() < TOLERANCE
    assert torch.equal(state[1], before[1])


def test_a_path_without_a_tree_is_the_recurrence() -> None:
    """As before a prompt chunk; rows after a path are not read."""
    heads, state = make(2, 7)
    before, count = state.clone(), [7, 4]
    heads.k[1, 4:] = torch.nan
    rows = DeltaRows(torch.arange(2), torch.tensor(count), torch.empty(2, 0, dtype=torch.int32))
    out = tree_delta(of_rows(heads, slice(0), slice(None)), state, rows)
    assert out.shape == (2, 0, 6, 8)
    for item, taken in enumerate(count):
        expected = recurrence(heads, before[item], item, list(range(taken)))[1]
        assert (state[item] - expected).abs().max() < TOLERANCE


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def star(rows: int) -> list[int]:
    return [-1] + [0] * (rows - 1)


def binary(rows: int) -> list[int]:
    return [-1] + [(row - 1) // 2 for row in range(1, rows)]


def padded(rows: int) -> list[int]:
    """A tree of half the rows; the others are padding."""
    return [*binary(-(-rows // 2)), *[-1] * (rows // 2)]


def scattered(rows: int, seed: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [-1] + [choose.randrange(max(0, row - 7), row) for row in range(1, rows)]


SHAPES = (chain, star, binary, padded, scattered)


def replay(order: list[Visit]) -> tuple[list[int], int]:
    """Return the parent from whose state each row starts, by following the order, and the levels in use."""
    state, saved, starts = -1, {}, {}
    for visit in order:
        if visit.restore is not None:
            state = saved[visit.restore]
        starts[visit.row] = state
        if visit.save is not None:
            saved[visit.save] = state
        if visit.has_children:
            state = visit.row
    return [starts[row] for row in range(len(order))], len(saved)


@given(data=st.data(), rows=st.integers(1, MAX_ROWS))
def test_the_order_starts_every_row_from_its_parent(data: st.DataObject, rows: int) -> None:
    parents = [data.draw(st.integers(-1, row - 1)) for row in range(rows)]
    order = [Visit.unpack(number) for number in packed_order(parents)[0].tolist()]
    found, levels = replay(order)
    assert found == parents
    assert [visit.has_children for visit in sorted(order)] == [row in parents for row in range(rows)]
    assert levels <= saved_states(rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 24, 63, 64])
def test_the_order_of_special_trees(shape, rows: int) -> None:
    parents = shape(rows)
    order = [Visit.unpack(number) for number in packed_order(parents)[0].tolist()]
    found, levels = replay(order)
    assert found == parents
    assert levels <= saved_states(rows)
    assert levels == 0 or shape not in (chain, star)


def test_few_states_are_saved() -> None:
    assert [saved_states(rows) for rows in (1, 8, 16, 24, 32, 48, 64)] == [0, 1, 2, 3, 3, 4, 4]
    # The smallest trees that need as many: such a tree, and a chain with as many inner rows as its sibling.
    parents, inner = [-1, 0], 1
    for levels in range(1, 5):
        begin = len(parents)
        chained = [-1, *range(begin, begin + inner)]
        assert len(parents) + len(chained) == (2 << levels) + levels - 1
        for rows, expected in ((len(parents) + len(chained), levels), (len(parents), levels - 1)):
            trees = (parents + chained)[:rows]
            order = [Visit.unpack(number) for number in packed_order(trees)[0].tolist()]
            assert replay(order)[1] == saved_states(rows) == expected
        parents = [-1, *(parent + 1 for parent in parents + chained)]
        inner = 2 * inner + 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 24, 64])
@pytest.mark.parametrize("dim", [16, 128])
def test_a_row_is_the_root_after_its_path_was_committed(shape, rows: int, dim: int) -> None:
    """Bit for bit, below a path that is committed in the same step."""
    before, parents = 3, shape(rows)
    heads, state = make(1, before + rows, dim=dim, seed=rows, dtype=torch.float32)
    slot = torch.tensor([0])
    step_rows = DeltaRows(slot, torch.tensor([before]), packed_order(parents))
    out = tree_delta(of_rows(heads, slice(before, None), slice(None)), state.clone(), step_rows)
    for row in range(rows):
        path = [n for n in range(rows) if ancestors_of(parents)[row] >> n & 1]
        places = [*range(before), *(before + n for n in path)]
        step_rows = DeltaRows(slot, torch.tensor([len(places) - 1]), packed_order([-1]))
        root = tree_delta(of_rows(heads, [before + row], places), state.clone(), step_rows)
        assert torch.equal(root[:, 0], out[:, row]), f"row {row}"


def test_ragged_rows_are_those_of_each_sequence_alone() -> None:
    trees, counts, room = [scattered(5), chain(1), [], star(9), scattered(23)], [2, 0, 3, 1, 3], 3
    sizes = [len(tree) for tree in trees]
    items = [make(1, room + size, seed=size, dtype=torch.float32)[0] for size in sizes]
    slots = torch.tensor([4, 0, 2, 5, 1])
    state = torch.randn(6, 6, 8, 8)
    first = torch.tensor([0, *sizes]).cumsum(0)
    bits = torch.tensor([bits for tree in trees for bits in ancestors_of(tree)])
    trees_alone = [of_rows(heads, slice(room, None), slice(None)) for heads in items]
    flat = DeltaHeads(*(torch.cat([part[0] for part in parts]) for parts in zip(*trees_alone, strict=True)))
    count, expected = torch.tensor(counts), state.clone()
    out = tree_delta(flat, state, DeltaRows(slots, count, tree_order(bits, first), first))
    for item, (begin, end) in enumerate(pairwise(first.tolist())):
        one = slice(item, item + 1)
        alone = DeltaRows(slots[one], count[one], tree_order(bits[None, begin:end]))
        wanted = tree_delta(trees_alone[item], expected, alone)
        assert torch.equal(out[begin:end], wanted[0])
    assert torch.equal(state, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layers_give_the_same_bits_for_every_cut_into_steps(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    check_cuts_into_steps(DeltaLayer((2, 6, 16), dtype), [scattered(1 + 4 * n, n) for n in range(6)])
