import pytest

from bough.state.pages import PageAllocator


def test_lowest_pages_first_and_back_again() -> None:
    pages = PageAllocator(2)
    assert pages.missing(0, 3) == 3
    pages.grow(4)
    assert pages.extend(0, 2) == [0, 1]
    assert pages.extend(1, 1) == [2]
    assert pages.extend(0, 3) == [3]
    assert pages.extend(0, 3) == []
    assert pages.missing(1, 3) == 2
    pages.free_slot(0)
    assert pages.extend(1, 3) == [0, 1]
    assert pages.owned == [[], [2, 0, 1]]


def test_a_shared_page_is_free_when_the_last_holder_lets_go() -> None:
    pages = PageAllocator(2)
    pages.grow(4)
    pages.extend(0, 3)
    pages.retain([0, 1])
    pages.free_slot(0)
    assert pages.missing(1, 3) == 1
    pages.share(1, [0, 1])
    pages.release([0, 1])
    assert pages.extend(1, 4) == [2, 3]
    pages.free_slot(1)
    assert pages.missing(0, 4) == 0


def test_a_page_is_released_once() -> None:
    pages = PageAllocator(1)
    pages.grow(2)
    pages.extend(0, 1)
    pages.free_slot(0)
    pages.free_slot(0)  # owns none any more
    with pytest.raises(AssertionError, match="page 0 is free already"):
        pages.release([0])
    with pytest.raises(AssertionError, match="page 1 is free already"):
        pages.release([1])
    assert pages.free == 2
