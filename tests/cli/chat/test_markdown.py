"""Markdown in rows: its rendering, that it fits, and that it does not depend on how the text is split."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from bough.cli.chat import markdown
from bough.cli.chat.stream import MarkdownStream, PlainStream

MARKS = ("**", "*", "_", "~~", "`", "```", "```python\n", "~~~\n", "# ", "## x\n", "---\n", "===\n", "\\")
BLOCKS = (
    "- ",
    "1. ",
    "2) ",
    "  ",
    "    ",
    "\t",
    "> ",
    "| a | b |\n",
    "|---|--:|\n",
    "[r]: http://z\n",
    "\n",
    "\n\n",
)
WORDS = (
    "a",
    "word ",
    "two words\n",
    "x = 1\n",
    "日本語",
    "👍🏽",
    "é",
    "<b>",
    "&amp;",
    "[x](http://y)",
    "![i](u)",
    "[",
    "](",
)
PIECES = st.sampled_from(MARKS + BLOCKS + WORDS)
SOURCES = st.lists(PIECES, max_size=40).map("".join)


def plain(rows: list[Text]) -> list[str]:
    return [row.plain for row in rows]


def streamed(source: str, borders: list[int], width: int = 30) -> list[str]:
    stream, rows = MarkdownStream(), []
    for start, end in zip([0, *borders], [*borders, len(source)], strict=True):
        stream.push(source[start:end])
        rows += stream.take(width)[0]
    return plain(rows + stream.take(width, final=True)[0])


def test_what_it_looks_like():
    source = """# Title
Some **bold** words and `code`, a [link](http://x.y) and <http://z.w>.
Next line.

1. one
1. two
   - nested
10. three

> quoted
> *words*

```python
def f():
    return 1
```

| left | right |
|---|---:|
| 日本 | 1 |
| x | 200 |

***
<b>tag</b> ![picture](a.png)"""
    wanted = """Title

Some bold words and code, a link (http://x.y) and http://z.w.
Next line.

1. one
2. two
   • nested
3. three

│ quoted
│ words

```python
def f():
    return 1
```

left  right
────  ─────
日本      1
x       200

────────────────────────────────────────

<b>tag</b> [image: picture]"""
    assert streamed(source, [], width=70) == wanted.split("\n")


def test_styles():
    (row,) = markdown.render("a **b** *c* `d`", 40)
    spans = {row.plain[span.start : span.end]: str(span.style) for span in row.spans}
    assert spans == {"b": "bold", "c": "italic", "d": "cyan"}
    assert str(markdown.render("# x", 40)[0].style) == "bold underline"
    assert (
        len(
            {
                str(span.style)
                for row in markdown.code("def f(): return 'x'\n", "python")
                for span in row.spans
            }
        )
        > 2
    )


@settings(max_examples=150, deadline=None)
@given(SOURCES, st.integers(12, 60))
@example("- - 1. 1. 1. ", 12)
@example("- - - > > text that is longer than a row", 12)
def test_rows_fit(source, width):
    assert all(cell_len(row.plain) <= width for row in markdown.render(source, width))
    assert all("\n" not in row.plain for row in markdown.render(source, width))


@settings(max_examples=200, deadline=None)
@given(SOURCES, st.lists(st.integers(0, 300), max_size=30))
@example("- a\n- b\n\n  c\n- d\n", [3, 5, 9])
@example("x\n#tag\n", [3])
@example("9. a\n9. b\n9. c\n\n1. d\n2. e\n", [6, 11, 12, 20, 22])
def test_final_rows_are_the_same_however_the_text_is_cut(source, cuts):
    borders = sorted(min(cut, len(source)) for cut in cuts)
    assert streamed(source, borders) == streamed(source, [])
    assert streamed(source, list(range(1, len(source)))) == streamed(source, [])


@settings(max_examples=100, deadline=None)
@given(st.text("ab  \n\t", max_size=80), st.lists(st.integers(0, 80)), st.integers(8, 20))
def test_plain_rows_are_the_same_however_the_text_is_cut(source, cuts, width):
    found = []
    for borders in ([], sorted(min(cut, len(source)) for cut in cuts)):
        stream, rows = PlainStream(""), []
        for start, end in zip([0, *borders], [*borders, len(source)], strict=True):
            stream.push(source[start:end])
            rows += stream.take(width)[0]
        found.append(plain(rows + stream.take(width, final=True)[0]))
    assert found[0] == found[1]
    assert all(cell_len(row) <= width for row in found[0])


@pytest.mark.parametrize(
    ("source", "live"),
    [
        ("some **bold wor", ["some bold wor"]),
        ("some *", ["some"]),
        ("see `na", ["see na"]),
        ("see [the docs](http://exam", ["see"]),
        ("2 ** 3 ** 4", ["2 ** 3 ** 4"]),
        ("x **", ["x"]),
        ("- a **b", ["• a b"]),
        ("```py", []),
        ("text\n\n```", ["text"]),
        ("```py\nx = 1\ny", ["y"]),
        ("```py\nx = 1\n``", []),
    ],
)
def test_unfinished_marks_are_not_shown(source, live):
    stream = MarkdownStream()
    stream.push(source)
    assert plain(stream.take(40)[1]) == live


def test_blocks_items_and_lines_of_code_become_final_one_by_one():
    stream = MarkdownStream()
    final = []
    for piece in ("one\n", "\n", "two\n\n- a\n", "- b\n", "- c", "\n\n```\nx\ny", "\n", "```\n", "end"):
        stream.push(piece)
        final.append(plain(stream.take(40)[0]))
    assert final[:5] == [[], [], ["one", "", "two"], ["", "• a"], []]
    assert final[5:] == [["• b", "• c", "", "```", "x"], ["y"], ["```"], []]
    assert plain(stream.take(40, final=True)[0]) == ["", "end"]


def test_long_code_is_coloured_line_by_line_and_not_broken():
    lines = [f"value_{number} = {number}  # {'long ' * 20}" for number in range(200)]
    stream, rows = MarkdownStream(), []
    for line in ["```python", *lines, "```"]:
        stream.push(f"{line}\n")
        rows += stream.take(40)[0]
    assert plain(rows) == ["```python", *lines, "```"]
    assert all(row.spans for row in rows[1:-1])
