"""Committed tokens become events: stop strings beside calls, characters that tokens split."""

from hypothesis import given
from hypothesis import strategies as st

from treeflash.session.answer import Answer
from treeflash.session.requests import SessionEvent, Text, ToolArguments, ToolCall
from treeflash.text.output import OutputParser
from treeflash.text.stream import TextStream
from treeflash.text.tools import Tool

CALL = "<tool_call>\n<function=look>\n<parameter=at>\nEND\n</parameter>\n</function>\n</tool_call>"


def events(text: str, stop: list[str], sizes: list[int] | None = None) -> tuple[list[SessionEvent], Answer]:
    """Of a text that comes as one token a byte, `sizes` of them at a time."""
    answer = Answer(TextStream(lambda id: bytes([id])), OutputParser(tools=[Tool("look")]), stop)
    left, found = list(text.encode()), []
    sizes = sizes or [1]
    while left and answer.stop_string is None:
        size = sizes[len(found) % len(sizes)]
        answer.write(left[:size])
        left = left[size:]
        found += answer.take()
    answer.finish(whole=True)
    return [*found, *answer.take()], answer


def story(found: list[SessionEvent]) -> list[tuple[str, str]]:
    """Kinds and texts in their order, neighbours of one kind as one."""
    told: list[tuple[str, str]] = []
    for event in found:
        kind = type(event).__name__
        text = event.name if isinstance(event, ToolCall) else event.text
        if told and told[-1][0] == kind:
            told[-1] = (kind, told[-1][1] + text)
        else:
            told.append((kind, text))
    return told


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_what_may_begin_a_stop_string_comes_before_the_call_behind_it(sizes: list[int]) -> None:
    found, answer = events(f"I look at the E\n{CALL}\nND of it.", ["END"], sizes)
    assert story(found) == [
        ("Text", "I look at the E"),
        ("ToolCall", "look"),
        ("ToolArguments", '{"at": "END"}'),
        ("Text", "ND of it."),
    ]
    assert answer.stop_string is None and answer.called


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_stop_string_ends_the_text_before_a_call(sizes: list[int]) -> None:
    found, answer = events(f"One. END two. {CALL}", ["END"], sizes)
    assert story(found) == [("Text", "One. ")]
    assert answer.stop_string == "END" and not answer.called


@given(text=st.text(max_size=20), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_characters_stay_whole(text: str, sizes: list[int]) -> None:
    answer = Answer(TextStream(lambda id: bytes([id])), OutputParser(), ["\x00never"])
    left, pieces = list(text.encode(errors="replace")), []
    for size in sizes * 20:
        answer.write(left[:size])
        left = left[size:]
        pieces += [event.text for event in answer.take() if isinstance(event, Text)]
    answer.write(left)
    answer.finish(whole=True)
    pieces += [event.text for event in answer.take() if isinstance(event, Text)]
    assert "".join(pieces) == text.encode(errors="replace").decode()
    assert not any(isinstance(event, ToolArguments) for event in answer.take())
