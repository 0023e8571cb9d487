"""The tokens of a gap, by keys and by names, its prompt, and where its text ends."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.text.infill import Infill, infill_prompt, infill_tokens
from bough.text.stops import LineStop
from bough.text.tokenizer import EncodeLimit, Tokenizer
from tests.gguf_edit import GAP_TOKENS, edited

KEY = "tokenizer.ggml."
CODE = "def a(b):\n    return b\n"


@pytest.fixture
def read(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Tokenizer]:
    """Reads a tokenizer with these control tokens and keys."""

    def read(controls: tuple[str, ...], **keys: int) -> Tokenizer:
        named = {KEY + name: value for name, value in keys.items()}
        with GGUFFile.open(
            edited(tiny_model("qwen2"), tmp_path / "m.gguf", keys=named, controls=controls)
        ) as file:
            return Tokenizer.from_metadata(file.metadata)

    return read


def test_tokens_by_name_by_key_and_by_the_old_keys(read):
    named = read(GAP_TOKENS)
    ids = [named.id_of(token) for token in GAP_TOKENS]
    tokens = infill_tokens(named)
    assert [tokens.prefix, tokens.suffix, tokens.middle, tokens.repository, tokens.file] == [
        *ids[:3],
        *ids[4:],
    ]
    assert set(ids[3:]) <= named.stop_ids and not set(ids[:3]) & named.stop_ids
    strange = tuple(f"<|{index}|>" for index in range(4))
    for first, second, third in (
        ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
        ("prefix_token_id", "suffix_token_id", "middle_token_id"),
    ):
        keyed = read(strange, **{first: 302, second: 303, third: 304, "fim_pad_token_id": 305})
        tokens = infill_tokens(keyed)
        assert (tokens.prefix, tokens.suffix, tokens.middle, tokens.file) == (302, 303, 304, None)
        assert 305 in keyed.stop_ids
    assert infill_tokens(read(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"))).middle == 304
    for some in ((), GAP_TOKENS[:2]):
        with pytest.raises(UsageError, match="cannot fill in the middle"):
            infill_tokens(read(some))


def test_text_never_becomes_a_token_of_the_gap(read):
    tokenizer = read(GAP_TOKENS)
    ids, others = infill_prompt(tokenizer, "<|fim_middle|>", Infill("<|fim_prefix|>"), None, None)
    marks = [tokenizer.id_of(token) for token in GAP_TOKENS[:3]]
    assert others == 0 and [ids.count(mark) for mark in marks] == [1, 1, 1]
    spelled = "<|fim_prefix|><|fim_middle|><|fim_suffix|><|fim_prefix|><|fim_middle|>"
    assert tokenizer.decode(ids, skip_special=False) == spelled


def test_other_files_of_a_model_without_tokens_for_them(read):
    tokenizer = read(GAP_TOKENS[:4])
    gap = Infill("b", [("x.py", "one"), ("y.py", "two")], begun="c")
    ids, others = infill_prompt(tokenizer, "a", gap, None, None)
    snippet = "\n\n--- snippet ---\n\n"
    assert tokenizer.decode(ids[:others]) == f"{snippet}one{snippet}two"
    assert (
        tokenizer.decode(ids[others:], skip_special=False) == "<|fim_prefix|>ac<|fim_suffix|>b<|fim_middle|>"
    )


@pytest.mark.parametrize("before, after", [(900, 900), (900, 3), (3, 900), (3, 3)])
def test_what_does_not_fit_is_left_out_far_from_the_gap(read, before, after):
    tokenizer = read(GAP_TOKENS)
    prefix, suffix = [33] * before, "!" * after
    gap = Infill(suffix, [("x.py", CODE * 40)], fit=True)
    ids, others = infill_prompt(tokenizer, prefix, gap, EncodeLimit(400), 100)
    assert len(ids) == 300
    tokens = infill_tokens(tokenizer)
    start, middle, end = (ids.index(mark) for mark in (tokens.prefix, tokens.suffix, tokens.middle))
    assert start == others and end == 299
    expected = {(900, 900): (223, 74), (900, 3): (294, 3), (3, 900): (3, 294), (3, 3): (3, 3)}
    assert (middle - start - 1, end - middle - 1) == expected[before, after]


@given(st.lists(st.text(alphabet="ab \n\t", max_size=6)), st.integers(0, 3))
def test_any_split_ends_with_the_same_line(pieces: list[str], indent: int):
    whole, parts = LineStop(indent=indent), LineStop(indent=indent)
    text = "".join(pieces)
    shown = whole.push(text)
    assert "".join(map(parts.push, pieces)) == shown and parts.hit == whole.hit
    lines = text.split("\n")
    for count, line in enumerate(lines[1:], 1):
        bare = line.lstrip(" \t")
        # The last line may be indented further yet.
        if len(line) - len(bare) < indent and (bare or count + 1 < len(lines)):
            assert whole.hit and shown == "\n".join(lines[:count])
            return
    assert not whole.hit and shown + whole.flush() == text


def test_a_line_ends_the_text_after_a_time():
    times = iter([0.0, 0.5, 1.5])
    stop = LineStop(1.0, now=lambda: next(times))
    assert stop.push("one\ntwo") + stop.push(" more\nthree") == "one\ntwo more" and stop.hit
    assert stop.push("x") == stop.flush() == ""
