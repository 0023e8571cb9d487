"""A small model of the target's vocabulary as a proposer: a decoder with a state of its own."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.config import DraftConfig
from bough.kernels.kv_cache.format import FORMATS
from bough.kernels.runtime.device import on_device
from bough.kernels.sampling import RowOwners
from bough.kernels.tree import MAX_ROWS
from bough.models.decoder import Target
from bough.models.spec import ModelSpec
from bough.models.step import Step, padded_rows
from bough.spec.costs import StepCosts
from bough.spec.draft_model import NoDraftModel
from bough.spec.drafter import Rank
from bough.spec.expander import Expander, Growth, GrowthLimits, Nodes
from bough.spec.tree import Proposal
from bough.state.graphs import StagedNumbers
from bough.state.sequences import PAGE, CacheConfig, SequenceStates

SMALL_KV = (FORMATS["f16"], FORMATS["f16"])  # its numbers never reach the text
SMALL_PIECE = 512  # tokens of a text that are read at a time
RECENT = 16  # tokens that a call reads by itself, as many as a step accepts; more are a backlog
# Of a call: rows of its tree, and nodes continued by one forward pass.
SMALL_ROWS, SMALL_BEAMS = 24, 4
# Forward passes that a captured call can make, the first one to read: the more, the fewer nodes in each.
_PASSES = (2, 4, 7, 13)
# Probability of the path to the node that a forward pass is made for, and to others beside it, at least.
_LEAST, _LEAST_BESIDE = 0.3, 0.1
_REMEMBERED = 16  # calls, by which the next one's passes are expected


def small_states(
    spec: ModelSpec,
    draft: DraftConfig,
    *,
    max_ctx: int,
    texts: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> SequenceStates:
    """Return the state of a small model for some texts: on a GPU with pages for a whole one and some more."""
    static = torch.device(device).type != "cpu"
    max_ctx = min(max_ctx, spec.context_length, draft.context or spec.context_length)
    pages = -(-(max_ctx + SMALL_ROWS) // PAGE) + 2 * texts if static else None
    cache, shape = CacheConfig(*SMALL_KV, pages=pages), {"slots": texts + 1, "max_rows": SMALL_ROWS}
    return SequenceStates(
        spec, max_ctx=max_ctx, **shape, device=device, cache=cache, input_dtype=dtype, static=static
    )


@dataclass(slots=True)
class _Reading:
    """What the model has read of one text."""

    slot: int  # of its own states
    tokens: list[int] = field(default_factory=list)  # committed, at the end of the next call


class SmallModel(NoDraftModel):
    """A small decoder that reads the same texts: a `DraftModel`.

    It needs no features: what was accepted it reads, from the text, in a call's first forward pass. For each
    round of a call the whole tree so far is verified again: earlier rows cost little beside a pass, and no
    state within a tree has to be kept. Nothing is saved: what was read of a text stays until its slot is
    needed, and the next text goes on after their common beginning.
    """

    def __init__(
        self,
        model: Target,
        states: SequenceStates,
        *,
        vocabulary: int,
        budget: int = SMALL_ROWS,
        costs: StepCosts | None = None,
        static: bool = False,
    ):
        """`states`: with a slot more than there are texts; `vocabulary`: the target's; `budget` of a tree.

        `costs` of the target's steps; without them each call looks as far as it can. `static`: calls have
        fixed shapes and read nothing back, as CUDA graphs need it.
        """
        self._model, self._states, self._costs, self._static = model, states, costs, static
        self._vocabulary, self._budget, self._device = vocabulary, budget, model.device
        self._spare = states.open()  # of sequences that are missing in a call, or too long
        states.reserve(self._spare, SMALL_ROWS)
        self._idle = [_Reading(states.open()) for _ in states.lengths[1:]]
        self._readings: dict[int, _Reading] = {}  # by the target's slot
        # By the target's slot: own slot, tokens that the next call reads, and these.
        self._staged = StagedNumbers(len(self._idle), 2 + RECENT, device=self._device)
        for slot in range(len(self._idle)):
            self._stage(slot, self._spare, ())
        # After the last token that was read, by the target's slot; the last one is spare.
        self._hidden = torch.zeros(len(states.lengths), model.spec.width, device=self._device)
        self.pass_counts = _PASSES if static else (1,)
        # Of the last texts: the probability of the best path before each pass, and where it ended.
        self._followed: deque[list[float]] = deque(maxlen=_REMEMBERED)

    @property
    def next_passes(self) -> float:
        """As many as the last calls would have made by the costs of now."""
        usual, least = 1.0, self._limits().least
        if self._costs is None:
            usual = _PASSES[-1]
        elif self._followed:
            usual += sum(sum(p >= least for p in path) for path in self._followed) / len(self._followed)
        if not self._static:
            return usual
        return next((count for count in _PASSES if count >= round(usual)), _PASSES[-1])

    def begin(self, slot: int) -> None:
        if (reading := self._readings.pop(slot, None)) is not None:
            self._idle.append(reading)
            self._stage(slot, self._spare, ())

    def observe(self, proposal: Proposal) -> None:
        """Learn how likely the path of best children was, as far as a call followed it."""
        assert proposal.given is not None
        reached = proposal.given[:, 0] != -2
        self._followed.append(proposal.scores[reached, 0].cumsum(0).exp().tolist())

    def unread(self, slot: int, text: Sequence[int]) -> int:
        reading = self._readings.get(slot) or self._attached(slot, text)
        return max(0, len(text) - len(reading.tokens) - RECENT) if self._fits(text) else 0

    def flush(self, slot: int, text: Sequence[int] = ()) -> int:
        if not text:
            return 0
        reading = self._readings.get(slot) or self._attached(slot, text)
        if not self._fits(text) or not self._provide(reading, len(text) + SMALL_ROWS):
            self._stage(slot, self._spare, ())
            return 0
        rest = text[len(reading.tokens) :]
        backlog = len(rest) - 1 if len(rest) > RECENT else 0
        self._read(reading, rest[:backlog])
        rest = rest[backlog:]
        self._states.reserve(reading.slot, len(rest) + SMALL_ROWS)
        self._stage(slot, reading.slot, rest)
        reading.tokens += rest
        self._states.lengths[reading.slot] += len(rest)
        return backlog

    def candidates(
        self, anchors: Tensor, slots: Tensor, rank: Rank, count: int, chains: Tensor | None = None
    ) -> Proposal:
        """Return what the model proposes after the anchors [S], the last tokens of the texts."""
        if self._static:
            rows, rounds = min(SMALL_ROWS, MAX_ROWS // len(slots)), round(self.passes) - 1
            growth = Growth(rounds, min(SMALL_BEAMS, rows // rounds, count), self.depth)
            return Expander(anchors, _CallRows(self, anchors, slots, rank, count), growth).proposal()
        proposals, self.passes = [], 0
        for anchor, slot in zip(anchors.split(1), slots.split(1), strict=True):
            rows = _CallRows(self, anchor, slot, rank, count)
            growth = Growth(SMALL_ROWS, min(SMALL_BEAMS, count), self.depth)
            proposals.append(Expander(anchor, rows, growth, self._limits()).proposal())
            self.passes = max(self.passes, rows.passes)
        return Proposal.stack([proposal.one(0) for proposal in proposals])

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Read pieces of a text that is discarded: a dry run finds their kernels."""
        reading = self._idle[0]
        for rows in (SMALL_PIECE, 2 * MAX_ROWS):
            rows = min(rows, self._states.max_ctx)
            if self._provide(reading, rows):
                self._read(reading, [0] * rows)
            self._empty(reading)

    def read_tail(self, slots: Tensor) -> tuple[Tensor, Tensor, int]:
        """Read and commit what texts [S] have after what was read.

        Return their own slots [S], hidden states [S, 1, width] after their last tokens, and passes. A slot
        that comes again, as where sequences are missing, has the spare one.
        """
        numbers, order = self._staged.buffer[slots], torch.arange(len(slots), device=self._device)
        first = (slots[:, None] == slots).int().argmax(1) == order
        own = torch.where(first, numbers[:, 0], self._spare)
        counts = torch.where(first, numbers[:, 1], 0)
        rows = RECENT if self._static else int(counts.max())
        if rows:
            chain = torch.arange(rows, device=self._device).expand(len(slots), -1)
            tree = torch.stack([numbers[:, 2 : 2 + rows], chain - 1, (2 << chain) - 1, chain], 1)
            hidden, step = self.verify(own, tree)
            self._states.commit(step, counts - 1)
            last = hidden[order, (counts - 1).clamp(min=0)]
            self._hidden[torch.where(counts > 0, slots, len(self._hidden) - 1)] = last
            # A call that is made again reads nothing.
            self._staged.buffer[:, 1].scatter_(0, slots, 0)
        return own, self._hidden[slots][:, None], int(rows > 0)

    def verify(self, own: Tensor, tree: Tensor) -> tuple[Tensor, Step]:
        """Run a forward pass over the rows of trees [S, 4, R] in own slots [S]: tokens, parents, ancestors,
        depths.

        Return hidden states [S, R, width].
        """
        sequences, _, rows = tree.shape
        tokens, parents, ancestors, depths = tree.transpose(0, 1).flatten(1)[:, None].unbind()
        tokens = tokens.clamp(0, self._model.spec.vocab_size - 1)  # images, and what the file lacks
        begins = torch.arange(sequences + 1, device=self._device) * rows
        owners = RowOwners(own.repeat_interleave(rows), begins[:-1].repeat_interleave(rows))
        positions = self._states.buffers.lengths[owners.slots] + depths
        several = (begins, owners, MAX_ROWS // 2) if sequences > 1 else (None, owners)
        step = Step(own, tokens, positions, parents, ancestors, *several)
        hidden = self._model.forward(step, self._states.buffers).hidden
        return hidden.view(sequences, rows, -1), step

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V] of the target's tokens: the smaller file may lack the last ones."""
        logits = self._model.draft_logits(hidden)[:, : self._vocabulary]
        return pad(logits, (0, self._vocabulary - logits.shape[1]), value=-torch.inf)

    def padded(self, sequences: int, rows: int) -> int:
        """Return how many rows a tree of some rows has in a pass."""
        return padded_rows(sequences * rows) // sequences if self._static else rows

    def texts(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return which texts [S] can be proposed for, and how many of their tokens are committed."""
        own = self._staged.buffer[slots, 0]
        return own != self._spare, self._states.buffers.lengths[own]

    def _limits(self) -> GrowthLimits:
        """Return the least probability that a pass is made for, and that of rows beside: by what they cost.

        A token that is accepted saves at most a plain step.
        """
        if self._costs is None:
            return GrowthLimits(1e-9, 1e-9, self._budget, SMALL_ROWS)
        plain = self._costs.of(1)
        row = max(0.0, self._costs.of(4) - plain) / 3
        least = min(max(_LEAST, (self._costs.draft_call() + row) / plain), 0.95)
        return GrowthLimits(least, max(_LEAST_BESIDE, 1.5 * row / plain), self._budget, SMALL_ROWS)

    def _stage(self, slot: int, own: int, tokens: Sequence[int]) -> None:
        self._staged.wait()
        numbers = self._staged.numbers[slot]
        numbers[0], numbers[1], numbers[2 : 2 + len(tokens)] = own, len(tokens), tokens
        self._staged.copy(slice(slot, slot + 1))

    def _read(self, reading: _Reading, tokens: Sequence[int]) -> None:
        """Process and commit the next tokens of a text."""
        slots = on_device([reading.slot], self._device)
        for start in range(0, len(tokens), SMALL_PIECE):
            piece = tokens[start : start + SMALL_PIECE]
            self._states.reserve(reading.slot, len(piece))
            known = on_device([piece], self._device).clamp(0, self._model.spec.vocab_size - 1)
            lengths, span = self._states.buffers.lengths[slots], len(reading.tokens) + len(piece)
            step = Step.chunk(slots, known, lengths, span=span)
            self._model.forward(step, self._states.buffers, tapped=0)
            self._states.advance(step, [reading.slot])
            reading.tokens += piece

    def _fits(self, text: Sequence[int]) -> bool:
        return len(text) + SMALL_ROWS <= self._states.max_ctx

    def _provide(self, reading: _Reading, length: int) -> bool:
        """Drop texts that nobody reads while pages for a text of this length are short; return whether there
        are."""
        rows = length - self._states.lengths[reading.slot]
        for other in self._idle:
            if other is not reading and self._states.shortage(reading.slot, rows):
                self._empty(other)
        return not self._states.shortage(reading.slot, rows)

    def _empty(self, reading: _Reading) -> None:
        self._states.close(reading.slot)
        reading.slot, reading.tokens = self._states.open(), []

    def _attached(self, slot: int, text: Sequence[int]) -> _Reading:
        """Return the reading that has most in common with a text, without what differs."""
        best = max(self._idle, key=lambda reading: self._usable(reading, text))
        self._idle.remove(best)
        keep = self._usable(best, text)
        if not keep:
            self._empty(best)
        elif keep < len(best.tokens):
            self._states.truncate(best.slot, keep)
            best.tokens = best.tokens[:keep]
        self._readings[slot] = best
        return best

    def _usable(self, reading: _Reading, text: Sequence[int]) -> int:
        """Return how many tokens of a reading a text can go on after: its last one has to be read."""
        common = 0
        for mine, token in zip(reading.tokens, text[:-1], strict=False):
            if mine != token:
                break
            common += 1
        whole = common == len(reading.tokens) or self._states.recurrent is None
        return common if whole else 0


class _CallRows:
    """A `PathScorer`: the rows of a call's trees [S, 4, R], all of which each pass verifies again."""

    def __init__(self, model: SmallModel, anchors: Tensor, slots: Tensor, rank: Rank, count: int):
        self._model, self._anchors, self._slots, self._rank, self._count = model, anchors, slots, rank, count
        self._own, self._last, self.passes = model.read_tail(slots)
        self._known, self._starts = model.texts(slots)
        # A slot that comes again has the rows of the first.
        self._first = (slots[:, None] == slots).int().argmax(1)
        # Rows that have no node yet are roots of their own.
        columns = torch.arange(SMALL_ROWS, device=slots.device)
        empty = torch.stack([0 * columns, 0 * columns - 1, 1 << columns, 0 * columns])
        self._tree, self._rows = empty.repeat(len(slots), 1, 1), -1  # -1: of the anchor, which has been read

    def __call__(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        hidden = self._last if self._rows < 0 else self._verified(nodes)
        self._rows = max(self._rows, 0)
        sequences, width = hidden.shape[:2]
        logits = self._model.logits(hidden.flatten(0, 1)).unflatten(0, (sequences, width))
        positions = self._starts[:, None] + nodes.depths
        ids, scores = self._rank(logits, positions, self._anchors, self._slots, self._count)
        return ids, scores.masked_fill(~self._known[:, None, None], -torch.inf)

    def _verified(self, nodes: Nodes) -> Tensor:
        """Add the nodes [S, W] to the trees; return their hidden states [S, W, width]."""
        begin, end = self._rows, self._rows + nodes.tokens.shape[1]
        numbers = torch.arange(begin, end, device=self._slots.device).expand_as(nodes.tokens)
        # An expansion's row is its number less the anchor's; the anchor itself is committed.
        above = nodes.above - 1
        parents = above.gather(2, (nodes.depths - 1)[..., None])[..., 0]
        places = torch.arange(above.shape[-1], device=above.device)
        inside = (places > 0) & (places < nodes.depths[..., None])
        bits = torch.where(inside, 1 << above.clamp(min=0), 0).sum(-1) + (1 << numbers)
        self._tree[..., begin:end] = torch.stack([nodes.tokens, parents, bits, nodes.depths - 1], 1)
        self._rows, self.passes = end, self.passes + 1
        hidden, _ = self._model.verify(self._own, self._tree[..., : self._model.padded(len(bits), end)])
        return hidden[self._first, begin:end]
