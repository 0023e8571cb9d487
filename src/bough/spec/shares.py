"""How many tokens were accepted of whom."""

from dataclasses import dataclass


@dataclass(slots=True)
class Shares:
    """Tokens accepted beyond each step's own, by proposer."""

    draft: int = 0
    lookup: int = 0
