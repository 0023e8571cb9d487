"""Pipeline: one decode step of the sequences that can, and what of the next one is launched ahead of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bough.engine.delivery import token_events
from bough.engine.events import Event, VerifiedTree
from bough.engine.inputs import Verify, tree_rows
from bough.engine.paging import Paging, Parts
from bough.engine.prompts import PromptPiece, PromptReader
from bough.engine.runner import Accepted, Forward, Masks, StepTimes
from bough.engine.sequence import LaunchAhead, OwnConstraint, Phase, Sequence
from bough.engine.stats import StepRecord
from bough.spec.drafter import Piece, StepOutcome, Turn
from bough.spec.tree import SharedTrees, Tree


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: the tree of each sequence, pieces of prompts, and the forward over all of them."""

    sequences: list[Sequence]
    trees: list[Tree] | SharedTrees
    pieces: list[PromptPiece]
    forward: Forward
    observed: bool = True  # by the drafter

    @property
    def alone(self) -> bool:
        """Whether it is the step of one sequence."""
        return len(self.sequences) == 1 and not self.pieces

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have not ended since it was launched."""
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def plain(self) -> bool:
        """Whether it verifies nothing."""
        roots = isinstance(self.trees, list) and all(tree.size == 1 for tree in self.trees)
        return roots and not self.pieces


class Pipeline:
    def __init__(self, parts: Parts, prompts: PromptReader, paging: Paging):
        self._states, self._runner, self._drafter = parts.states, parts.runner, parts.drafter
        self._scheduler, self._prompts, self._paging = parts.scheduler, prompts, paging
        self._max_rows, self._working = parts.max_rows, parts.working
        self._drafted: list[Sequence] = []  # whose next draft is launched already
        self._launched: Batch | None = None
        # On a host: steps of a sequence that are plain by the drafter's decision, and the tree of one.
        self._plain_steps, self._root = 0, Tree.root(0)
        self._plain: Sequence | None = None

    @property
    def in_flight(self) -> Batch | None:
        """The step whose forward is launched, if any of those that it is for still runs."""
        batch = self._launched
        if batch is None or batch.running or any(not piece.sequence.finished for piece in batch.pieces):
            return batch
        self._launched = None
        return None

    def step(self, sequences: list[Sequence], readers: list[Sequence]) -> list[tuple[Sequence, Event]]:
        """Run one step: the sequences' trees and the readers' prompts share one forward pass.

        It may have been launched before, and what may be of the next one is launched ahead.
        """
        batch = self.in_flight or self._begin(sequences, readers)
        self._launched = None
        if batch is None:
            return []
        for sequence in (*batch.sequences, *(piece.sequence for piece in batch.pieces)):
            sequence.in_flight = False
        ended = [index for index, sequence in enumerate(batch.sequences) if sequence.finished]
        self._runner.accept(batch.forward, self._masks(batch), ended)
        ahead = self._ahead(batch)
        early = self._verify_ahead(batch) if ahead == "forward" else None
        accepted, times = self._runner.read_back()
        settled = [
            (index, sequence, self._outcome(sequence, accepted[index], times))
            for index, sequence in enumerate(batch.sequences)
            if not sequence.finished
        ]
        if batch.observed:
            by_slot = {sequence.slot: outcome for _, sequence, outcome in settled}
            self._drafter.observe(by_slot, [len(piece.tokens) for piece in batch.pieces])
        delivered = [self._deliver(sequence, outcome) for _, sequence, outcome in settled]
        if ahead == "draft":
            self._launch_draft(batch)
        # Before the next forward, which overwrites the logits and may read on.
        events: list[tuple[Sequence, Event]] = []
        for index, piece in enumerate(batch.pieces, len(batch.sequences)):
            if not piece.sequence.finished:
                logits = batch.forward.logits_of(index)
                events += tagged(piece.sequence, self._prompts.piece_read(piece, logits))
        if ahead == "forward":
            try:
                self._launch(batch, early)
            except Exception:  # of any kind: it fails again in the next step, after these events
                self._launched = None
        # While the device works on.
        for (index, sequence, outcome), tokens in zip(settled, delivered, strict=True):
            logits = partial(batch.forward.logits_of, index)
            tree = batch.trees[index] if isinstance(batch.trees, list) else None
            events += tagged(sequence, self._step_events(sequence, tree, outcome, tokens, logits))
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
        assert sequence.phase is Phase.DECODE and not sequence.in_flight
        if draft:
            self._draft([self._turn(sequence, self._row_limit(sequence))], [])
        self._paging.reserve(sequence.slot, self._runner.step_rows(tree.size))
        self._runner.accept(self._runner.verify([Verify(sequence.slot, tree, 1)]))
        [accepted], times = self._runner.read_back()
        self._states.lengths[sequence.slot] += len(accepted.path)
        sequence.tokens += accepted.tokens
        return times

    def _begin(self, sequences: list[Sequence], readers: list[Sequence]) -> Batch | None:
        """Launch the next step's draft and forward; None: there are no pages for any of the sequences."""
        alone = len(sequences) == 1 and not readers and not self._runner.asynchronous
        if alone and (batch := self._begin_plain(*sequences)) is not None:
            return batch
        pieces = self._prompts.pieces(readers, len(sequences)) if readers else []
        drafted, self._drafted = self._drafted, []
        most = tree_rows(len(sequences) + len(pieces))
        turns = [self._turn(sequence, min(self._row_limit(sequence), most)) for sequence in sequences]
        # Whatever share of the rows each gets: nothing that is launched waits for the host.
        for sequence, turn in zip(sequences, turns, strict=True):
            self._paging.provide(sequence, self._runner.step_rows(turn.max_rows))
        for piece in pieces:
            self._paging.provide(piece.sequence, self._runner.step_rows(len(piece.tokens)))
        if self._scheduler.parked:  # perhaps for the sake of others
            turns = [turn for sequence, turn in zip(sequences, turns, strict=True) if sequence.slot >= 0]
            sequences = [sequence for sequence in sequences if sequence.slot >= 0]
            pieces = [piece for piece in pieces if piece.sequence.slot >= 0]
        if not sequences:
            return None  # the readers go on alone
        self._working[:] = [*sequences, *(piece.sequence for piece in pieces)]
        prompts = [Piece(piece.sequence.slot, piece.tokens) for piece in pieces]
        alone = len(sequences) == 1 and not pieces
        if not (drafted == sequences if alone else len(drafted) > 1):
            self._draft(turns, prompts)
        trees = self._drafter.trees(turns, prompts)
        shared = trees if isinstance(trees, SharedTrees) else None
        own = trees if isinstance(trees, list) else [Tree.root(turn.anchor) for turn in turns]
        parts = [Verify(each.slot, tree, each.room) for each, tree in zip(sequences, own, strict=True)]
        forward = self._runner.verify([*parts, *(piece.part for piece in pieces)], shared)
        return Batch(sequences, trees, pieces, forward)

    def _begin_plain(self, sequence: Sequence) -> Batch | None:
        """Begin a step of the root alone, as without a drafter; None: it plans the step."""
        if not self._plain_steps or self._plain is not sequence:
            turn = self._turn(sequence, self._row_limit(sequence))
            self._plain, self._plain_steps = sequence, self._drafter.plain_steps([turn])
        if not self._plain_steps or not self._paging.provide(sequence, 1):
            return None
        self._plain_steps -= 1
        self._root.packed.numpy()[0, 0] = sequence.anchor
        forward = self._runner.verify([Verify(sequence.slot, self._root, sequence.room)])
        return Batch([sequence], [self._root], [], forward, observed=False)

    def _turn(self, sequence: Sequence, max_rows: int) -> Turn:
        shown = sequence.request.trees
        return Turn(sequence.slot, sequence.tokens, max_rows, self._constraint(sequence), shown)

    def _draft(self, turns: list[Turn], prompts: list[Piece]) -> None:
        self._runner.draft(lambda: self._drafter.draft(turns, prompts))

    def _ahead(self, batch: Batch) -> LaunchAhead:
        """Return what of the next step may be launched before this one's events are returned."""
        if not self._runner.asynchronous:
            return "nothing"
        allowed = {sequence.launch_ahead for sequence in batch.running}
        # A constraint reads proposals on the host, and so do the events of a prompt's end the logits.
        constrained = any(self._constraint(sequence) is not None for sequence in batch.running)
        if not batch.alone:
            waits = allowed != {"forward"} or constrained or any(piece.ends for piece in batch.pieces)
            return "draft" if waits else "forward"
        return "nothing" if constrained or not allowed else allowed.pop()

    def _launch_draft(self, batch: Batch) -> None:
        """Launch the next step's draft, of the sequences of this one."""
        sequences = batch.running
        if (batch.alone and self._scheduler.contended) or len(sequences) < (1 if batch.alone else 2):
            return
        most = tree_rows(len(sequences))
        self._draft([self._turn(each, min(self._row_limit(each), most)) for each in sequences], [])
        self._drafted = sequences

    def _launch(self, batch: Batch, early: Forward | None) -> None:
        """Launch the next step's draft and its forward, which may have been launched `early`."""
        if early is not None and batch.running:
            turns = [self._turn(sequence, 1) for sequence in batch.running]
            self._draft(turns, [])
            self._drafter.trees(turns)
            roots = Tree.roots([sequence.anchor for sequence in batch.sequences])
            self._launched = Batch(batch.sequences, roots, [], early)
        elif early is None:
            work = self._scheduler.decode_next(self._paging.fits, short=self._prompts.short)
            if work is None:
                self._launch_draft(batch)
                return
            self._launched = self._begin(work.sequences, work.readers)
        if self._launched is not None:
            for sequence in (*self._launched.running, *(p.sequence for p in self._launched.pieces)):
                sequence.in_flight = True

    def _outcome(self, sequence: Sequence, accepted: Accepted, times: StepTimes) -> StepOutcome:
        self._states.lengths[sequence.slot] += len(accepted.path)
        seconds = (times.draft_s, times.verify_s, *times.cpu_shares)
        return StepOutcome(accepted.rows, accepted.path, accepted.tokens, *seconds)

    def _row_limit(self, sequence: Sequence) -> int:
        budget = sequence.request.draft_budget
        rows = self._max_rows if budget is None else min(self._max_rows, budget + 1)
        return min(rows, self._states.max_ctx - self._states.lengths[sequence.slot])

    def _constraint(self, sequence: Sequence) -> OwnConstraint | None:
        """Return the constraint that may exclude tokens of the next step; None: no token of any tree."""
        constraint = sequence.constraint
        # One row more: what is launched ahead follows a token that the host has not seen.
        return None if constraint is None or constraint.idle(self._max_rows + 1) else constraint

    def _masks(self, batch: Batch) -> list[Masks]:
        """Return what may follow the rows of each sequence."""
        masks: list[Masks] = [()] * len(batch.sequences)
        for index, sequence in enumerate(batch.sequences):
            if sequence.constraint is None or sequence.finished:
                continue
            constraint = self._constraint(sequence)
            self._runner.sampler.use_masks(sequence.slot, constraint is not None)
            if constraint is not None:
                assert isinstance(batch.trees, list)
                masks[index] = constraint.masks(*batch.trees[index].lists())
        return masks

    def _verify_ahead(self, batch: Batch) -> Forward | None:
        """Launch the next forward before the read-back, where the next trees can only be their roots.

        Wasted for a sequence whose last token is this step's.
        """
        sequences = batch.sequences
        if not batch.plain or len(batch.running) < len(sequences) or any(each.room < 2 for each in sequences):
            return None
        if batch.alone and self._scheduler.contended:
            return None
        if not batch.alone and self._scheduler.decode_next(self._paging.fits) is None:
            return None
        drafts = self._max_rows > 1 and any(each.request.draft_budget != 0 for each in sequences)
        if drafts and not self._drafter.plain_steps([self._turn(each, 1) for each in sequences]):
            return None
        for sequence in sequences:
            self._paging.reserve(sequence.slot, 1 + self._runner.step_rows(1, len(sequences)))
        return self._runner.verify_sampled(batch.forward)

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
        tree: Tree | None,
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
        if sequence.request.trees and tree is not None:
            verified = VerifiedTree(*tree.lists(), outcome.path, outcome.tokens, outcome.draft_s, step_s)
            events.append(verified.cut(sequence.committed_rows))
        return [*events, *token_events(self._drafter, sequence, tokens, logits, outcome.path)]


def tagged(sequence: Sequence, events: list[Event]) -> list[tuple[Sequence, Event]]:
    return [(sequence, event) for event in events]
