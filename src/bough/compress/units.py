"""Units: the spans of a text that are kept or left out whole.

Sentences of prose, lines of lists and logs, statements and functions of code, rows of tables, elements of
JSON. The units of a text cover all of it, in order.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["sentence", "line", "block", "row", "element"]

MAX_LINES = 40  # of a function or another block that is kept whole
PARAGRAPH = 10  # lines; a shorter one of a divided function, up to a blank line, stays together
MAX_DEPTH = 20  # of blocks within blocks that are divided
MAX_SENTENCE = 600  # characters; a longer one that has several lines is split into them

LINE = re.compile(r"[^\n]*\n|[^\n]+")
FENCE = re.compile(r"\s*(```|~~~)")
# A sentence ends here: the space before the next one is its own, as tokens have it.
SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*(?=\s+["'“‘(\[*_`]*[A-Z0-9À-Þ])|[。！？](?=\S)""")
BREAK = re.compile(r"[ \t]*+\n(?:[ \t]*+\n)*+")  # a line's end and blank lines after it
ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|cf|vs|etc|al|Mr|Mrs|Ms|Dr|Prof|St|Fig|Eq|No|Nr|pp?)|\b[A-Z])\.$"
)
ITEM = re.compile(r"""\s*(?:[-*+•]\s|\d+[.)]\s|\[?\d{2,4}[-:/]\d|#{1,6}\s|>|[{\["]|[\w.-]+\s*[:=]\s*\S|\|)""")
CODE = re.compile(
    r"""\s*(?:(?:async\s+)?def\s|class\s|import\s|from\s+\S+\s+import\b|return\b|(?:if|elif|for|while|with)\b.*:\s*(?:\#.*)?$
    |(?:else|try|finally)\s*[:{]|except\b|@\w|\#include|(?:public|private|protected|static|func|fn|let|const|var|package
    |use|struct|enum|impl|export|function|interface|type|raise|yield|assert|del|pass|break|continue)\b
    |//|/\*|\*/?\s|\#\s|[}\])]|\"\"\"|''')
    |\s*+[\w.\[\]"']++(?:\s*+:\s*+[\w\[\], |."]++)?+\s*+[-+*/|&]?=\s*\S|\s*+[\w.]++\(.*\)\s*$""",
    re.VERBOSE,
)
CODE_ENDS = tuple(";{}([,")
DEFINITION = re.compile(r"\s*(?:(?:async\s+)?def\s+\w+\(|class\s+\w++.*:\s*$|@\w+|#include\b)")
CONTINUES = re.compile(r"\s*(?:[)\]}]|else\b|elif\b|except\b|finally\b|catch\b|end\b)")
ATTACHED = re.compile(r"\s*(?:@|#(?!include)|//|/\*|\*|export\s*$|template\s*<)")
RULE = re.compile(r"\s*+\|?\s*+:?-{2,}+:?\s*+(?:\|\s*+:?-{2,}+:?\s*+)++\|?\s*+$")
JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]')


@dataclass(frozen=True, slots=True)
class Unit:
    start: int
    end: int
    kind: Kind
    needs: tuple[int, ...] = ()  # units without which this one says little: a table's header, a `def` line


@dataclass(slots=True)
class _Line:
    start: int
    end: int
    text: str
    blank: bool
    indent: int

    @classmethod
    def of(cls, match: re.Match[str]) -> "_Line":
        text = match[0]
        rest = text.lstrip()
        indent = len(text[: len(text) - len(rest)].expandtabs(4)) if len(rest) < len(text) else 0
        return cls(*match.span(), text, not rest, indent)

    def is_code(self) -> bool:
        return self.text.rstrip().endswith(CODE_ENDS) or CODE.match(self.text) is not None


def split_units(text: str, most: int = 4000) -> list[Unit]:
    """Return the units of a text; a function or element of more than `most` characters is divided."""
    if not text:
        return []
    out: list[Unit] = []
    if not _json(text, most, out):
        lines = [_Line.of(match) for match in LINE.finditer(text)]
        for kind, block in _blocks(lines):
            _SPLITTERS[kind](text, block, most, out)
    return out


def _blocks(lines: list[_Line]) -> Iterator[tuple[str, list[_Line]]]:
    """Yield runs of lines with what they hold; blank lines end a block of prose and belong to it."""
    block: list[_Line] = []
    kind = ""
    for paragraph, part in _paragraphs(lines):
        if paragraph == kind == "code":
            block += part
            continue
        if block:
            yield kind, block
        kind, block = paragraph, part
    if block:
        yield kind, block


def _paragraphs(lines: list[_Line]) -> Iterator[tuple[str, list[_Line]]]:
    block: list[_Line] = []
    before, fenced = "", False
    fences = [FENCE.match(line.text) is not None for line in lines]
    for index, (line, fence) in enumerate(zip(lines, fences, strict=True)):
        block.append(line)
        if fence:
            fenced = not fenced
        following = lines[index + 1] if index + 1 < len(lines) else None
        ends = following is None or (line.blank and not following.blank) or (fence and not fenced)
        ends |= following is not None and not fenced and not fence and fences[index + 1]
        if ends and not (fenced and following is not None):
            before = _kind_of(block, before)
            yield before, block
            block = []


def _kind_of(block: list[_Line], before: str) -> str:
    lines = [line for line in block if not line.blank]
    if not lines:
        return before or "prose"
    if FENCE.match(lines[0].text):
        return "code"
    if _is_table(lines):
        return "table"
    indented = all(line.indent >= 2 for line in lines)
    if before == "code" and indented:
        return "code"
    if DEFINITION.match(lines[0].text):
        return "code"
    hits = sum(line.is_code() for line in lines)
    return "code" if hits >= 0.6 * len(lines) and not _is_markdown(lines) else "prose"


def _is_markdown(lines: list[_Line]) -> bool:
    return all(re.match(r"#{1,6} \S|[-*+] ", line.text) for line in lines)


def _is_table(lines: list[_Line]) -> bool:
    if len(lines) > 2 and RULE.match(lines[1].text):
        return True
    for separator in ("\t", "|", ";", ",") if len(lines) >= 4 else ():
        count = lines[0].text.count(separator)
        if count >= 2 and all(line.text.count(separator) == count for line in lines):
            # Code and prose have commas, too, but hardly the same number in every line, none at its end.
            return not any(line.text.rstrip().endswith((",", "{", "(", ":")) for line in lines)
    return False


def _table(text: str, lines: list[_Line], most: int, out: list[Unit]) -> None:
    head = 2 if len(lines) > 1 and RULE.match(lines[1].text) else 1
    header = len(out)
    out.append(Unit(lines[0].start, lines[head - 1].end, "row"))
    for line in lines[head:]:
        if line.blank:
            out[-1] = Unit(out[-1].start, line.end, out[-1].kind, out[-1].needs)
        else:
            out.append(Unit(line.start, line.end, "row", (header,)))


def _prose(text: str, lines: list[_Line], most: int, out: list[Unit]) -> None:
    """Lists and logs by line, other prose by sentence; a sentence may go on in the next line."""
    filled = [line for line in lines if not line.blank]
    items = sum(ITEM.match(line.text) is not None for line in filled)
    if len(filled) > 1 and items >= 0.5 * len(filled):
        for group in _items(lines):
            _add(out, group[0].start, group[-1].end, "line")
        return
    start, end = lines[0].start, lines[-1].end
    for stop in _sentence_ends(text, start, end):
        if stop - start > MAX_SENTENCE and "\n" in text[start : stop - 1]:
            for line in LINE.finditer(text, start, stop):
                _add(out, line.start(), line.end(), "line")
        else:
            _add(out, start, stop, "sentence")
        start = stop


def _items(lines: list[_Line]) -> Iterator[list[_Line]]:
    """Yield each item of a list with the lines that continue it."""
    group: list[_Line] = []
    for line in lines:
        continues = line.blank or (ITEM.match(line.text) is None and line.indent > 0)
        if group and not continues:
            yield group
            group = []
        group.append(line)
    yield group


def _sentence_ends(text: str, start: int, end: int) -> Iterator[int]:
    for match in SENTENCE_END.finditer(text, start, end):
        stop = match.end()
        if ABBREVIATION.search(text, max(start, stop - 8), stop):
            continue
        # A line break belongs to the sentence before it.
        newline = BREAK.match(text, stop, end)
        stop = newline.end() if newline else stop
        if stop < end:
            yield stop
    yield end


def _code(text: str, lines: list[_Line], most: int, out: list[Unit]) -> None:
    """Add statements, each with what is indented below it; long ones as their head and their parts."""
    _statements(lines, most, out, ())


def _statements(lines: list[_Line], most: int, out: list[Unit], needs: tuple[int, ...]) -> None:
    for group in _groups(lines) if not needs else _joined(_groups(lines), most):
        start, end = group[0].start, group[-1].end
        whole = (len(group) <= MAX_LINES and end - start <= most) or len(needs) > MAX_DEPTH
        head = 0 if whole else _head(group)
        if whole or head >= len(group):
            _add(out, start, end, "block", needs)
            continue
        _add(out, start, group[head - 1].end, "block", needs)
        _statements(group[head:], most, out, (*needs, len(out) - 1))


def _joined(groups: Iterable[list[_Line]], most: int) -> Iterator[list[_Line]]:
    """Yield short paragraphs whole, and the statements of longer ones."""
    held: list[list[_Line]] = []
    for group in (*groups, []):
        if held and (not group or held[-1][-1].blank):
            lines = [line for part in held for line in part]
            short = len(lines) <= PARAGRAPH and lines[-1].end - lines[0].start <= most
            yield from [lines] if short else held
            held = []
        held.append(group)


def _groups(lines: list[_Line]) -> Iterator[list[_Line]]:
    """Yield the statements of the lowest indent, with decorators and comments directly above them."""
    filled = [line for line in lines if not line.blank]
    base = min((line.indent for line in filled), default=0)
    group: list[_Line] = []
    attached, fenced = False, False
    for line in lines:
        begins = not line.blank and line.indent <= base and not CONTINUES.match(line.text) and not attached
        if group and begins and not fenced:
            yield group
            group = []
        group.append(line)
        attached = not line.blank and line.indent <= base and ATTACHED.match(line.text) is not None
        # A docstring may have lines without indent.
        fenced ^= (line.text.count('"""') + line.text.count("'''")) % 2 == 1
    if group:
        yield group


def _head(group: list[_Line]) -> int:
    """Return how many lines a long block's head has: decorators, the signature and the docstring."""
    count = 0
    while count < len(group) and (group[count].blank or ATTACHED.match(group[count].text)):
        count += 1
    while count < len(group) and not re.search(r"[:{]\s*(?:#.*|//.*)?$", group[count].text):
        count += 1
        if count > 10:  # not a definition
            return 1
    count += 1
    if count < len(group) and (quote := re.match(r"""\s*[rR]?("{3}|'{3})""", group[count].text)):
        first = group[count].text.split(quote[1], 1)[1]
        if quote[1] not in first:
            count += 1
            while count < len(group) and quote[1] not in group[count].text:
                count += 1
        count += 1
    return min(count, len(group)) if count - 1 <= MAX_LINES else 1


def _json(text: str, most: int, out: list[Unit]) -> bool:
    """Add the elements of a text that is one JSON value; return whether it is."""
    if text.lstrip()[:1] not in ("[", "{"):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    tokens = [(match.start(), match[0]) for match in JSON_TOKEN.finditer(text) if match[0][0] != '"']
    _elements(text, 0, len(text), tokens, most, out, ())
    return True


def _elements(
    text: str,
    start: int,
    end: int,
    tokens: list[tuple[int, str]],
    most: int,
    out: list[Unit],
    needs: tuple[int, ...],
) -> None:
    """Add the elements of the first container in the span; those that are too long in the same way."""
    first = next((i for i, (at, token) in enumerate(tokens) if at >= start and token in "[{"), None)
    if first is None or tokens[first][0] >= end or len(needs) > MAX_DEPTH:
        _add(out, start, end, "element", needs)
        return
    depth, cut = 0, tokens[first][0] + 1
    begin = first + 1
    _add(out, start, cut, "element", needs)
    inner = (*needs, len(out) - 1)
    for index in range(first, len(tokens)):
        at, token = tokens[index]
        depth += (token in "[{") - (token in "]}")
        if depth == 0 or (depth == 1 and token == ","):
            stop = end if depth == 0 else at + 1
            if stop - cut > most and index > begin:
                _elements(text, cut, stop, tokens[begin:index], most, out, inner)
            elif stop > cut:
                _add(out, cut, stop, "element", inner)
            cut, begin = stop, index + 1
        if depth == 0:
            return


def _add(out: list[Unit], start: int, end: int, kind: Kind, needs: tuple[int, ...] = ()) -> None:
    if end > start:
        out.append(Unit(start, end, kind, needs))


_SPLITTERS = {"code": _code, "table": _table, "prose": _prose}
