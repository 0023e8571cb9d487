"""Text that is being generated, as final rows and rows that may still change. Does no I/O."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markdown_it.tree import SyntaxTreeNode
from rich.text import Text

from bough.cli.chat import markdown

CONTEXT = 60  # lines of code that are coloured together with a new one
LISTS = ("bullet_list", "ordered_list")
# Marks at the end of the text so far whose meaning depends on what follows.
UNDECIDED = re.compile(r"(?:[*_`~]+|!?\[[^\]\n]{0,80}(?:\](?:\([^)\s]*)?)?)\Z")
FENCE_BEGUN = re.compile(r"(?:^|\n) {0,3}(?:```|~~~)[^\n]*\Z")

Rows = list[Text]


class PlainStream:
    """Text in one style; every row but the last is final."""

    def __init__(self, style: str):
        self._style = style
        self._source = ""
        self._begun = False

    def push(self, text: str) -> None:
        text = text.replace("\t", "    ")
        self._source += text if self._begun else text.lstrip("\n")
        self._begun = self._begun or bool(self._source)

    def take(self, width: int, *, final: bool = False) -> tuple[Rows, Rows]:
        """Return the rows that became final since the last call, and those that are not."""
        source = self._source.rstrip() if final else self._source
        *lines, last = source.split("\n")
        settled = [row for line in lines for row in self._rows(line, width)]
        live = self._rows(last, width) if last else []
        self._source = "" if final else last
        if final:
            return settled + live, []
        if len(live) > 1:
            # The last row's text is the end of the line, except for spaces.
            self._source = last[last.rindex(live[-1].plain.lstrip()) :]
        return settled + live[:-1], live[-1:]

    def _rows(self, line: str, width: int) -> Rows:
        return markdown.wrap(Text(line, style=self._style), width) or [Text()]


@dataclass(frozen=True, slots=True)
class Element:
    """A block, or one item of a list."""

    node: SyntaxTreeNode
    mark: str = ""  # of an item
    joined: bool = False  # an item that is not its list's first

    @property
    def first_line(self) -> int:
        assert self.node.map is not None
        return self.node.map[0]

    @property
    def closed(self) -> bool:
        """Return whether a block of code has its end mark; other blocks are closed by the next one."""
        if self.node.type != "fence" or self.node.map is None:
            return False
        first, end = self.node.map
        return self.node.content.count("\n") == end - first - 2

    def rows(self, width: int) -> Rows:
        if self.mark:
            return list(markdown.item(self.node, self.mark, width))
        return markdown.block(self.node, width)


class MarkdownStream:
    """A block is final when the next one has begun; so is an item of a list, and a line of code."""

    def __init__(self) -> None:
        self._source = ""  # from the first element that is not final
        self._spaced = False  # an empty row is due before the next block
        self._items: int | None = None  # the source begins inside a list, after this many of its items
        self._number = 1  # of that list's first item
        self._written = 0  # rows of an open block of code that are final

    def push(self, text: str) -> None:
        self._source += text if self._source or self._spaced else text.lstrip("\n")

    def take(self, width: int, *, final: bool = False) -> tuple[Rows, Rows]:
        # The meaning of a line may change until it is complete: `#` and `#tag`, for example.
        end = len(self._source) if final else self._source.rfind("\n") + 1
        lines = re.findall(r"[^\n]*\n|[^\n]+", self._source[:end])
        elements = self._elements(self._source[:end], lines)
        final_count = (
            len(elements) if final or (elements and elements[-1].closed) else max(0, len(elements) - 1)
        )
        settled: Rows = []
        for element in elements[:final_count]:
            settled += self._finished(element, width)
        rest = elements[final_count] if final_count < len(elements) else None
        self._go_on(rest, lines)
        if final:
            return settled, []
        if rest is not None and rest.node.type == "fence":
            rows = self._code(rest.node)
            settled += [] if self._written else self._gap()
            settled += rows[self._written :]
            self._written = len(rows)
            return settled, self._open_line(rest.node, width)
        return settled, self._live(width)

    def _elements(self, source: str, lines: Sequence[str]) -> list[Element]:
        elements: list[Element] = []
        for index, node in enumerate(markdown.parse(source).children):
            # Each item is parsed alone later: one that is indented deeper would become code.
            if node.type not in LISTS or any(_indent(lines, child) > 3 for child in node.children):
                elements.append(Element(node))
                continue
            before = self._items if index == 0 else None
            for item, child in enumerate(node.children):
                number = item if before is None else before + item + self._number - markdown.start(node)
                elements.append(
                    Element(child, markdown.mark(node, number), joined=item > 0 or before is not None)
                )
        return elements

    def _go_on(self, rest: Element | None, lines: Sequence[str]) -> None:
        """Drop the source of final elements, and record which list the rest belongs to."""
        cut = len(lines) if rest is None else rest.first_line
        self._source = self._source[sum(map(len, lines[:cut])) :]
        if rest is None or not rest.joined:
            self._items = None
            return
        parent = rest.node.parent
        assert parent is not None
        assert parent.map is not None
        if self._items is None or "".join(lines[: parent.map[0]]).strip():
            self._items, self._number = 0, markdown.start(parent)
        self._items += parent.children.index(rest.node)

    def _finished(self, element: Element, width: int) -> Rows:
        """Return the rows of a complete element that were not final before."""
        if element.node.type == "fence":
            gap = [] if self._written else self._gap()
            rows = [*self._code(element.node), Text(element.node.markup, style=markdown.DIM)]
            rows = gap + rows[self._written :]
            self._written = 0
        else:
            rows = ([] if element.joined else self._gap()) + element.rows(width)
        self._spaced = True
        return rows

    def _gap(self) -> Rows:
        return [Text()] if self._spaced else []

    def _code(self, node: SyntaxTreeNode) -> Rows:
        """Return the opening mark and the lines, not indented or wrapped, so that they can be copied."""
        lines = node.content.split("\n")[:-1]
        before = min(max(0, self._written - 1 - CONTEXT), len(lines))
        rows = markdown.code("".join(f"{line}\n" for line in lines[before:]), markdown.language(node.info))
        head = Text(f"{node.markup}{node.info}", style=markdown.DIM)
        return [head, *(Text() for _ in range(before)), *rows]

    def _open_line(self, node: SyntaxTreeNode, width: int) -> Rows:
        """Return the rows of the incomplete line of code, unless it may become the end mark."""
        partial = self._source.rpartition("\n")[2]
        return markdown.fold(Text(partial), width) if partial.strip(f"{node.markup[0]} ") else []

    def _live(self, width: int) -> Rows:
        source = _completed(self._source)
        rows: Rows = []
        spaced = self._spaced
        for element in self._elements(source, source.split("\n")):
            if spaced and not element.joined:
                rows.append(Text())
            rows += element.rows(width)
            spaced = True
        # An empty row alone would only make the last line jump.
        return rows if any(row.plain for row in rows) else []


def _indent(lines: Sequence[str], node: SyntaxTreeNode) -> int:
    assert node.map is not None
    line = lines[node.map[0]]
    return len(line) - len(line.lstrip(" \t"))


def _completed(source: str) -> str:
    """Return the source with the open marks of its last line closed, so that the text does not jump."""
    if source.endswith("\n"):
        return source
    if begun := FENCE_BEGUN.search(source):
        return source[: begun.start()]
    source = UNDECIDED.sub("", source)
    last = re.sub(r"\\.", "  ", source.rpartition("\n")[2])
    if last.count("`") % 2:
        return f"{source}`"
    last = re.sub(r"`[^`]*`", "x", last)
    for mark in ("**", "~~"):
        if _open(last, mark):
            source = f"{source.rstrip()}{mark}"
    return source


def _open(line: str, mark: str) -> bool:
    """Return whether the last of the marks in a line is not closed."""
    waiting = False
    for match in re.finditer(re.escape(mark), line):
        before, after = line[: match.start()][-1:], line[match.end() :][:1]
        waiting = not before.strip() if waiting else bool(after.strip()) and not before.isalnum()
    return waiting
