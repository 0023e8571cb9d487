"""Walks a verified tree: which rows the target agrees with. Knows integers only."""

from dataclasses import dataclass

from treeflash.kernels.tree import reference


@dataclass(frozen=True, slots=True)
class Walk:
    rows: list[int]  # accepted rows from the root down
    next_token: int  # what the target says behind the last of them


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> Walk:
    """Follows the target's own choices from the root as long as the tree has them.

    chosen[i] is the token the target draws behind row i. The path depends on those draws alone, never on how
    the tree came about, so the text is the text of plain decoding.
    """
    rows = reference.walk(tokens, parents, chosen)
    return Walk(rows, chosen[rows[-1]])
