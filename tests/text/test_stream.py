from hypothesis import given
from hypothesis import strategies as st

from bough.text.tokenizer import Tokenizer
from tests.text.vocabulary import TRAINED, awkward_text, marked_text, trained

TOKENIZER = Tokenizer.from_metadata(trained("qwen35")[0])


def cut(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The ids in consecutive pieces, some of them empty."""
    ends = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[start:end] for start, end in zip([0, *ends], [*ends, len(ids)], strict=True)]


@given(text=marked_text, skip_special=st.booleans(), data=st.data())
def test_any_split_gives_the_same_text(text: str, skip_special: bool, data: st.DataObject):
    ids = TOKENIZER.encode(text)
    stream = TOKENIZER.stream(skip_special=skip_special)
    pieces = [stream.push(piece) for piece in cut(data, ids)]
    assert "".join(pieces) + stream.flush() == TOKENIZER.decode(ids, skip_special=skip_special)


@given(ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), data=st.data())
def test_any_split_of_any_ids_gives_the_same_text(ids: list[int], data: st.DataObject):
    stream = TOKENIZER.stream()
    assert "".join(map(stream.push, cut(data, ids))) + stream.flush() == TOKENIZER.decode(ids)


@given(data=st.binary(max_size=12))
def test_invalid_bytes_one_at_a_time(data: bytes):
    id_of_byte = {TOKENIZER.token_bytes(id): id for id in range(TRAINED)}
    ids = [id_of_byte[bytes([byte])] for byte in data]
    stream = TOKENIZER.stream()
    assert "".join(stream.push([id]) for id in ids) + stream.flush() == data.decode(errors="replace")


@given(text=awkward_text.filter(lambda text: "\ufffd" not in text))
def test_a_character_is_never_split(text: str):
    ids = TOKENIZER.encode(text, special=False)
    stream = TOKENIZER.stream()
    whole = TOKENIZER.decode(ids)
    shown = ""
    for id in ids:
        shown += stream.push([id])
        assert whole.startswith(shown)
    assert shown == whole
    assert stream.flush() == ""


def test_an_incomplete_character_is_held_back_until_flush():
    ids = [TOKENIZER.encode("🦊")[0]]
    assert TOKENIZER.token_bytes(ids[0]) != "🦊".encode()
    stream = TOKENIZER.stream()
    assert stream.push(ids) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(TOKENIZER.encode("ok")) + stream.flush() == "ok"
