"""StepRunner: verifies trees and commits accepted paths over static buffers, eagerly or as CUDA graphs.

A step is three functions: draft and tree (the drafter's), forward, then sample, accept and commit.
`EagerRunner` runs them with exactly the tree's rows, which suits a CPU. `GraphRunner` pads a step to one of
a few sizes, so that each size can be captured as CUDA graphs; padding rows have no parent, and acceptance
never reaches them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import numpy as np
import torch
from torch import Tensor

from treeflash.engine.sampler import Sampler
from treeflash.kernels.slot_mapping import padded_tree
from treeflash.kernels.tree import MAX_ROWS, Acceptance, accept_path
from treeflash.models.decoder import Target
from treeflash.models.step import SIZES, Step, padded_rows
from treeflash.spec.drafter import Drafter
from treeflash.spec.tree import Tree
from treeflash.state.graphs import CapturedFunction
from treeflash.state.sequences import SequenceStates

log = logging.getLogger(__name__)

_STOPS = 64  # end tokens that acceptance checks on the device; the host checks them all
Masks = Sequence[np.ndarray | None]


@dataclass(frozen=True, slots=True)
class Forward:
    """The target's forward pass over a tree; nothing of it is committed."""

    step: Step
    features: Tensor  # [T, taps * width]
    logits: Tensor  # [T, vocabulary]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, on the device's clock where there is one."""

    draft_s: float
    forward_s: float
    accept_s: float  # sampling, acceptance and commit
    whole_s: float  # from the start of the draft to the end of the commit; needs a step not launched ahead

    @property
    def verify_s(self) -> float:
        return self.forward_s + self.accept_s


class Mark(IntEnum):
    DRAFT = 0
    DRAFTED = 1
    FORWARD = 2
    FORWARDED = 3
    ACCEPT = 4
    ACCEPTED = 5


class StepClock:
    """Timestamps of one step: CUDA events on a GPU, else the host's clock."""

    def __init__(self, device: torch.device):
        self._times = [0.0] * len(Mark)
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in Mark]

    def mark(self, mark: Mark) -> None:
        if self._events:
            self._events[mark].record()
        else:
            self._times[mark] = time.perf_counter()

    def synchronize(self) -> None:
        """Wait until the device has passed the last mark; work enqueued after it may still run."""
        if self._events:
            self._events[Mark.ACCEPTED].synchronize()

    def seconds(self, first: Mark, last: Mark) -> float:
        if self._events:
            return self._events[first].elapsed_time(self._events[last]) / 1000
        return self._times[last] - self._times[first]

    def times(self) -> StepTimes:
        return StepTimes(
            draft_s=self.seconds(Mark.DRAFT, Mark.DRAFTED),
            forward_s=self.seconds(Mark.FORWARD, Mark.FORWARDED),
            accept_s=self.seconds(Mark.ACCEPT, Mark.ACCEPTED),
            whole_s=self.seconds(Mark.DRAFT, Mark.ACCEPTED),
        )


class StepRunner:
    """Steps of the sequence in slot 0; `EagerRunner` and `GraphRunner` are its two forms."""

    # Whether launches return before the device is done, so that launching ahead hides the host's time.
    # Where they are, buffers must never move.
    asynchronous: bool
    sizes: Sequence[int] = ()  # rows of a padded step; none: steps have exactly the tree's rows
    captured = False

    def __init__(self, target: Target, states: SequenceStates, drafter: Drafter):
        device = target.device
        self._target, self._states, self._drafter = target, states, drafter
        self.sampler = Sampler(MAX_ROWS, target.spec.vocab_size, device)
        self._slots = torch.zeros(1, dtype=torch.int64, device=device)
        self._tree = Tree.root(0).packed.to(device)
        self._limits = torch.ones(2, dtype=torch.int64, device=device)  # rows of the tree, accepted at most
        self._stops = torch.full((_STOPS,), -1, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._staged_tree = torch.zeros(4, MAX_ROWS, dtype=torch.int64, pin_memory=pinned)
        self._staged_limits = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)
        self._host_acceptance = torch.zeros(Acceptance.SIZE, dtype=torch.int64, pin_memory=pinned)
        self._clock = StepClock(device)  # of the step that is being enqueued
        self._next_clock = StepClock(device)  # of the next one, which may start before this one is read back
        self._accepted_clock = self._clock
        self._acceptance = Acceptance(self._host_acceptance)

    @staticmethod
    def step_rows(rows: int) -> int:
        """Return the rows that a step for a tree of `rows` rows has."""
        return rows

    def begin(self, stop_ids: Sequence[int]) -> None:
        """Start a request whose accepted paths end at these tokens."""
        stops = list(stop_ids)[:_STOPS]
        self._stops.copy_(torch.tensor(stops + [-1] * (_STOPS - len(stops))))

    def draft(self, propose: Callable[[], Tree]) -> Tree:
        """Run the drafter's proposal as the timed first part of the step."""
        self._clock.mark(Mark.DRAFT)
        tree = propose()
        self._clock.mark(Mark.DRAFTED)
        return tree

    def verify(self, tree: Tree, *, max_accepted: int) -> Forward:
        """Launch the target's forward pass over a tree, of which at most `max_accepted` rows are accepted."""
        if tree.packed.device == self._tree.device:
            self._tree.copy_(tree.packed)
        else:
            self._staged_tree.copy_(tree.packed)
            self._tree.copy_(self._staged_tree, non_blocking=True)
        self._staged_limits.numpy()[:] = tree.size, max_accepted
        self._limits.copy_(self._staged_limits, non_blocking=True)
        return self._timed_forward(self.step_rows(tree.size))

    def verify_sampled(self) -> Forward:
        """Launch the forward pass over the token that the last `accept` sampled, before it is read back.

        For a tree that is only its root: the rest of the buffers and the limits are those of the next step
        too.
        """
        self._clock, self._next_clock = self._next_clock, self._clock
        self._tree[0, :1].copy_(self._acceptance.next_token)
        return self._timed_forward(self.step_rows(1))

    def accept(self, forward: Forward, masks: Masks = ()) -> None:
        """Launch sampling after every row, acceptance and the commit of the accepted path.

        masks: which tokens may follow each row, under a constraint.
        """
        self._clock.mark(Mark.ACCEPT)
        if masks:
            self.sampler.set_masks(masks)
        self._acceptance = self._run_accept(forward)
        self._host_acceptance.copy_(self._acceptance.flat, non_blocking=True)
        self._clock.mark(Mark.ACCEPTED)
        self._accepted_clock = self._clock

    def read_back(self) -> tuple[list[int], list[int], StepTimes]:
        """Return the accepted rows, the tokens they decided and the times; synchronises with the device."""
        self._accepted_clock.synchronize()
        rows, tokens = Acceptance(self._host_acceptance).path()
        return rows, tokens, self._accepted_clock.times()

    def capture(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Capture the steps as CUDA graphs; return whether that was possible. Overwrites the slot's state."""
        return False

    def _timed_forward(self, size: int) -> Forward:
        self._clock.mark(Mark.FORWARD)
        forward = self._run_forward(size)
        self._clock.mark(Mark.FORWARDED)
        return forward

    def _run_forward(self, size: int) -> Forward:
        return self._forward(size)

    def _run_accept(self, forward: Forward) -> Acceptance:
        return self._accept(forward)

    def _commit_draft(self, features: Tensor, acceptance: Acceptance) -> None:
        raise NotImplementedError

    def _forward(self, size: int) -> Forward:
        lengths = self._states.buffers.lengths
        rows = padded_tree(self._tree, self._limits[:1], self._slots, lengths, size=size)
        tokens, parents, ancestors, positions = rows.unsqueeze(1).unbind()
        step = Step(self._slots, tokens, positions, parents, ancestors)
        features, logits = self._target.verify(step, self._states.buffers, taps=self._drafter.taps)
        return Forward(step, features[0], logits[0])

    def _accept(self, forward: Forward) -> Acceptance:
        step = forward.step
        assert step.parents is not None and step.ancestors is not None
        tokens, parents, ancestors = step.tokens[0], step.parents[0], step.ancestors[0]
        sampled = self.sampler.sample(forward.logits, step.positions[0] + 1, tokens, ancestors)
        acceptance = accept_path(
            tokens,
            parents,
            ancestors,
            sampled,
            stops=self._stops,
            limit=self._limits[1:],
            counts=self.sampler.counts,
        )
        self._states.commit_on_device(step, acceptance.last_row)
        self._commit_draft(forward.features, acceptance)
        return acceptance


class EagerRunner(StepRunner):
    """Runs every step as it is called, with exactly the tree's rows."""

    asynchronous = False

    def __init__(self, target: Target, states: SequenceStates, drafter: Drafter, *, max_rows: int):
        super().__init__(target, states, drafter)
        drafter.bind(self.sampler.rank)

    def _commit_draft(self, features: Tensor, acceptance: Acceptance) -> None:
        self._drafter.commit_eager(features[acceptance.rows[: int(acceptance.count)]])


class GraphRunner(StepRunner):
    """Pads steps to a few sizes and replays them as CUDA graphs once they are captured."""

    asynchronous = True

    def __init__(self, target: Target, states: SequenceStates, drafter: Drafter, *, max_rows: int):
        super().__init__(target, states, drafter)
        self.sizes = [size for size in SIZES if size <= padded_rows(max_rows)]
        self._draft_functions = drafter.bind(self.sampler.rank)
        self._forwards = {size: CapturedFunction(partial(self._forward, size)) for size in self.sizes}
        self._accepts = {size: CapturedFunction(partial(self._accept_last, size)) for size in self.sizes}
        self._last: dict[int, Forward] = {}  # by size; an accept graph reads what the forward graph writes

    @staticmethod
    def step_rows(rows: int) -> int:
        return padded_rows(rows)

    @property
    def captured(self) -> bool:
        return all(function.captured for function in self._functions())

    def capture(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Capture all functions, the largest size first. If that fails, warn and run them eagerly."""
        pool, total = torch.cuda.graph_pool_handle(), len(self.sizes) + len(self._draft_functions)
        report = progress or (lambda done, total: None)
        self._limits.fill_(1)
        try:
            for done, function in enumerate(self._draft_functions, 1):
                function.capture(pool)
                report(done, total)
            for done, size in enumerate(reversed(self.sizes), 1 + len(self._draft_functions)):
                self._forwards[size].capture(pool)
                self._last[size] = self._forwards[size]()
                self._accepts[size].capture(pool)
                report(done, total)
            torch.cuda.synchronize()
        except (RuntimeError, AssertionError) as error:
            for function in self._functions():
                function.release()
            self._last = {}
            reason = str(error).partition("\n")[0]
            details = log.isEnabledFor(logging.DEBUG)
            log.warning("steps run without CUDA graphs, more slowly: %s", reason, exc_info=details)
            return False
        return True

    def _functions(self) -> list[CapturedFunction]:
        steps = [function for size in self.sizes for function in (self._forwards[size], self._accepts[size])]
        return [*self._draft_functions, *steps]

    def _run_forward(self, size: int) -> Forward:
        self._last[size] = forward = self._forwards[size]()
        return forward

    def _run_accept(self, forward: Forward) -> Acceptance:
        return self._accepts[forward.step.rows]()

    def _accept_last(self, size: int) -> Acceptance:
        return self._accept(self._last[size])

    def _commit_draft(self, features: Tensor, acceptance: Acceptance) -> None:
        self._drafter.commit(features[acceptance.source[: len(features)]], acceptance.count)
