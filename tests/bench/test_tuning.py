"""Which tilings are tried on a card, and which one is taken: only what is faster, and adds up the same."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from bough.bench.tuning import (
    LAYERS_27B,
    Found,
    MeasuredTiling,
    Stack,
    candidates,
    random_steps,
    tune,
)
from bough.gguf.types import QuantType
from bough.kernels.check.inputs import HALVES
from bough.kernels.quant_matmul import cuda, empty_packed, unpack
from bough.kernels.quant_matmul.layout import LAYOUTS
from bough.kernels.quant_matmul.rows import BUCKETS
from bough.kernels.quant_matmul.tiling import Tiling, built_in_tilings
from bough.kernels.runtime.device import card_of
from tests.kernels.cards import CARDS

MIX = [LAYOUTS[type] for type in (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0)]
H200 = CARDS["H200"]
BUILT_IN = built_in_tilings(H200.arch)


def clock(
    seconds: Callable[[Tiling, int], float], sums: Callable[[Tiling, int], float] = lambda *_: 1.0
) -> Callable[[Sequence[Tiling], int], Iterator[MeasuredTiling]]:
    def measure(tilings: Sequence[Tiling], bucket: int) -> Iterator[MeasuredTiling]:
        for tiling in tilings:
            yield MeasuredTiling(seconds(tiling, bucket), torch.tensor([sums(tiling, bucket)]))

    return measure


def other(rows: int) -> Tiling:
    return candidates(H200, rows, MIX)[1]


def test_the_fastest_is_taken_for_each_number_of_rows() -> None:
    found = tune(H200, MIX, clock(lambda tiling, rows: 1.0 - 0.1 * (tiling == other(rows))))
    assert [each.rows for each in found] == list(BUCKETS)
    for each in found:
        assert each == Found(each.rows, BUILT_IN[each.rows], other(each.rows), 1.0, 0.9, ())


@pytest.mark.parametrize(("gain", "taken"), [(-0.2, False), (0.0, False), (0.009, False), (0.011, True)])
def test_a_hundredth_is_not_enough(gain: float, taken: bool) -> None:
    found = tune(H200, MIX, clock(lambda tiling, rows: 1.0 - gain * (tiling == other(rows))))
    assert all((each.best != each.built_in) == taken for each in found)
    assert all(each.best_s == (1.0 - gain if taken else 1.0) for each in found)


def test_other_sums_are_never_taken() -> None:
    measure = clock(
        lambda tiling, rows: 0.5 if tiling == other(rows) else 0.8 if not tiling.halfway else 1.0,
        sums=lambda tiling, rows: 2.0 if tiling == other(rows) else 1.0,
    )
    for each in tune(H200, MIX, measure):
        assert each.differing == (other(each.rows),)
        # At 64 rows there is no third tiling that fits.
        assert each.best_s == (0.8 if other(each.rows).halfway else 1.0)
        assert each.best.halfway == (each.best_s == 1.0)


def test_sums_that_are_not_numbers_are_other_sums() -> None:
    nan = float("nan")
    (first, *_) = tune(H200, MIX, clock(lambda *_: 1.0, sums=lambda *_: nan))
    assert first.best == first.built_in and len(first.differing) == len(candidates(H200, 8, MIX)) - 1


def test_a_clock_that_rises_favours_nobody() -> None:
    def measure(tilings: Sequence[Tiling], _: int) -> Iterator[MeasuredTiling]:
        assert tilings[0] == tilings[-1]
        for index in range(len(tilings)):
            yield MeasuredTiling(1.0 if index else 2.0, torch.zeros(1))

    assert all(each.best == each.built_in and each.built_in_s == 1.0 for each in tune(H200, MIX, measure))


def test_tuning_starts_from_the_built_in_tilings() -> None:
    """Not from what was tuned before."""
    measure = clock(lambda tiling, rows: 1.0 - 0.1 * (tiling == BUILT_IN[rows]))
    for each in tune(H200, MIX, measure):
        assert each.best == each.built_in == BUILT_IN[each.rows] and each.best_s == 0.9


def test_progress_ends_where_it_said() -> None:
    seen: list[tuple[int, int]] = []
    tune(H200, MIX, clock(lambda *_: 1.0), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
    assert len(seen) == sum(len(candidates(H200, bucket, MIX)) + 1 for bucket in BUCKETS)


@pytest.mark.parametrize("name", CARDS)
def test_only_variants_that_differ_are_tried(name: str) -> None:
    card = CARDS[name]
    for bucket in BUCKETS:
        found, groups = candidates(card, bucket, MIX), cuda.grouped(card, bucket)
        assert found[0] == built_in_tilings(card.arch)[bucket]
        variants = [
            tuple(
                tuple(sorted(cuda.defines(card, layout, bucket, tiling, grouped=groups).items()))
                for layout in MIX
            )
            for tiling in found
        ]
        assert len(set(variants)) == len(variants)
        if not card.bulk_copies:
            assert {tiling.halfway for tiling in found} == {True}


def test_rows_that_do_not_fit_are_left_out() -> None:
    found = tune(CARDS["RTX 5090"], MIX, clock(lambda *_: 1.0))
    assert [each.rows for each in found] == [bucket for bucket in BUCKETS if bucket <= 48]


def test_the_stack_is_larger_than_caches_and_smaller_than_a_gigabyte() -> None:
    meta = torch.device("meta")
    sizes = [empty_packed(type, rows, k, meta).nbytes for each, k in LAYERS_27B for type, rows in each]
    assert 3 * 126e6 < sum(sizes) < 1e9


def test_random_weights_are_numbers_of_every_type() -> None:
    assert set(HALVES) == set(LAYOUTS)
    shapes = [(((type, 40), (type, 40)), 256) for type in (*LAYOUTS, QuantType.F16)]
    for (first, second), columns in random_steps(shapes, torch.device("cpu")):
        values = unpack(first)
        assert values.shape == (40, columns) and values.isfinite().all() and values.std() > 0
        assert torch.equal(values, unpack(second)) and first.data.data_ptr() != second.data.data_ptr()


@pytest.mark.gpu
def test_a_gpu_is_tuned() -> None:
    device = torch.device("cuda", 0)
    stack = Stack([(((QuantType.Q4_K, 1000), (QuantType.Q6_K, 300)), 1024)], device)
    found = tune(card_of(device), stack.layouts, stack.measure)
    assert found and all(not each.differing and 0 < each.best_s <= each.built_in_s for each in found)
