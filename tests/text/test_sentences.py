"""Sentences of prose are the same however the text is split, and the tokens that a text can begin with."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.text.sentences import Prose
from bough.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import PRES, TOKENIZERS
from tests.text.vocabulary import ranked
from workshop.chats import sentences

PARTS = [
    "One two three four.",
    "One two three!",
    " ",
    "\n",
    "```",
    "``",
    "`",
    "a b c d",
    "| a | b | c |",
    "e.g. 1",
]


def ends(pieces: list[bytes]) -> tuple[Prose, list[bytes]]:
    prose, found = Prose(), []
    for piece in pieces:
        prose, more = prose.after(piece)
        found += more
    return prose, found


@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), seed=st.integers(0, 99))
def test_any_split_has_the_same_sentences(parts: list[str], seed: int) -> None:
    text, choose = "".join(parts).encode(), random.Random(seed)
    cuts = sorted(choose.randrange(len(text) + 1) for _ in range(choose.randrange(9)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert ends(pieces) == ends([text])


def test_code_and_tables_have_no_sentences() -> None:
    text = """Here it is for you:
```python
x = one + two + three
```
It is as fast as it gets. Is it not so, my friend? Yes.
| a | b | c |
- one two three four
"""
    _, found = ends([text.encode()])
    assert found == [
        b"Here it is for you:",
        b"It is as fast as it gets.",
        b"Is it not so, my friend?",
        b"- one two three four",
    ]
    assert [each.encode() for each in sentences(text) if not each.startswith("|")] == found


@pytest.mark.parametrize("name", [*PRES, "sentencepiece"])
@given(text=st.text(min_size=1, max_size=9))
def test_the_tokens_that_a_text_can_begin_with(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name] if name in PRES else SENTENCEPIECE
    data = text.encode(errors="replace")
    pieces = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
    expected = {id for id, piece in enumerate(pieces) if piece and data.startswith(piece)}
    found = set(tokenizer.beginning(data))
    assert found <= expected
    assert not [id for id in expected - found if not tokenizer._is_special(id)]


SENTENCEPIECE = Tokenizer.from_metadata(ranked())
