"""Units cover the text, and are what people would call a sentence, a row, a function."""

import inspect
import json
import random
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.compress.conversation import question_spans
from bough.compress.units import Unit, split_units
from bough.compress.words import names, terms
from tests.compress import conversations

PIECES = st.sampled_from(
    [
        "A line.",
        "Mr. Hill said no. He left.",
        "\n",
        "\n\n",
        "  ",
        "```\n",
        "def f(a):\n",
        "    x = 1\n",
        "| a | b |\n",
        "|---|---|\n",
        '{"a": [1, 2]}',
        "[",
        "]",
        "- item\n",
        "你好。再见。",
        "\t",
        "}",
        "x, y, z\n",
        '"""',
        "\r\n",
    ]
)


def texts(text: str, most: int = 4000) -> list[str]:
    return [text[unit.start : unit.end] for unit in split_units(text, most)]


def check(text: str, most: int) -> list[Unit]:
    units = split_units(text, most)
    assert "".join(text[unit.start : unit.end] for unit in units) == text
    assert all(unit.end > unit.start for unit in units)
    assert all(0 <= need < index for index, unit in enumerate(units) for need in unit.needs)
    return units


@given(st.lists(PIECES, max_size=40), st.integers(1, 200))
def test_units_cover_any_text(pieces: list[str], most: int) -> None:
    check("".join(pieces), most)


@pytest.mark.parametrize("seed", range(20))
def test_units_cover_documents(seed: int) -> None:
    check(conversations.document(random.Random(seed)), 500)


@pytest.mark.parametrize(
    "text",
    [
        "Here it ends.\n" + (" " * 3000 + "\n") * 20,
        "a:" + " " * 50_000 + "x\n",
        "head\n" + " " * 50_000 + "x\nmore\n",
        "".join(" " * depth + "if x:\n" for depth in range(3000)),
        "[" * 800 + "1" + "]" * 800,
        "a" * 200_000,
        "." * 100_000,
        "| " * 50_000,
        '"' * 50_001,
    ],
    ids=["blank", "annotation", "indent", "stairs", "nested", "word", "dots", "bars", "quotes"],
)
def test_odd_texts_take_no_time(text: str) -> None:
    began = time.process_time()
    units = check(text, 100)
    terms(text), names(text), question_spans(text)
    assert time.process_time() - began < 2 and units


def test_sentences_go_on_in_the_next_line_and_not_after_abbreviations() -> None:
    found = texts(
        "Dr. Smith came at 3.15 and\nleft, e.g. on foot. Nobody saw it!\nReally?\n\nA new paragraph. Its end."
    )
    assert found == [
        "Dr. Smith came at 3.15 and\nleft, e.g. on foot.",
        " Nobody saw it!\n",
        "Really?\n\n",
        "A new paragraph.",
        " Its end.",
    ]


def test_a_function_is_whole_and_a_long_one_has_its_head_and_lines() -> None:
    short = "@cache\ndef first(a):\n    '''Return it.'''\n    return a\n\n\n"
    long = 'def second(\n    b,\n):\n    """Say.\n\n    More.\n    """\n' + "".join(
        f"    x{i} = {i}\n" for i in range(60)
    )
    units = split_units(short + long)
    assert (short + long)[units[0].start : units[0].end] == short
    assert (short + long)[units[1].start : units[1].end] == long[: long.index("    x0")]
    assert len(units) == 62 and all(unit.needs == (1,) for unit in units[2:])


def test_short_paragraphs_of_a_long_function_are_whole() -> None:
    short = "    while b:\n        a, b = b, a % b\n    total = a\n\n"
    long = "".join(f"    x{i} = {i}\n" for i in range(38))
    text = f"def first(a, b):\n{short}{long}"
    units = split_units(text)
    assert [text[unit.start : unit.end] for unit in units[:2]] == ["def first(a, b):\n", short]
    assert len(units) == 40 and all(unit.needs == (0,) for unit in units[1:])


def test_no_definition_of_the_standard_library_is_cut() -> None:
    """Every top-level function of up to 40 lines is inside one unit."""
    source = inspect.getsource(subprocess)
    spans = [(unit.start, unit.end) for unit in split_units(source, most=20_000)]
    for name in (
        "call",
        "check_call",
        "list2cmdline",
        "getstatusoutput",
        "getoutput",
        "_args_from_interpreter_flags",
    ):
        body = inspect.getsource(getattr(subprocess, name))
        if body.count("\n") <= 40:
            start = source.index(body)
            assert any(a <= start and start + len(body.rstrip()) <= b for a, b in spans), name


def test_rows_need_their_header() -> None:
    units = split_units("| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n")
    assert [unit.kind for unit in units] == ["row"] * 3 and [unit.needs for unit in units] == [(), (0,), (0,)]
    csv = "name,count,place\nx,1,here\ny,2,there\nz,3,nowhere\n"
    assert texts(csv) == csv.splitlines(keepends=True)


def test_elements_of_json() -> None:
    found = texts(json.dumps({"rows": [{"id": 1}, {"id": 2}], "total": 2}), most=20)
    assert found == ["{", '"rows": [', '{"id": 1},', ' {"id": 2}],', ' "total": 2}']
    assert len(texts('{"a": not json}')) == 1


def test_items_of_a_list_have_their_further_lines() -> None:
    assert texts("- one\n  and more\n- two\n") == ["- one\n  and more\n", "- two\n"]


def test_a_long_name_after_class_takes_no_long_time() -> None:
    began = time.perf_counter()
    assert split_units("class " + "a" * 200_000)
    assert time.perf_counter() - began < 2  # 8 s where each end of the name was tried
