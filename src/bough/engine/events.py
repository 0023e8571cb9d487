"""What the engine reports of a sequence."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from bough.engine.sampler import TokenLogprob
    from bough.engine.stats import RequestStats

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens processed so far, of a chunk in parts as many as its layers stand for.

    `cached` of them came from the prefix cache; `whole`: those of whole chunks.
    """

    done: int
    total: int
    cached: int = 0
    whole: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens, in order; end tokens are not among them."""

    ids: list[int]
    logprobs: list["TokenLogprob"] | None = None  # one for each, if requested


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """One step's tree and the path that was committed of it."""

    tokens: list[int]
    parents: list[int]
    path: list[int]  # committed rows, the root first
    sampled: list[int]  # the target's token after each of them
    draft_s: float
    step_s: float  # the draft included

    @property
    def accepted(self) -> list[int]:
        """The path, and the row that guessed its last sampled token, if any.

        Where the text ends nothing below that row was verified, but it was a right guess.
        """
        if not self.path:
            return []
        children = (row for row, parent in enumerate(self.parents) if parent == self.path[-1])
        return self.path + [row for row in children if self.tokens[row] == self.sampled[-1]][:1]

    def cut(self, rows: int) -> Self:
        """Return the tree with only the first `rows` rows of its path."""
        return replace(self, path=self.path[:rows], sampled=self.sampled[:rows])


@dataclass(frozen=True, slots=True)
class Done:
    reason: FinishReason
    stats: "RequestStats"


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a sequence by an error of its own; others go on."""

    error: Exception


Event = Progress | Tokens | VerifiedTree | Done | Failed
