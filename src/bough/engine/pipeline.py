"""Pipeline: one decode step of the sequences that can, and what of the next one is launched ahead of it."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bough.engine.delivery import token_events
from bough.engine.events import Event, VerifiedTree
from bough.engine.paging import Paging
from bough.engine.prompts import PromptReader
from bough.engine.runner import Accepted, Forward, Masks, StepRunner, StepTimes, Verify
from bough.engine.scheduler import Scheduler
from bough.engine.sequence import LaunchAhead, Launched, OwnConstraint, Phase, Sequence
from bough.engine.stats import StepRecord
from bough.spec.drafter import Drafter, StepOutcome, Turn
from bough.spec.tree import Tree
from bough.state.sequences import SequenceStates


class Pipeline:
    def __init__(
        self,
        states: SequenceStates,
        runner: StepRunner,
        drafter: Drafter,
        scheduler: Scheduler,
        prompts: PromptReader,
        paging: Paging,
        *,
        max_rows: int,
        working: list[Sequence],
    ):
        """`max_rows` of a tree; `working`: see `Engine`."""
        self._states, self._runner, self._drafter = states, runner, drafter
        self._scheduler, self._prompts, self._paging = scheduler, prompts, paging
        self._max_rows, self._working = max_rows, working
        self._asked_ahead = False  # the draft was launched for the next step of several sequences

    def step(self, sequences: list[Sequence], readers: list[Sequence]) -> list[tuple[Sequence, Event]]:
        """Run one step: the sequences' trees and the readers' prompts share one forward pass."""
        if len(sequences) == 1 and not readers:
            self._asked_ahead = False
            return tagged(sequences[0], self._decode(sequences[0]))
        return self._decode_all(sequences, readers)

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
            self._draft(sequence, self._row_limit(sequence))
        forward = self._verify(sequence, tree, max_accepted=1)
        self._runner.accept(forward)
        [accepted], times = self._runner.read_back()
        self._states.lengths[sequence.slot] += len(accepted.path)
        sequence.tokens += accepted.tokens
        return times

    def _decode(self, sequence: Sequence) -> list[Event]:
        """Finish a step of one sequence, perhaps launched before, and launch what may be of the next."""
        launched = sequence.launched or Launched(self._draft(sequence, self._row_limit(sequence)), None)
        sequence.launched = None
        tree, forward = launched.tree, launched.forward
        if forward is None:
            if not self._paging.provide(sequence, self._runner.step_rows(tree.size)):
                return []
            forward = self._runner.verify([Verify(sequence.slot, tree, sequence.room)])
        self._runner.accept(forward, [self._masks(sequence, tree)])
        # A constraint reads proposals on the host.
        waits = self._scheduler.contended or self._constraint(sequence) is not None
        ahead = "nothing" if waits else sequence.launch_ahead
        next_forward = self._verify_ahead(sequence, tree) if ahead == "forward" else None
        [accepted], times = self._runner.read_back()
        outcome = self._outcome(sequence, tree, accepted, times)
        self._drafter.observe(sequence.slot, outcome)
        delivered = self._deliver(sequence, outcome)
        events = self._step_events(sequence, tree, outcome, delivered, partial(forward.logits_of, 0))
        if not sequence.finished and ahead != "nothing":
            sequence.launched = self._launch(sequence, next_forward, ahead)
        return events

    def _decode_all(self, sequences: list[Sequence], readers: list[Sequence]) -> list[tuple[Sequence, Event]]:
        """Run one step of several sequences: their trees and the readers' prompts share one forward pass."""
        pieces = self._prompts.pieces(readers, len(sequences))
        sequences = [each for each in sequences if self._paging.provide(each, self._row_limit(each))]
        pieces = [each for each in pieces if self._paging.provide(each.sequence, len(each.tokens))]
        sequences = [each for each in sequences if each.parked is None]
        pieces = [each for each in pieces if each.sequence.parked is None]
        if not pieces and len(sequences) < 2:
            return [pair for each in sequences for pair in tagged(each, self._decode(each))]
        if not sequences:
            return []  # the readers go on alone
        self._working[:] = [*sequences, *(piece.sequence for piece in pieces)]
        turns = [self._turn(each, len(self._working)) for each in sequences]
        if not self._asked_ahead:
            self._runner.draft(lambda: self._drafter.ask(turns))
        self._asked_ahead = False
        prompts = [len(piece.tokens) for piece in pieces]
        pairs = list(zip(sequences, self._drafter.share(turns, prompts), strict=True))
        parts = [Verify(each.slot, tree, each.room) for each, tree in pairs]
        forward = self._runner.verify([*parts, *(piece.part for piece in pieces)])
        self._runner.accept(forward, [self._masks(each, tree) for each, tree in pairs])
        accepted, times = self._runner.read_back()
        outcomes = {
            each.slot: self._outcome(each, tree, found, times)
            for (each, tree), found in zip(pairs, accepted, strict=False)
        }
        self._drafter.observe_all(outcomes, prompts)
        delivered = [self._deliver(each, outcomes[each.slot]) for each in sequences]
        self._ask_ahead([each for each in sequences if not each.finished])
        # While the draft runs.
        return [
            *(
                (each, event)
                for index, ((each, tree), found) in enumerate(zip(pairs, delivered, strict=True))
                for event in self._step_events(
                    each, tree, outcomes[each.slot], found, partial(forward.logits_of, index)
                )
            ),
            *(
                (piece.sequence, event)
                for index, piece in enumerate(pieces, len(pairs))
                for event in self._prompts.piece_read(
                    piece, forward.logits_of(index), self._scheduler.waiting
                )
            ),
        ]

    def _turn(self, sequence: Sequence, sequences: int) -> Turn:
        slot = sequence.slot
        sequence.launched = None  # a draft of its own, from when it was alone
        limit = min(self._row_limit(sequence), self._runner.tree_rows(max(2, sequences)))
        position = self._states.lengths[slot]
        return Turn(slot, sequence.anchor, position, limit, self._constraint(sequence))

    def _ask_ahead(self, sequences: list[Sequence]) -> None:
        """Launch the next step's draft, so that it overlaps with the host's work on the text."""
        if self._runner.asynchronous and len(sequences) > 1:
            turns = [self._turn(each, len(sequences)) for each in sequences]
            self._runner.draft(lambda: self._drafter.ask(turns))
            self._asked_ahead = True

    def _outcome(self, sequence: Sequence, tree: Tree, accepted: Accepted, times: StepTimes) -> StepOutcome:
        self._states.lengths[sequence.slot] += len(accepted.path)
        seconds = (times.draft_s, times.verify_s, *times.cpu_shares)
        return StepOutcome(tree.size, accepted.path, accepted.tokens, *seconds)

    def _draft(self, sequence: Sequence, max_rows: int) -> Tree:
        position, constraint = self._states.lengths[sequence.slot], self._constraint(sequence)
        return self._runner.draft(
            lambda: self._drafter.propose(sequence.slot, sequence.anchor, position, max_rows, constraint)
        )

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

    def _launch(self, sequence: Sequence, forward: Forward | None, ahead: LaunchAhead) -> Launched:
        """Enqueue the next step's draft and, unless the caller may stop here, its forward."""
        tree = self._draft(sequence, 1 if forward is not None else self._row_limit(sequence))
        if forward is None and ahead == "forward":
            forward = self._verify(sequence, tree, max_accepted=sequence.room)
        return Launched(tree, forward)

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
