"""A step in parts over tensors that stay where they are: verify, then draw, walk and keep. Knows no requests.

Padded, a step has one of a few sizes: rows beyond the tree hang below nothing, no walk reaches them, and
every size can be captured as CUDA graphs. Otherwise it has exactly the tree's rows, which suits a CPU.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeflash.engine.sampler import FixedDraws, Sampler
from treeflash.kernels.slot_mapping import padded_tree
from treeflash.kernels.tree import ROWS, Walked, walk_tree
from treeflash.models.decoder import Decoder
from treeflash.models.step import SIZES, Step, padded_rows
from treeflash.spec.draft import Drafter
from treeflash.spec.tree import DraftTree
from treeflash.state.graphs import Part
from treeflash.state.sequences import SequenceStates

log = logging.getLogger(__name__)

_STOPS = 64  # tokens that end a walk; what more there are is cut off behind it


@dataclass(frozen=True, slots=True)
class Looked:
    """A tree that the target has looked at; nothing of it is committed."""

    step: Step
    features: Tensor  # [T, taps * width]
    logits: Tensor  # [T, vocabulary]


class Clock:
    """Seconds between the parts of a step, as the device sees them; asked when the last mark is passed.

    A step marks: 0 and 1 around the proposal, 2 and 3 around the pass, 4 and 5 around what decides.
    """

    def __init__(self, device: torch.device):
        marks = 6
        self._times = [0.0] * marks
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(marks)]

    def mark(self, number: int) -> None:
        if self._events:
            self._events[number].record()
        else:
            self._times[number] = time.perf_counter()

    def wait(self) -> None:
        """Until the device has passed the last mark; what was enqueued behind it may still run."""
        if self._events:
            self._events[-1].synchronize()

    def seconds(self, first: int, last: int) -> float:
        if self._events:
            return self._events[first].elapsed_time(self._events[last]) / 1000
        return self._times[last] - self._times[first]


class StepParts:
    """One sequence's steps, in slot 0."""

    def __init__(
        self, target: Decoder, states: SequenceStates, drafter: Drafter, *, max_rows: int, padded: bool
    ):
        device = target.device
        self._target, self._states, self._drafter = target, states, drafter
        self._slots = torch.zeros(1, dtype=torch.int64, device=device)
        self._tree = torch.zeros(4, ROWS, dtype=torch.int64, device=device)
        self._limits = torch.ones(2, dtype=torch.int64, device=device)  # rows of the tree, rows of its walk
        self._stops = torch.full((_STOPS,), -1, dtype=torch.int64, device=device)
        on_device = device.type == "cuda"
        self._staged = torch.zeros(4, ROWS, dtype=torch.int64, pin_memory=on_device)
        self._staged_limits = torch.zeros(2, dtype=torch.int64, pin_memory=on_device)
        self._decided = torch.zeros(4 + 3 * ROWS, dtype=torch.int64, pin_memory=on_device)
        self.clock = Clock(device)  # of the step that is being enqueued
        self._spare_clock = Clock(device)  # the next step may begin before this one's marks are read
        self.draws: FixedDraws | None = None
        self.draft_parts: list[Part] = []
        self.sizes: list[int] = []
        self._looks: dict[int, Part[Looked]] = {}
        self._walks: dict[int, Part[Walked]] = {}
        if padded:
            self.draws = FixedDraws(ROWS, target.spec.vocab_size, device)
            self.draft_parts = drafter.fix(self.draws.rank)
            self.sizes = [size for size in SIZES if size <= padded_rows(max_rows)]
        for size in self.sizes:
            self._looks[size] = Part(lambda size=size: self._look(size))
            self._walks[size] = Part(lambda size=size: self._walk(self._looked(size)))
        self._last: dict[int, Looked] = {}
        self._walked: Walked | None = None

    @property
    def captured(self) -> bool:
        return bool(self.sizes) and all(part.captured for part in self._parts())

    def size(self, rows: int) -> int:
        """Rows that a step with so many in its tree has."""
        return padded_rows(rows) if self.sizes else rows

    def begin(self, stop_ids: Sequence[int]) -> None:
        """A request begins, whose walks end at these tokens."""
        stops = list(stop_ids)[:_STOPS]
        self._stops.copy_(torch.tensor(stops + [-1] * (_STOPS - len(stops))))

    def load(self, tree: DraftTree, room: int) -> None:
        """The tree of the coming step, of which at most `room` rows may be accepted."""
        if tree.packed is not None:
            self._tree.copy_(tree.packed)
        else:
            tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
            depths, ancestors = [0], [1]
            for row, parent in enumerate(parents[1:], 1):
                depths.append(depths[parent] + 1)
                ancestors.append(ancestors[parent] | 1 << row)
            signed = [bits - 2**64 if bits >= 2**63 else bits for bits in ancestors]
            self._staged[:, : len(tree)] = torch.tensor([tokens, parents, signed, depths])
            self._tree.copy_(self._staged, non_blocking=True)
        self._staged_limits.copy_(torch.tensor([len(tree), room]))
        self._limits.copy_(self._staged_limits, non_blocking=True)

    def look(self, rows: int) -> Looked:
        """The target's pass over the loaded tree of so many rows."""
        size = self.size(rows)
        self.clock.mark(2)
        looked = self._looks[size]() if self.sizes else self._look(size)
        self.clock.mark(3)
        if self.sizes:
            self._last[size] = looked
        return looked

    def look_behind(self) -> Looked:
        """The pass over the token that the walk of a lone root gives, before the host knows it.

        The rest of the loaded tree, and the limits of its walk, are those of the next one, too.
        """
        assert self._walked is not None
        self.clock, self._spare_clock = self._spare_clock, self.clock
        self._tree[0, :1].copy_(self._walked.next_token)
        return self.look(1)

    def walk(self, looked: Looked, sampler: Sampler, masks: Sequence | None = None) -> Walked:
        """Draws behind every row, walks, and keeps the path; to be read when the clock has been waited for.

        masks: what may follow each row, where the request has such limits.
        """
        self.clock.mark(4)
        if self.draws is None:
            walked = self._walk(looked, sampler, masks or ())
        else:
            if masks:
                self.draws.allow(masks)
            walked = self._walks[looked.step.rows]()
        self._walked = walked
        if walked.flat.is_cuda:
            self._decided.copy_(walked.flat, non_blocking=True)
            walked = Walked(self._decided)
        self.clock.mark(5)
        return walked

    def shown(self, rows: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the loaded tree."""
        tokens, parents = self._tree[:2, :rows].tolist()
        return tokens, parents

    def capture(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Makes graphs of all parts, the largest first. If that fails, a warning, and steps as they are.

        Leaves rubbish in the slot: it has to be opened anew.
        """
        pool, total = torch.cuda.graph_pool_handle(), len(self.sizes) + len(self.draft_parts)
        self._limits.fill_(1)
        try:
            for done, part in enumerate(self.draft_parts, 1):
                part.capture(pool)
                if progress is not None:
                    progress(done, total)
            for done, size in enumerate(reversed(self.sizes), 1 + len(self.draft_parts)):
                self._looks[size].capture(pool)
                # A walk's graph reads the tensors that the look's graph writes.
                self._last[size] = self._looks[size]()
                self._walks[size].capture(pool)
                if progress is not None:
                    progress(done, total)
            torch.cuda.synchronize()
        except (RuntimeError, AssertionError) as error:
            for part in self._parts():
                part.release()
            self._last = {}
            reason = str(error).partition("\n")[0]
            shown = log.isEnabledFor(logging.DEBUG)
            log.warning("steps run without CUDA graphs, more slowly: %s", reason, exc_info=shown)
            return False
        return True

    def _parts(self) -> list[Part]:
        steps = [part for size in reversed(self.sizes) for part in (self._looks[size], self._walks[size])]
        return [*self.draft_parts, *steps]

    def _looked(self, size: int) -> Looked:
        looked = self._last.get(size)
        assert looked is not None, f"no tree of {size} rows has been looked at"
        return looked

    def _look(self, size: int) -> Looked:
        lengths = self._states.buffers.lengths
        rows = padded_tree(self._tree, self._limits[:1], self._slots, lengths, size=size)
        tokens, parents, ancestors, positions = rows.unsqueeze(1).unbind()
        step = Step(self._slots, tokens, positions, parents, ancestors)
        features, logits = self._target.verify(step, self._states.buffers, taps=self._drafter.taps)
        return Looked(step, features[0], logits[0])

    def _walk(self, looked: Looked, sampler: Sampler | None = None, masks: Sequence = ()) -> Walked:
        step = looked.step
        assert step.parents is not None and step.ancestors is not None
        tokens, parents, ancestors = step.tokens[0], step.parents[0], step.ancestors[0]
        after = step.positions[0] + 1
        if self.draws is not None:
            chosen, written = self.draws.draw(looked.logits, after, tokens, ancestors), self.draws.written
        else:
            assert sampler is not None
            chosen, written = sampler.draw(looked.logits, after, tokens, step.visible()[0], masks), None
        walked = walk_tree(
            tokens, parents, ancestors, chosen, stops=self._stops, room=self._limits[1:], written=written
        )
        self._states.keep(step, walked.last)
        if self.draws is not None:
            self._drafter.keep(looked.features[walked.source[: step.rows]], walked.count)
        return walked
