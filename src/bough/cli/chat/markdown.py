"""Markdown rendered as rows of styled text of a given width. Does no I/O."""

from collections.abc import Iterator
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

NARROWEST = 8  # columns that nested text keeps at least
DIM = "bright_black"
STYLES = {"strong": "bold", "em": "italic", "s": "strike", "link": "underline", "code_inline": "cyan"}
# Sixteen colours that every terminal's own palette defines, so that code is readable on any background.
CODE_THEME = "ansi_dark"
TABLE_GAP = 2


@cache
def parser() -> MarkdownIt:
    # Tags are shown as they are: hiding them would hide what the model wrote.
    markdown = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    # A definition could change rows that are already final.
    return markdown.disable("reference")


@cache
def _console() -> Console:
    """Return a console for wrapping, which uses nothing of the terminal."""
    return Console()


def parse(source: str) -> SyntaxTreeNode:
    return SyntaxTreeNode(parser().parse(source))


def render(source: str, width: int) -> list[Text]:
    return blocks(parse(source).children, width)


def blocks(nodes: list[SyntaxTreeNode], width: int, *, apart: bool = True) -> list[Text]:
    rows: list[Text] = []
    for node in nodes:
        if rows and apart:
            rows.append(Text())
        rows += block(node, max(width, NARROWEST))
    return rows


def block(node: SyntaxTreeNode, width: int) -> list[Text]:
    match node.type:
        case "heading":
            return wrap(_inline(node, "bold underline" if node.tag == "h1" else "bold"), width)
        case "bullet_list" | "ordered_list":
            return list(_list(node, width))
        case "blockquote":
            # Without room to indent, the text is not marked.
            bar = "│ " if width - 2 >= NARROWEST else ""
            return [Text.assemble((bar, DIM), row) for row in blocks(node.children, width - len(bar))]
        case "fence" | "code_block":
            return [
                folded for line in code(node.content, language(node.info)) for folded in fold(line, width)
            ]
        case "hr":
            return [Text("─" * min(width, 40), style=DIM)]
        case "table":
            return _table(node, width)
        case _:
            return wrap(_inline(node), width)


def wrap(text: Text, width: int) -> list[Text]:
    """Return rows broken between words, without trailing spaces."""
    rows = list(text.wrap(_console(), width)) if text.plain else []
    for row in rows:
        row.rstrip()
    return rows


def fold(line: Text, width: int) -> list[Text]:
    """Return the rows of one line of code, broken at the width; spaces are kept."""
    line.expand_tabs(4)
    cuts, used = [], 0
    for index, character in enumerate(line.plain):
        used += cell_len(character)
        if used > width:
            cuts.append(index)
            used = cell_len(character)
    return list(line.divide(cuts))


def code(source: str, name: str) -> list[Text]:
    """Return highlighted lines of code, not wrapped."""
    if not source:
        return []
    lines = source.removesuffix("\n").split("\n")
    if not name or name == "text":
        return [Text(line) for line in lines]
    syntax = Syntax("", name, theme=CODE_THEME, background_color="default")
    rows = list(syntax.highlight("\n".join(lines)).split("\n", allow_blank=True))[: len(lines)]
    # Lexers may drop white space; the exact text matters more than its colours.
    return [
        row if row.plain == line else Text(line)
        for row, line in zip([*rows, *[Text()] * (len(lines) - len(rows))], lines, strict=True)
    ]


def language(info: str) -> str:
    return info.split()[0] if info.split() else ""


def _list(node: SyntaxTreeNode, width: int) -> Iterator[Text]:
    for index, child in enumerate(node.children):
        yield from item(child, mark(node, index), width)


def mark(node: SyntaxTreeNode, index: int) -> str:
    return "• " if node.type == "bullet_list" else f"{start(node) + index}. "


def start(node: SyntaxTreeNode) -> int:
    return int(str(node.attrs.get("start", 1)))


def item(node: SyntaxTreeNode, before: str, width: int) -> Iterator[Text]:
    if width - len(before) < NARROWEST:
        # No room to indent: the mark goes above its text.
        yield from fold(Text(before.rstrip(), style=DIM), width)
        yield from blocks(node.children, width, apart=_is_loose(node))
        return
    # A tight list has no empty row between an item's text and a nested list.
    rows = blocks(node.children, width - len(before), apart=_is_loose(node)) or [Text()]
    yield Text.assemble((before, DIM), rows[0])
    for row in rows[1:]:
        yield Text.assemble(" " * len(before), row) if row.plain else row


def _is_loose(item: SyntaxTreeNode) -> bool:
    return any(child.type == "paragraph" and not child.hidden for child in item.children)


def _inline(node: SyntaxTreeNode, style: str = "") -> Text:
    text = Text(style=style)
    for child in node.children:
        _add(child, text, style="")
    if not node.children:
        text.append(node.content)
    return text


def _add(node: SyntaxTreeNode, text: Text, style: str) -> None:
    match node.type:
        case "softbreak" | "hardbreak":
            # Models write verses and lists of lines with single line ends.
            text.append("\n")
        case "text" | "text_special":
            text.append(node.content, style or None)
        case "code_inline":
            text.append(node.content, f"{style} {STYLES['code_inline']}".strip())
        case "image":
            text.append(f"[image: {node.content or node.attrs.get('src', '')}]", DIM)
        case kind:
            inner = f"{style} {STYLES.get(kind, '')}".strip()
            before = len(text)
            for child in node.children:
                _add(child, text, inner)
            target = str(node.attrs.get("href", "")) if kind == "link" else ""
            if target and text.plain[before:] not in (target, target.removeprefix("mailto:")):
                text.append(f" ({target})", DIM)


def _table(node: SyntaxTreeNode, width: int) -> list[Text]:
    table = [
        [_inline(cell, "bold" if cell.type == "th" else "") for cell in row.children]
        for part in node.children
        for row in part.children
    ]
    aligned = [str(cell.attrs.get("style", "")) for cell in node.children[0].children[0].children]
    widths = _widths([max(cell_len(row[i].plain) for row in table) for i in range(len(aligned))], width)
    rows: list[Text] = []
    for number, cells in enumerate(table):
        wrapped = [wrap(cell, room) for cell, room in zip(cells, widths, strict=True)]
        for line in range(max(1, *map(len, wrapped))):
            row = Text()
            for column, parts in enumerate(wrapped):
                part = parts[line] if line < len(parts) else Text()
                room = widths[column] - cell_len(part.plain)
                left = {"text-align:right": room, "text-align:center": room // 2}.get(aligned[column], 0)
                row.append(" " * left).append_text(part).append(" " * (room - left + TABLE_GAP))
            row.rstrip()
            rows.append(row)
        if number == 0:
            rule = (" " * TABLE_GAP).join("─" * each for each in widths)
            rows.append(Text(rule, style=DIM))
    return rows


def _widths(natural: list[int], width: int) -> list[int]:
    """Return columns as wide as their text; without room the widest are narrowed first."""
    widths = [max(1, each) for each in natural]
    room = max(width - TABLE_GAP * (len(widths) - 1), 3 * len(widths))
    while sum(widths) > room:
        widest = max(widths)
        widths[widths.index(widest)] -= 1
    return widths
