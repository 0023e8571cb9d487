"""The drafter interface: who proposes the tree of the next step, and what it learns from the outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from bough.kernels.tree import MAX_ROWS
from bough.spec.tree import SharedTrees, Tree
from bough.state.draft_ring import SavedRings
from bough.state.graphs import CapturedFunction


class Rank(Protocol):
    """Ranks logits [S, K, V] for positions [S, K] as the requests of slots [S] sample.

    Returns the best ids [S, K, count] and their log probabilities; anchors [S]: the tokens before.
    """

    def __call__(
        self, logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]: ...

    def perturb(self, change: Tensor, slots: Tensor) -> Tensor:
        """Return what another logit changes in a score: change [S, ...], new logits less those ranked."""


class Constraint(Protocol):
    """Which tokens may follow: a grammar, a limit on reasoning. Works on token ids on the host."""

    def forced(self, limit: int) -> list[int]:
        """Return tokens that must follow, or almost certainly will."""

    def kept(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return the rows of a tree that are allowed, in order."""

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[np.ndarray | None]:
        """Return what may follow each row of a tree, a bit a token; None: any token."""

    def idle(self, rows: int) -> bool:
        """Return whether any token may follow each row of any tree with `rows` rows."""

    def accept(self, tokens: Sequence[int]) -> int | None:
        """Advance over sampled tokens; a number: that many of them complete the output."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence's part of a step that is being planned."""

    slot: int
    text: Sequence[int]  # its tokens, from the prompt's first to the last one
    max_rows: int  # of its tree, the root included
    constraint: Constraint | None = None
    shown: bool = False  # its tree is read on the host, too

    @property
    def anchor(self) -> int:
        return self.text[-1]

    @property
    def position(self) -> int:
        """Of the anchor."""
        return len(self.text) - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt that a step reads beside the trees of others."""

    slot: int
    tokens: list[int]


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


@dataclass(frozen=True, slots=True)
class Features:
    """What of the target's hidden states a drafter reads, of the committed positions."""

    taps: tuple[int, ...] = ()  # target layers whose outputs they are
    context_length: int = 0  # how many of the newest positions are needed
    commit_rows: int = MAX_ROWS  # rows of a path that `commit` adds, at most


@dataclass(frozen=True, slots=True)
class HostPath:
    """One sequence's accepted path, known on the host."""

    slot: int
    rows: list[int] | None  # of the step's features; None: all of them
    tokens: list[int]  # that the rows decided


@dataclass(frozen=True, slots=True)
class DevicePaths:
    """The accepted paths of a captured step, in static buffers."""

    slots: Tensor  # [S]
    rows: Tensor  # [S, n] of the step's features, of which the first counts [S] are meant
    counts: Tensor
    tokens: Tensor  # [S, n] that the rows decided


@dataclass(slots=True)
class Shares:
    """Tokens accepted beyond each step's own, by proposer."""

    draft: int = 0
    lookup: int = 0


@dataclass(frozen=True, slots=True)
class Notes:
    """What a drafter has to say at a text's end."""

    warnings: list[str] = field(default_factory=list)  # what the user should know, in sentences
    shares: Shares = field(default_factory=Shares)  # tokens that were accepted of whom


_ALWAYS = 1 << 20  # steps


class Drafter:
    """Proposes for the sequences of the slots. Whatever it proposes, the text stays the target's.

    As it stands it proposes nothing: plain decoding.
    """

    features: Features = Features()
    passes: float = 0.0  # forward passes of the draft call that is measured; 0: there is no draft

    def bind(self, rank: Rank) -> list[CapturedFunction]:
        """Set the sampler's ranking, once; return the draft calls that can be captured as CUDA graphs."""
        return []

    def open(self, slot: int, tokens: Sequence[int] = (), saved: SavedRings | None = None) -> None:
        """Start a sequence; it may continue after `tokens`, where its state was saved."""

    def prefill(self, slot: int, tokens: list[int], features: Tensor | None) -> None:
        """Add prompt tokens; features [n, taps * width] of the last n of them; None: `commit` added them."""

    def plain_steps(self, turns: Sequence[Turn]) -> int:
        """Return for how many steps of these sequences the trees are roots alone, whatever is accepted.

        So many are then decided. On a host they are neither drafted nor observed: a later turn has their
        tokens. On a device the step before is not read back yet, and the next turns have one row at most.
        """
        return _ALWAYS

    def draft(self, turns: Sequence[Turn], prompts: Sequence[Piece] = ()) -> None:
        """Plan the next step of some sequences and launch the draft for those where it pays.

        prompts: what the step reads of prompts, too.
        """

    def trees(self, turns: Sequence[Turn], prompts: Sequence[Piece] = ()) -> list[Tree] | SharedTrees:
        """Return a tree for each sequence of the step, at most MAX_ROWS rows in all with those of prompts.

        Those that were not among the turns of the last `draft` get no draft. The tree of one sequence alone
        may lie on the device. Where several share their rows there, the prompts' are among them.
        """
        return Tree.roots([turn.anchor for turn in turns])

    def commit(self, features: Tensor, paths: Sequence[HostPath] | DevicePaths) -> None:
        """Add the accepted rows of features [R, taps * width].

        On the device it is part of a captured step, without host/device synchronisation; from the host it
        may wait until a draft call needs them.
        """

    def observe(self, outcomes: Mapping[int, StepOutcome], prompts: Sequence[int] = ()) -> None:
        """Learn from a step, by slot; each outcome has the times of the whole step."""

    def rollback(self, slot: int, count: int) -> None:
        """Remove the last `count` rows of the last commit."""

    def save(self, slot: int) -> SavedRings | None:
        """Return an immutable copy of its state of the sequence."""
        return None

    def examine(self, tokens: Sequence[int]) -> str | None:
        """Return what is wrong with a draft, by trying other settings of it on a text; None: nothing."""
        return None

    def notes(self, slot: int, text: Sequence[int] = ()) -> Notes:
        """Return what is to be said at the end of a slot's text; slot -1: of all."""
        return Notes()


class NoDrafter(Drafter):
    """Plain decoding."""
