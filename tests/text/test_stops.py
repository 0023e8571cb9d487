import itertools

from hypothesis import given
from hypothesis import strategies as st

from bough.text.stops import StopStrings

WORDS = st.text("abc\n", min_size=1, max_size=4)


def pieces(text: str, cuts: list[int]) -> list[str]:
    offsets = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(offsets)]


@given(st.text("abc\n", max_size=40), st.lists(WORDS, max_size=3), st.lists(st.integers(0, 40), max_size=8))
def test_any_split_ends_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    expected = text[: min(found)[1]] if found else text
    scanner = StopStrings(stops)
    shown = "".join(scanner.push(piece) for piece in pieces(text, cuts)) + scanner.flush()
    assert shown == expected
    assert (scanner.hit is not None) == bool(found)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    scanner = StopStrings(["\n\nUser:"])
    assert scanner.push("one\n") == "one"
    assert scanner.push("two\n\nUs") == "\ntwo"
    assert scanner.push("ed") == "\n\nUsed"
    assert scanner.push("\n\nUser: hi") == ""
    assert scanner.hit == "\n\nUser:"
    assert scanner.push("more") + scanner.flush() == ""
