"""The drafter interface: who proposes the tree of the next step, and what it learns from the outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from bough.kernels.tree import MAX_ROWS
from bough.spec.shares import Shares
from bough.spec.tree import Tree
from bough.state.draft_ring import SavedRings
from bough.state.graphs import CapturedFunction


class Rank(Protocol):
    """Ranks logits [S, K, V] for positions [S, K] as the requests of slots [S] sample.

    Returns the best ids [S, K, count] and their log probabilities; anchors [S]: the tokens before.
    """

    def __call__(
        self, logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]: ...


class Constraint(Protocol):
    """Which tokens may follow: a grammar, a limit on reasoning. Works on token ids on the host."""

    def forced(self, limit: int) -> list[int]:
        """Return tokens that must follow, or almost certainly will."""
        ...

    def kept(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return the rows of a tree that are allowed, in order."""
        ...

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[np.ndarray | None]:
        """Return what may follow each row of a tree, a bit a token; None: any token."""
        ...

    def idle(self, rows: int) -> bool:
        """Return whether any token may follow each row of any tree with `rows` rows."""
        ...

    def accept(self, tokens: Sequence[int]) -> int | None:
        """Advance over sampled tokens; a number: that many of them complete the output."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence's part of a step that is being planned."""

    slot: int
    anchor: int  # its last token
    position: int  # of the anchor
    max_rows: int  # of its tree, the root included
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One verified tree: what was accepted of it, and what it cost."""

    rows: int  # of the tree
    path: list[int]  # accepted rows, the root first
    tokens: list[int]  # sampled: those of the accepted rows below the root, and the next one
    draft_s: float
    verify_s: float  # forward, sampling, acceptance and commit
    # Of these seconds that are its cost: the rest other processes had the CPU.
    draft_share: float = 1.0
    verify_share: float = 1.0

    @property
    def verify_cost(self) -> float:
        return self.verify_share * self.verify_s


class Drafter(Protocol):
    """Proposes for the sequences of the slots. Whatever it proposes, the text stays the target's."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads as features."""
        ...

    @property
    def context_length(self) -> int:
        """How many of the newest positions it needs features of."""
        ...

    def bind(self, rank: Rank) -> list[CapturedFunction]:
        """Set the sampler's ranking, once; return the functions that can be captured as CUDA graphs."""
        ...

    def begin(self, slot: int) -> None:
        """Start a new sequence."""
        ...

    def rehearse(self, slot: int) -> None:
        """Call the draft once, between requests, to see what that takes."""
        ...

    @property
    def commit_rows(self) -> int:
        """Rows of a path that `commit` adds, at most."""
        ...

    def append(self, slot: int, tokens: list[int], features: Tensor) -> None:
        """Add prompt tokens; features [n, taps * width] of the last n of them."""
        ...

    def read(self, slot: int, tokens: list[int]) -> None:
        """Add prompt tokens that a step processed, whose features `commit` has added."""
        ...

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Add the first counts [S] of each slot's accepted rows [S, n] of features [R, taps * width].

        Part of a captured step: no host/device synchronisation.
        """
        ...

    def commit_eager(self, slot: int, features: Tensor) -> None:
        """Add the features [n, taps * width] of an accepted path; may wait until a proposal needs them."""
        ...

    def rollback(self, slot: int, count: int) -> None:
        """Remove the last `count` rows of the last commit."""
        ...

    def propose(
        self, slot: int, anchor: int, position: int, max_rows: int, constraint: Constraint | None = None
    ) -> Tree:
        """Return a tree below `anchor`, the token at `position`, of at most `max_rows` rows with the root."""
        ...

    def plan_root(self, slot: int) -> bool:
        """Return whether the next tree is the root alone whatever this step accepts.

        If so that is decided: its forward may be launched before the read-back, and `propose` is then called
        with one row at most.
        """
        ...

    def observe(self, slot: int, outcome: StepOutcome) -> None:
        """Learn from a step of one sequence."""
        ...

    def ask(self, turns: Sequence[Turn]) -> None:
        """Launch the draft for those of several sequences where it pays; `share` then uses it."""
        ...

    def share(self, turns: Sequence[Turn], prompts: Sequence[int] = ()) -> list[Tree]:
        """Return a tree for each of several sequences, at most MAX_ROWS rows in all.

        Those that were not among the turns of the last `ask` get no draft. prompts: rows of each prompt that
        the step reads, too.
        """
        ...

    def observe_all(self, outcomes: Mapping[int, StepOutcome], prompts: Sequence[int] = ()) -> None:
        """Learn from a step of several sequences, by slot; each outcome has the times of the whole step."""
        ...

    def save(self, slot: int) -> SavedRings | None:
        """Return an immutable copy of its state of the sequence."""
        ...

    def restore(self, slot: int, tokens: Sequence[int], saved: SavedRings | None) -> None:
        """Continue the sequence just begun after `tokens`, where the state was saved."""
        ...

    def warnings(self, slot: int) -> list[str]:
        """Return what the user should know since the end of a slot's text, in sentences; slot -1: ever."""
        ...

    def examine(self, tokens: Sequence[int]) -> str | None:
        """Return what is wrong with a draft, by trying other settings of it on a text; None: nothing."""
        ...

    def shares(self, slot: int) -> Shares:
        """Return how many tokens of a slot's text were accepted of whom."""
        ...


class NoDrafter:
    """Plain decoding: proposes the root alone."""

    taps: tuple[int, ...] = ()
    context_length = 0
    commit_rows = MAX_ROWS

    def bind(self, rank: Rank) -> list[CapturedFunction]:
        return []

    def begin(self, slot: int) -> None: ...

    def rehearse(self, slot: int) -> None: ...

    def append(self, slot: int, tokens: list[int], features: Tensor) -> None: ...

    def read(self, slot: int, tokens: list[int]) -> None: ...

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None: ...

    def commit_eager(self, slot: int, features: Tensor) -> None: ...

    def rollback(self, slot: int, count: int) -> None: ...

    def propose(
        self, slot: int, anchor: int, position: int, max_rows: int, constraint: Constraint | None = None
    ) -> Tree:
        return Tree.root(anchor)

    def plan_root(self, slot: int) -> bool:
        return True

    def observe(self, slot: int, outcome: StepOutcome) -> None: ...

    def ask(self, turns: Sequence[Turn]) -> None: ...

    def share(self, turns: Sequence[Turn], prompts: Sequence[int] = ()) -> list[Tree]:
        return Tree.roots([turn.anchor for turn in turns])

    def observe_all(self, outcomes: Mapping[int, StepOutcome], prompts: Sequence[int] = ()) -> None: ...

    def save(self, slot: int) -> SavedRings | None:
        return None

    def restore(self, slot: int, tokens: Sequence[int], saved: SavedRings | None) -> None: ...

    def warnings(self, slot: int) -> list[str]:
        return []

    def examine(self, tokens: Sequence[int]) -> str | None:
        return None

    def shares(self, slot: int) -> Shares:
        return Shares()
