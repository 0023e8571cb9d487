"""Pipeline: one decode step of the sequences that can, and what of the next one is launched ahead of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bough.engine.delivery import token_events
from bough.engine.events import Event, VerifiedTree
from bough.engine.paging import Paging
from bough.engine.parts import Parts
from bough.engine.prompts import PromptPiece, PromptReader
from bough.engine.runner import Accepted, Forward, Masks, StepTimes, Verify
from bough.engine.sequence import LaunchAhead, Launched, OwnConstraint, Phase, Sequence
from bough.engine.stats import StepRecord
from bough.spec.drafter import StepOutcome, Turn
from bough.spec.tree import Tree


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: the tree of each sequence, pieces of prompts, and the forward over all of them."""

    trees: list[tuple[Sequence, Tree]]
    pieces: list[PromptPiece]
    forward: Forward

    @property
    def alone(self) -> bool:
        """Whether it is the step of one sequence."""
        return len(self.trees) == 1 and not self.pieces


class Pipeline:
    def __init__(self, parts: Parts, prompts: PromptReader, paging: Paging):
        self._states, self._runner, self._drafter = parts.states, parts.runner, parts.drafter
        self._scheduler, self._prompts, self._paging = parts.scheduler, prompts, paging
        self._max_rows, self._working = parts.max_rows, parts.working
        self._drafted: list[Sequence] = []  # whose next draft is launched already

    def step(self, sequences: list[Sequence], readers: list[Sequence]) -> list[tuple[Sequence, Event]]:
        """Run one step: the sequences' trees and the readers' prompts share one forward pass.

        It may have been launched before, and what may be of the next one is launched ahead.
        """
        batch = self._batch(sequences, self._prompts.pieces(readers, len(sequences)) if readers else [])
        if batch is None:
            return []
        self._runner.accept(batch.forward, [self._masks(*pair) for pair in batch.trees])
        ahead = self._ahead(batch)
        next_forward = self._verify_ahead(*batch.trees[0]) if ahead == "forward" else None
        accepted, times = self._runner.read_back()
        outcomes = [
            self._outcome(sequence, tree, found, times)
            for (sequence, tree), found in zip(batch.trees, accepted, strict=False)
        ]
        by_slot = {pair[0].slot: outcome for pair, outcome in zip(batch.trees, outcomes, strict=True)}
        self._drafter.observe(by_slot, [len(piece.tokens) for piece in batch.pieces])
        delivered = [
            self._deliver(sequence, outcome)
            for (sequence, _), outcome in zip(batch.trees, outcomes, strict=True)
        ]
        self._launch(batch, ahead, next_forward)
        # While the device works on.
        events: list[tuple[Sequence, Event]] = []
        for index, (pair, outcome, tokens) in enumerate(zip(batch.trees, outcomes, delivered, strict=True)):
            logits = partial(batch.forward.logits_of, index)
            events += tagged(pair[0], self._step_events(*pair, outcome, tokens, logits))
        for index, piece in enumerate(batch.pieces, len(outcomes)):
            logits = batch.forward.logits_of(index)
            events += tagged(piece.sequence, self._prompts.piece_read(piece, logits))
        return events

    def rollback(self, sequence: Sequence, rows: int) -> None:
        """Remove the last rows of the last commit: plain decoding would not have processed them.

        Happens only where a sequence ends inside a step's tokens.
        """
        if rows:
            assert not sequence.in_flight, f"{rows} rows to roll back, but the next forward is in flight"
            self._states.rollback(sequence.slot, rows)
            self._drafter.rollback(sequence.slot, rows)

    @torch.inference_mode()
    def probe(self, sequence: Sequence, tree: Tree, *, draft: bool = True) -> StepTimes:
        """Run one decode step that verifies `tree` and commits its root alone, and return its times.

        For benchmarks of a step's size. The draft runs as usual unless `draft` is off; its tree is discarded.
        """
        assert sequence.phase is Phase.DECODE and sequence.launched is None
        if draft:
            self._draft([self._turn(sequence, self._row_limit(sequence))])
        forward = self._verify(sequence, tree, max_accepted=1)
        self._runner.accept(forward)
        [accepted], times = self._runner.read_back()
        self._states.lengths[sequence.slot] += len(accepted.path)
        sequence.tokens += accepted.tokens
        return times

    def _batch(self, sequences: list[Sequence], pieces: list[PromptPiece]) -> Batch | None:
        """Return the step's trees and its forward; None: there are no pages for any of them."""
        alone = len(sequences) == 1 and not pieces
        drafted, self._drafted = self._drafted, []
        launched, sequences[0].launched = sequences[0].launched, None
        if alone and launched is not None:
            return Batch([(sequences[0], launched.tree)], [], launched.forward)
        most = self._runner.tree_rows(len(sequences) + len(pieces))
        turns = [self._turn(sequence, min(self._row_limit(sequence), most)) for sequence in sequences]
        prompts = [len(piece.tokens) for piece in pieces]
        # A draft for one sequence stays on the device, and is of use for a step of it alone.
        if not (drafted == sequences if alone else len(drafted) > 1):
            self._draft(turns, prompts)
        trees = list(zip(sequences, self._drafter.trees(turns, prompts), strict=True))
        trees = [pair for pair in trees if self._provide(pair[0], pair[1].size)]
        pieces = [piece for piece in pieces if self._provide(piece.sequence, len(piece.tokens))]
        if self._scheduler.parked:  # perhaps for the sake of others
            trees = [pair for pair in trees if pair[0].parked is None]
            pieces = [piece for piece in pieces if piece.sequence.parked is None]
        if not trees:
            return None  # the readers go on alone
        if not alone:
            self._working[:] = [pair[0] for pair in trees] + [piece.sequence for piece in pieces]
        parts = [Verify(sequence.slot, tree, sequence.room) for sequence, tree in trees]
        forward = self._runner.verify(parts + [piece.part for piece in pieces])
        return Batch(trees, pieces, forward)

    def _provide(self, sequence: Sequence, rows: int) -> bool:
        return self._paging.provide(sequence, self._runner.step_rows(rows))

    def _turn(self, sequence: Sequence, max_rows: int) -> Turn:
        slot = sequence.slot
        return Turn(slot, sequence.anchor, self._states.lengths[slot], max_rows, self._constraint(sequence))

    def _draft(self, turns: list[Turn], prompts: list[int] | None = None) -> None:
        self._runner.draft(lambda: self._drafter.draft(turns, prompts or ()))

    def _ahead(self, batch: Batch) -> LaunchAhead:
        """Return what of the next step may be launched before this one's events are returned."""
        if not batch.alone:
            return "draft" if self._runner.asynchronous else "nothing"
        sequence = batch.trees[0][0]
        # A constraint reads proposals on the host.
        waits = self._scheduler.contended or self._constraint(sequence) is not None
        return "nothing" if waits else sequence.launch_ahead

    def _launch(self, batch: Batch, ahead: LaunchAhead, forward: Forward | None) -> None:
        """Launch the next step's draft, and its forward where the caller may not stop here."""
        sequences = [sequence for sequence, _ in batch.trees if not sequence.finished]
        if ahead == "nothing" or len(sequences) < (1 if batch.alone else 2):
            return
        most = 1 if forward is not None else self._runner.tree_rows(len(sequences))
        turns = [self._turn(sequence, min(self._row_limit(sequence), most)) for sequence in sequences]
        self._draft(turns)
        if ahead == "draft":
            self._drafted = sequences
            return
        [sequence], [tree] = sequences, self._drafter.trees(turns)
        if forward is None:
            forward = self._verify(sequence, tree, max_accepted=sequence.room)
        sequence.launched = Launched(tree, forward)

    def _outcome(self, sequence: Sequence, tree: Tree, accepted: Accepted, times: StepTimes) -> StepOutcome:
        self._states.lengths[sequence.slot] += len(accepted.path)
        seconds = (times.draft_s, times.verify_s, *times.cpu_shares)
        return StepOutcome(tree.size, accepted.path, accepted.tokens, *seconds)

    def _row_limit(self, sequence: Sequence) -> int:
        budget = sequence.request.draft_budget
        rows = self._max_rows if budget is None else min(self._max_rows, budget + 1)
        return min(rows, self._states.max_ctx - self._states.lengths[sequence.slot])

    def _constraint(self, sequence: Sequence) -> OwnConstraint | None:
        """Return the constraint that may exclude tokens of the next step; None: no token of any tree."""
        constraint = sequence.constraint
        # One row more: what is launched ahead follows a token that the host has not seen.
        return None if constraint is None or constraint.idle(self._max_rows + 1) else constraint

    def _masks(self, sequence: Sequence, tree: Tree) -> Masks:
        constraint = self._constraint(sequence)
        if sequence.constraint is not None:
            self._runner.sampler.use_masks(sequence.slot, constraint is not None)
        return constraint.masks(*tree.lists()) if constraint is not None else ()

    def _verify(self, sequence: Sequence, tree: Tree, *, max_accepted: int) -> Forward:
        self._paging.reserve(sequence.slot, self._runner.step_rows(tree.size))
        return self._runner.verify([Verify(sequence.slot, tree, max_accepted)])

    def _verify_ahead(self, sequence: Sequence, tree: Tree) -> Forward | None:
        """Launch the next forward before the read-back, where the next tree can only be its root.

        Wasted if this step's token is the last one.
        """
        if tree.size > 1 or sequence.room < 2:
            return None
        drafts = sequence.request.draft_budget != 0 and self._max_rows > 1
        if drafts and not self._drafter.plan_root(sequence.slot):
            return None
        self._paging.reserve(sequence.slot, 1 + self._runner.step_rows(1))
        return self._runner.verify_sampled()

    def _deliver(self, sequence: Sequence, outcome: StepOutcome) -> list[int]:
        """Return the tokens that plain decoding would have delivered, and leave its state."""
        start = time.perf_counter()
        delivered = sequence.deliver(outcome.tokens)
        sequence.committed_rows = delivered.rows
        self.rollback(sequence, len(outcome.path) - delivered.rows)
        sequence.stats.commit_s += time.perf_counter() - start
        return delivered.tokens

    def _step_events(
        self,
        sequence: Sequence,
        tree: Tree,
        outcome: StepOutcome,
        tokens: list[int],
        logits: Callable[[], Tensor],
    ) -> list[Event]:
        """Return a step's events with the delivered tokens, and count the step."""
        stats, step_s = sequence.stats, outcome.draft_s + outcome.verify_s
        record = StepRecord(outcome.rows, len(outcome.tokens), step_s)
        stats.step_done(record, committed=sequence.committed_rows)
        stats.draft_s += outcome.draft_s
        stats.verify_s += outcome.verify_s
        events: list[Event] = []
        if sequence.request.trees:
            verified = VerifiedTree(*tree.lists(), outcome.path, outcome.tokens, outcome.draft_s, step_s)
            events.append(verified.cut(sequence.committed_rows))
        return [*events, *token_events(self._drafter, sequence, tokens, logits, outcome.path)]


def tagged(sequence: Sequence, events: list[Event]) -> list[tuple[Sequence, Event]]:
    return [(sequence, event) for event in events]
