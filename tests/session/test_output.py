"""OutputStream: stop strings next to tool calls, characters split over tokens."""

from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from bough.session.events import SessionEvent, Text, ToolArguments, ToolCall
from bough.session.output import OutputStream
from bough.text.output import OutputParser
from bough.text.stream import TextStream
from bough.text.tools import Tool

CALL = "<tool_call>\n<function=look>\n<parameter=at>\nEND\n</parameter>\n</function>\n</tool_call>"


def events(
    text: str, stop: list[str], sizes: list[int] | None = None
) -> tuple[list[SessionEvent], OutputStream]:
    """Stream a text with one token per byte, in pieces of these sizes."""
    output = OutputStream(TextStream(lambda id: bytes([id])), OutputParser(tools=[Tool("look")]), stop)
    left, found = list(text.encode()), []
    sizes = sizes or [1]
    while left and output.stop_string is None:
        size = sizes[len(found) % len(sizes)]
        output.write(left[:size])
        left = left[size:]
        found += output.take()
    output.finish(whole=True)
    return [*found, *output.take()], output


def joined(found: list[SessionEvent]) -> list[tuple[str, str]]:
    """Return kinds and texts in order, neighbours of one kind merged."""
    result: list[tuple[str, str]] = []
    for event in found:
        kind = type(event).__name__
        text = event.name if isinstance(event, ToolCall) else event.text
        if result and result[-1][0] == kind:
            result[-1] = (kind, result[-1][1] + text)
        else:
            result.append((kind, text))
    return result


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_text_held_back_for_a_stop_string_precedes_the_next_call(sizes: list[int]) -> None:
    found, output = events(f"I look at the E\n{CALL}\nND of it.", ["END"], sizes)
    assert joined(found) == [
        ("Text", "I look at the E"),
        ("ToolCall", "look"),
        ("ToolArguments", '{"at": "END"}'),
        ("Text", "ND of it."),
    ]
    assert output.stop_string is None and output.called


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_stop_string_ends_the_text_before_a_call(sizes: list[int]) -> None:
    found, output = events(f"One. END two. {CALL}", ["END"], sizes)
    assert joined(found) == [("Text", "One. ")]
    assert output.stop_string == "END" and not output.called


@given(text=st.text(max_size=20), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_characters_stay_whole(text: str, sizes: list[int]) -> None:
    output = OutputStream(TextStream(lambda id: bytes([id])), OutputParser(), ["\x00never"])
    left, pieces = list(text.encode(errors="replace")), []
    for size in sizes * 20:
        output.write(left[:size])
        left = left[size:]
        pieces += [event.text for event in output.take() if isinstance(event, Text)]
    output.write(left)
    output.finish(whole=True)
    pieces += [event.text for event in output.take() if isinstance(event, Text)]
    assert "".join(pieces) == text.encode(errors="replace").decode()
    assert not any(isinstance(event, ToolArguments) for event in output.take())


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_tokens_to_keep_end_with_the_stop_string(sizes: list[int]) -> None:
    """What the engine is told to keep: with the last of them the stop string is complete."""
    text, output = (
        b"One. END two.",
        OutputStream(TextStream(lambda id: bytes([id])), OutputParser(tools=[]), ["END"]),
    )
    kept, count = 0, None
    for size in cycle(sizes):
        piece = text[kept : kept + size]
        count = output.write(list(piece))
        kept += len(piece) if count is None else count
        if count is not None:
            break
    assert text[:kept] == b"One. END"
