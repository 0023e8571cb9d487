"""What the engine reports of a request, as values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens processed so far; `cached` of them were there from an earlier request."""

    done: int
    total: int
    cached: int = 0
