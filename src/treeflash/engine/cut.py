"""Where a text ends within the tokens of a step: end tokens, limits, stop strings. Knows no engine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from treeflash.engine.engine import Request


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the text of a step's tokens ends, if it does."""

    tokens: list[int]  # delivered
    reason: Literal["stop", "length"] | None
    rows: int  # of the step, processed by the time plain decoding would have ended


def cut_text(fresh: list[int], request: "Request", room: int) -> Cut:
    """The tokens that plain decoding would have delivered, and why it would have ended there."""
    kept = fresh[:room]
    cut = Cut(kept, "length" if len(fresh) >= room else None, len(kept))
    for count, token in enumerate(kept):
        if token in request.stop_ids:
            # An end token is drawn from the row before it, which has therefore been processed.
            cut = Cut(kept[:count], "stop", count + 1)
            break
    if request.guide is not None:
        count = request.guide.accept(cut.tokens)
        cut = cut if count is None else Cut(cut.tokens[:count], "stop", count)
    count = request.cut(cut.tokens)
    return cut if count is None else Cut(cut.tokens[:count], "stop", count)


def guessed_rows(tokens: list[int], parents: list[int], rows: list[int], text: list[int]) -> list[int]:
    """Of a tree's rows those that were right: `rows`, accepted, behind which comes `text`, a token each."""
    if not rows:
        return []
    # Where the text ends nobody walks on, but a row that guessed its last token guessed right.
    children = (row for row, parent in enumerate(parents) if parent == rows[-1])
    return rows + [row for row in children if tokens[row] == text[-1]][:1]
