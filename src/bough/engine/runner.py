"""StepRunner: verifies trees and commits accepted paths over static buffers, eagerly or as CUDA graphs.

A step is three functions: draft and trees (the drafter's), forward, then sample, accept and commit. A step of
several sequences has ragged rows. `StepRunner` runs steps with exactly the trees' rows, which suits a CPU.
`GraphRunner` pads a step to one of a few sizes, so that each size can be captured as CUDA graphs; padding
rows have no parent, and acceptance never reaches them.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bough.engine.inputs import StepTrees, Verify, tree_rows
from bough.engine.sampler import Sampler
from bough.kernels.tree import MAX_ROWS, Acceptance, accept_path, reference
from bough.models.decoder import Target, VerifyBuffers
from bough.models.step import SIZES, Step, largest_padded, padded_rows
from bough.spec.drafter import DevicePaths, Drafter, HostPath
from bough.spec.tree import SharedTrees, Tree
from bough.state.graphs import CapturedFunction, warn_eager
from bough.state.sequences import SequenceStates

_STOPS = 64  # end tokens that acceptance checks on the device; the host checks them all
# Sequences that a padded step holds; those that are missing cost little, but not nothing.
CAPACITIES = (1, 2, 4, 8, 16, 32, 64)
_PATIENCE = 64  # steps of a size that run in a larger one before it is captured although others wait
Masks = Sequence[np.ndarray | None]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a step accepted of one sequence's tree."""

    path: list[int]  # rows of its tree, the root first
    tokens: list[int]  # that they decided
    rows: int  # of its tree


@dataclass(frozen=True, slots=True)
class Forward:
    """The target's forward pass over the trees of a step; nothing of it is committed.

    Its tensors may be static buffers, which the next forward overwrites.
    """

    step: Step
    features: Tensor  # [R, taps * width]
    logits: Tensor  # [R, vocabulary]
    # [S + 1] first row of each sequence, and the end of the last; where rows were shared on the device they
    # are known after `read_back`.
    bounds: list[int]

    def logits_of(self, index: int) -> Tensor:
        """Return the logits [rows, vocabulary] of the step's sequence `index`."""
        return self.logits[self.bounds[index] : self.bounds[index + 1]]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, on the device's clock where there is one."""

    draft_s: float
    forward_s: float
    accept_s: float  # sampling, acceptance and commit
    whole_s: float  # from the start of the draft to the end of the commit; needs a step not launched ahead
    # Of the draft and of `verify_s` that CPUs worked for this step: less where others took them away.
    cpu_shares: tuple[float, float] = (1.0, 1.0)

    @property
    def verify_s(self) -> float:
        return self.forward_s + self.accept_s

    @property
    def draft_cost(self) -> float:
        return self.cpu_shares[0] * self.draft_s

    @property
    def verify_cost(self) -> float:
        return self.cpu_shares[1] * self.verify_s


class Mark(IntEnum):
    DRAFT = 0
    DRAFTED = 1
    FORWARD = 2
    FORWARDED = 3
    ACCEPT = 4
    ACCEPTED = 5


class StepClock:
    """Timestamps of one step: CUDA events on a GPU, else the host's clock."""

    def __init__(self, device: torch.device, *, threads: int = 1):
        """`threads` of a CPU that compute."""
        self._times = [0.0] * len(Mark)
        self._cpu_times = [(0.0, 0.0)] * len(Mark)  # of this thread, and a thread's part of the process
        self._threads = threads
        self._drafted = False  # whether the step has a draft
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in Mark]

    def mark(self, mark: Mark) -> None:
        self._drafted |= mark is Mark.DRAFT
        if self._events:
            self._events[mark].record()
        else:
            self._times[mark], own = time.perf_counter(), time.thread_time()
            self._cpu_times[mark] = (own, time.process_time() / self._threads if self._threads > 1 else own)

    def synchronize(self) -> None:
        """Wait until the device has passed the last mark; work enqueued after it may still run."""
        if self._events:
            self._events[Mark.ACCEPTED].synchronize()

    def seconds(self, first: Mark, last: Mark) -> float:
        if self._events:
            return self._events[first].elapsed_time(self._events[last]) / 1000
        return self._times[last] - self._times[first]

    def _cpu_share(self, *stretches: tuple[Mark, Mark]) -> float:
        """Return which part of some stretches' time they would have taken had nobody else had the CPUs.

        While this thread has none, the others go on with its work.
        """
        whole = sum(self.seconds(*stretch) for stretch in stretches)
        if self._events or whole <= 0:
            return 1.0
        spent = 0.0
        for first, last in stretches:
            (own, part), (own_after, part_after) = self._cpu_times[first], self._cpu_times[last]
            spent += max(own_after - own, part_after - part)
        return min(spent / whole, 1.0)

    def times(self) -> StepTimes:
        """Return the times of the step, once."""
        drafted, self._drafted = self._drafted, False
        first = Mark.DRAFT if drafted else Mark.FORWARD
        return StepTimes(
            draft_s=self.seconds(Mark.DRAFT, Mark.DRAFTED) if drafted else 0.0,
            forward_s=self.seconds(Mark.FORWARD, Mark.FORWARDED),
            accept_s=self.seconds(Mark.ACCEPT, Mark.ACCEPTED),
            whole_s=self.seconds(first, Mark.ACCEPTED),
            cpu_shares=(
                self._cpu_share((Mark.DRAFT, Mark.DRAFTED)) if drafted else 1.0,
                self._cpu_share((Mark.FORWARD, Mark.FORWARDED), (Mark.ACCEPT, Mark.ACCEPTED)),
            ),
        )


class StepRunner:
    """Runs the steps of the decoding sequences as they are called, with exactly the trees' rows."""

    # Whether launches return before the device is done, so that launching ahead hides the host's time.
    # Where they are, buffers must never move.
    asynchronous = False
    tree_sizes: Sequence[int] = ()  # rows of padded steps with trees; none: exactly the trees' rows
    captured = False

    def __init__(self, target: Target, states: SequenceStates, drafter: Drafter, *, max_rows: int):
        """`max_rows` of a tree, the root included."""
        device, slots = target.device, len(states.lengths)
        self._target, self._states, self._drafter, self._device = target, states, drafter, device
        self._taps = drafter.features.taps
        self._max_rows = max_rows
        # Every number twice: Triton compiles another kernel for addresses that are no multiple of 16.
        self._rows = torch.arange(MAX_ROWS, device=device)[:, None].repeat(1, 2)
        self.sampler = Sampler(slots, MAX_ROWS, target.spec.vocab_size, device)
        self._draft_functions = drafter.bind(self.sampler.rank)
        self._trees = StepTrees(states, device, padded=self.asynchronous)
        self._stops = torch.full((slots, _STOPS), -1, dtype=torch.int64, device=device)
        self._host_acceptance = self._host_first = torch.zeros(0, dtype=torch.int64)
        self._clock = StepClock(device, threads=target.threads)  # of the step that is being enqueued
        # Of the next one, which may start before this one is read back.
        self._next_clock = StepClock(device, threads=target.threads)
        self._accepted_clock = self._clock
        self._acceptance = Acceptance(self._host_acceptance)
        self._verified: Forward  # what was accepted last
        self._accepted: list[Accepted] | None = None  # by the last step, where the host knows it already

    @staticmethod
    def step_rows(rows: int, sequences: int = 1) -> int:
        """Return the rows that a step of `sequences` trees with `rows` rows in all has."""
        return rows

    def begin(self, slot: int, stop_ids: Sequence[int] = ()) -> None:
        """Start a request whose accepted paths end at these tokens; none while its prompt is processed."""
        stops = list(stop_ids)[:_STOPS]
        self._stops[slot] = torch.tensor(stops + [-1] * (_STOPS - len(stops)), device=self._device)

    def draft(self, propose: Callable[[], object]) -> None:
        """Run the drafter's proposals as the timed first part of the step."""
        self._clock.mark(Mark.DRAFT)
        propose()
        self._clock.mark(Mark.DRAFTED)

    def verify(self, parts: Sequence[Verify], shared: SharedTrees | None = None) -> Forward:
        """Launch the target's forward pass over one tree for each of some sequences, in different slots.

        `shared`: instead of the parts' trees.
        """
        if shared is not None:
            rows, largest = shared.size, shared.most
        else:
            sizes = [part.tree.size for part in parts]
            rows, largest = sum(sizes), max(sizes)
        most = tree_rows(len(parts))
        assert largest <= most, f"a tree of {largest} rows, at most {most}"
        assert rows <= MAX_ROWS, f"{rows} rows of {len(parts)} sequences, at most {MAX_ROWS}"
        capacity, size = self._shape(len(parts), rows, largest)
        return self._timed_forward(capacity, size, self._trees.of(capacity).load(parts, shared))

    @staticmethod
    def most_rows(max_rows: int) -> int:
        """Return the most rows of a step of one sequence, with trees of at most `max_rows`."""
        return max_rows

    @property
    def read_rows(self) -> int:
        """The most tokens of a prompt that a step reads."""
        return self.most_rows(self._max_rows)

    def read(self, slot: int, tokens: list[int]) -> Forward:
        """Process and commit a short piece of a prompt as a chain, by the forward pass of a decode step.

        A chunk's many launches take longer than its work. The caller passes the features on to the drafter.
        Waits for the device at most until the step before this one has begun.
        """
        forward = self.verify([Verify(slot, Tree.chain(tokens), len(tokens))])
        self._states.commit(forward.step, self._rows[len(tokens) - 1, :1])
        self._states.lengths[slot] += len(tokens)
        return forward

    def verify_sampled(self, forward: Forward) -> Forward:
        """Launch the forward pass over the tokens that `accept` of one sampled, before they are read back.

        For a step of roots alone: the rest of the buffers are those of the next step, too.
        """
        self._clock, self._next_clock = self._next_clock, self._clock
        capacity = len(forward.step.slots)
        self._trees.of(capacity).rows[0, :capacity].copy_(self._acceptance.next_tokens)
        return self._timed_forward(capacity, forward.step.rows, [*forward.bounds])

    def accept(self, forward: Forward, masks: Sequence[Masks] = (), ended: Sequence[int] = ()) -> None:
        """Launch sampling after every row, acceptance and the commit of the accepted paths.

        masks: for each sequence which tokens may follow its rows; none: without a constraint. `ended`: those
        that have ended since the forward was launched: their pages may be others', so no row may be moved.
        """
        for index in ended:
            self._trees.of(len(forward.step.slots)).limits[index : index + 1].fill_(1)
        self._clock.mark(Mark.ACCEPT)
        for row, own in zip(forward.bounds, masks, strict=False):
            if own:
                self.sampler.set_masks(row, own)
        self._accepted = self._accept_on_host(forward)
        if self._accepted is None:
            self._acceptance = self._run_accept(forward)
            self._verified = forward
            self._read(self._acceptance.flat, forward.step.first)
        self._clock.mark(Mark.ACCEPTED)
        self._accepted_clock = self._clock

    def read_back(self) -> tuple[list[Accepted], StepTimes]:
        """Return what was accepted of each tree, and the times; synchronises with the device."""
        if self._accepted is not None:
            return self._accepted, self._accepted_clock.times()
        self._accepted_clock.synchronize()
        bounds = self._verified.bounds
        if self._verified.step.first is not None:
            bounds[:] = self._host_first[: len(bounds)].tolist()
        paths = Acceptance(self._host_acceptance).paths()
        accepted = [
            Accepted(*path, end - begin) for path, (begin, end) in zip(paths, pairwise(bounds), strict=False)
        ]
        return accepted, self._accepted_clock.times()

    def capture(self, progress: Callable[[int, int], None] | None = None, *, slot: int = 0) -> bool:
        """Capture the steps of one sequence as CUDA graphs; return whether that was possible.

        Overwrites the state of the slot.
        """
        return False

    def capture_next(self) -> bool:
        """Capture one more size of steps, while nothing runs; return whether there was one."""
        return False

    def rehearse(self, slot: int = 0, *, batched: bool = False) -> None:
        """Run the draft and a step of each size of one sequence once, on a slot: their first run is slow.

        `batched`: and the steps of several sequences, without rows.
        """

    def measured(self, slot: int, size: int, *, draft: bool = False) -> StepTimes:
        """Return the times of a step of one sequence with `size` rows, and with a draft call if asked."""
        self._states.reserve(slot, size)
        if draft:
            self.draft(lambda: [function() for function in self._draft_functions[:1]])
        self.accept(self.verify([Verify(slot, Tree.chain([0] * size), 1)]))
        _, times = self.read_back()
        self._states.lengths[slot] += 1
        return times

    def _read(self, flat: Tensor, first: Tensor | None) -> None:
        """Begin to copy an acceptance to the host, and the first row of each tree of several."""
        self._host_acceptance, self._host_first = flat, flat if first is None else first

    def _capacity(self, sequences: int) -> int:
        """Return how many sequences the step for `sequences` holds."""
        return sequences

    def _shape(self, sequences: int, rows: int, largest: int) -> tuple[int, int]:
        """Return capacity and rows of the step that runs `sequences` trees, the largest of `largest` rows."""
        return self._capacity(sequences), self.step_rows(rows, sequences)

    def _timed_forward(self, capacity: int, size: int, bounds: list[int]) -> Forward:
        self._clock.mark(Mark.FORWARD)
        forward = self._run_forward(capacity, size)
        self._clock.mark(Mark.FORWARDED)
        return Forward(forward.step, forward.features, forward.logits, bounds)

    def _run_forward(self, capacity: int, size: int) -> Forward:
        return self._forward(capacity, size)

    def _run_accept(self, forward: Forward) -> Acceptance:
        return self._accept(forward)

    def _accept_on_host(self, forward: Forward) -> list[Accepted] | None:
        """Sample, accept and commit without tensors of the result; None: not for this step.

        On a CPU a step of one sequence is a few integers; tensors would take a fifth of a plain step.
        """
        step, size = forward.step, forward.bounds[-1]
        if step.first is not None or self.asynchronous or self._device.type != "cpu":
            return None
        inputs, sampled = self._trees.of(1), self.sampler.sample(forward.logits, step).tolist()
        slot, limit = inputs.slots.item(), inputs.limits.item()
        tokens, parents = inputs.rows.numpy()[:2, :size].tolist()
        path, counts = [0], self.sampler.counts.numpy()
        if size > 1:
            stops = self._stops[slot].tolist()
            path = reference.accept_path(tokens, parents, sampled, stops=stops, limit=limit)
        for row in path:
            counts[slot, tokens[row]] += 1
        self._states.commit_rows(slot, path, size=size)
        accepted = Accepted(path, [sampled[row] for row in path], size)
        if self._taps:
            rows = None if len(path) == size else path
            self._drafter.commit(forward.features, [HostPath(slot, rows, accepted.tokens)])
        return [accepted]

    def _commit_draft(self, forward: Forward, acceptance: Acceptance) -> None:
        slots, begins = forward.step.slots.tolist(), forward.bounds[:-1]
        paths = [
            HostPath(slot, [begin + row for row in path], tokens)
            for slot, begin, (path, tokens) in zip(slots, begins, acceptance.paths(), strict=True)
        ]
        self._drafter.commit(forward.features, paths)

    def _forward(self, capacity: int, size: int, into: VerifyBuffers | None = None) -> Forward:
        step = self._trees.step(capacity, size)
        found = self._target.verify(step, self._states.buffers, taps=self._taps, into=into)
        features, logits = found
        return Forward(step, features[0], logits[0], [])

    def _accept(self, forward: Forward) -> Acceptance:
        step = forward.step
        assert step.parents is not None and step.ancestors is not None
        sampled, inputs = self.sampler.sample(forward.logits, step), self._trees.of(len(step.slots))
        if step.first is not None:
            given = inputs.given[: len(sampled)]
            sampled = torch.where(given >= 0, given, sampled)
        acceptance = accept_path(
            step.tokens[0],
            step.parents[0],
            step.ancestors[0],
            sampled,
            first=step.first,
            slots=step.slots,
            stops=self._stops,
            limits=inputs.limits,
            counts=self.sampler.counts,
        )
        self._states.commit(step, acceptance.last_rows)
        if self._taps:
            self._commit_draft(forward, acceptance)
        return acceptance


class GraphRunner(StepRunner):
    """Pads steps to a few sizes and replays them as CUDA graphs once they are captured.

    The steps of one sequence are captured at the start; those of several while nothing runs. One that is
    needed before runs in a larger one, if there is any, and is captured when it has been needed often. All of
    them share the buffers of features and logits.
    """

    asynchronous = True

    def __init__(self, target: Target, states: SequenceStates, drafter: Drafter, *, max_rows: int):
        super().__init__(target, states, drafter, max_rows=max_rows)
        device, slots = target.device, len(states.lengths)
        self._sizes = [size for size in SIZES if size <= largest_padded(max_rows)]
        self.tree_sizes = [size for size in SIZES if size <= padded_rows(max_rows)]
        self._first_drafts = [each for each in self._draft_functions if each.sequences == 1]
        # To capture while nothing runs.
        self._later_drafts = [each for each in self._draft_functions if each.sequences > 1]
        width = len(self._taps) * target.spec.width
        self._into = VerifyBuffers(
            torch.zeros(MAX_ROWS, width, device=device),
            torch.zeros(MAX_ROWS, target.spec.vocab_size, device=device),
        )
        self._forwards: dict[tuple[int, int], CapturedFunction[Forward]] = {}  # by capacity and rows
        self._accepts: dict[tuple[int, int], CapturedFunction[Acceptance]] = {}
        for key in [(1, size) for size in self._sizes] + _batched_sizes(slots):
            self._forwards[key] = CapturedFunction(partial(self._forward, *key, self._into))
            self._accepts[key] = CapturedFunction(partial(self._accept_last, key))
        self._last: dict[tuple[int, int], Forward] = {}  # an accept graph reads what the forward graph writes
        self._pool: Any = None  # of graphs that are captured later; None: they are not
        self._later = [key for key in self._forwards if key[0] > 1]
        self._wanted = Counter[tuple[int, int]]()  # how often those were needed
        self._pinned = torch.zeros(
            Acceptance.SIZE * self._capacity(min(slots, MAX_ROWS)),
            dtype=torch.int64,
            pin_memory=device.type == "cuda",
        )
        self._pinned_first = torch.zeros_like(self._pinned[: MAX_ROWS + 1], pin_memory=device.type == "cuda")

    @staticmethod
    def step_rows(rows: int, sequences: int = 1) -> int:
        return padded_rows(rows if sequences == 1 else max(rows, 2))

    @staticmethod
    def most_rows(max_rows: int) -> int:
        return largest_padded(max_rows)

    @property
    def captured(self) -> bool:
        return all(function.captured for function in self._functions())

    def capture(self, progress: Callable[[int, int], None] | None = None, *, slot: int = 0) -> bool:
        """Capture all functions of one sequence, the largest size first.

        If that fails, warn and run them eagerly.
        """
        drafts = self._first_drafts
        pool, total = torch.cuda.graph_pool_handle(), len(self._sizes) + len(drafts)
        report = progress or (lambda done, total: None)
        self._trees.of(1).load([Verify(slot, Tree.root(0), 1)])
        try:
            for done, function in enumerate(drafts, 1):
                function.capture(pool)
                report(done, total)
            for done, size in enumerate(reversed(self._sizes), 1 + len(drafts)):
                self._capture_step((1, size), pool)
                report(done, total)
            torch.cuda.synchronize()
        except (RuntimeError, AssertionError) as error:
            for function in self._functions():
                function.release()
            self._last = {}
            if isinstance(error, torch.OutOfMemoryError):
                raise  # with fewer pages it is possible
            warn_eager(error)
            return False
        self._pool = pool
        for function in self._later_drafts:
            # The time of the capture is not that of the draft.
            function.capture_on_call(pool, lambda: self._clock.mark(Mark.DRAFT))
        return True

    def rehearse(self, slot: int = 0, *, batched: bool = False) -> None:
        self._trees.of(1).load([Verify(slot, Tree.root(0), 1)])
        for function in self._draft_functions if batched else self._first_drafts:
            function()
        for size in self._sizes:
            self._run_accept(self._run_forward(1, size))
        for capacity, size in self._later if batched else ():
            self._trees.of(capacity).load([])
            self._run_accept(self._run_forward(capacity, size))

    def measured(self, slot: int, size: int, *, draft: bool = False) -> StepTimes:
        self._trees.of(1).load([Verify(slot, Tree.root(0), 1)])
        if draft:
            self.draft(lambda: [function() for function in self._draft_functions[:1]])
        self.accept(self._timed_forward(1, size, [0, 1]))
        _, times = self.read_back()
        return times

    def capture_next(self) -> bool:
        if self._pool is None:
            return False
        while self._later_drafts:
            function = self._later_drafts.pop(0)
            if not function.captured:
                function.try_capture(self._pool)
                return True
        if self._later:
            self._prepare(*self._later[0])
            return True
        return False

    def _shape(self, sequences: int, rows: int, largest: int) -> tuple[int, int]:
        shape = super()._shape(sequences, rows, largest)
        if self._pool is None or shape not in self._later:
            return shape
        self._wanted[shape] += 1
        larger = [
            (size, capacity)
            for (capacity, size), forward in self._forwards.items()
            if forward.captured and capacity >= max(2, shape[0]) and size >= shape[1]
            if largest <= tree_rows(capacity)
        ]
        if larger and self._wanted[shape] < _PATIENCE:
            size, capacity = min(larger)
            return capacity, size
        self._prepare(*shape)
        return shape

    def _prepare(self, capacity: int, size: int) -> None:
        """Capture a step of several sequences; without rows it changes no state."""
        self._later.remove((capacity, size))
        self._trees.of(capacity).load([])
        try:
            self._capture_step((capacity, size), self._pool)
        except (RuntimeError, AssertionError) as error:
            for functions in (self._forwards, self._accepts):
                functions[capacity, size].release()
            warn_eager(error)

    def _capture_step(self, key: tuple[int, int], pool: Any) -> None:
        self._forwards[key].capture(pool)
        self._last[key] = self._forwards[key]()
        self._accepts[key].capture(pool)

    def _capacity(self, sequences: int) -> int:
        return next(capacity for capacity in CAPACITIES if sequences <= capacity)

    def _functions(self) -> list[CapturedFunction]:
        keys = [(1, size) for size in self._sizes]
        steps = [functions[key] for key in keys for functions in (self._forwards, self._accepts)]
        return [*self._first_drafts, *steps]

    def _read(self, flat: Tensor, first: Tensor | None) -> None:
        self._host_acceptance = self._pinned[: len(flat)]
        self._host_acceptance.copy_(flat, non_blocking=True)
        if first is not None:
            self._host_first = self._pinned_first[: len(first)]
            self._host_first.copy_(first, non_blocking=True)

    def _run_forward(self, capacity: int, size: int) -> Forward:
        self._last[capacity, size] = forward = self._forwards[capacity, size]()
        return forward

    def _run_accept(self, forward: Forward) -> Acceptance:
        return self._accepts[len(forward.step.slots), forward.step.rows]()

    def _accept_last(self, key: tuple[int, int]) -> Acceptance:
        return self._accept(self._last[key])

    def _commit_draft(self, forward: Forward, acceptance: Acceptance) -> None:
        features, step = forward.features, forward.step
        rows = acceptance.source[:, : len(features)]
        if step.first is not None:
            rows = (rows + step.first[:-1, None]).clamp(max=len(features) - 1)
        tokens = acceptance.tokens[:, : len(features)]
        self._drafter.commit(features, DevicePaths(step.slots, rows, acceptance.counts, tokens))


def _batched_sizes(slots: int) -> list[tuple[int, int]]:
    """Return the capacities and rows of steps of several sequences, those that hold most others first."""
    # The step of a capacity has more sequences than the capacity before it, and so as many rows.
    bounds = [(low, n) for low, n in pairwise(CAPACITIES) if low < slots]
    keys = [(n, size) for low, n in bounds for size in reversed(SIZES) if size > low]
    return sorted(keys, key=lambda key: key[1] < MAX_ROWS)
