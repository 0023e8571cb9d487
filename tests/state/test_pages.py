from treeflash.state.pages import PageAllocator


def test_lowest_pages_first_and_back_again() -> None:
    pages = PageAllocator(2)
    assert pages.missing(0, 3) == 3
    pages.grow(4)
    assert pages.take(0, 2) == [0, 1]
    assert pages.take(1, 1) == [2]
    assert pages.take(0, 3) == [3]
    assert pages.take(0, 3) == []
    assert pages.missing(1, 3) == 2
    pages.release(0)
    assert pages.take(1, 3) == [0, 1]
    assert pages.owned == [[], [2, 0, 1]]
