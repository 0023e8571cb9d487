"""A small model of the target's vocabulary as a proposer: a decoder with a state of its own."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.models.decoder import Target
from bough.models.step import Step
from bough.spec.costs import COST_RATE, StepCosts
from bough.spec.drafter import Rank
from bough.spec.tree import Proposal
from bough.state.draft_ring import SavedRings
from bough.state.sequences import SequenceStates

_DEPTH = 15  # of a proposal: prompt lookup may go deeper than the model
_PIECE = 512  # tokens of a text that are read at a time
_RECENT = 8  # tokens that a call reads by itself; more are a backlog
# Of a call: rows of its tree, nodes continued by one forward pass, continuations of each, and paths that a
# proposal takes as chains.
SMALL_ROWS, _BEAMS, _CHILDREN, _CHAINS = 24, 4, 3, 30
# Probability of the path to the node that a forward pass is made for, and to others beside it, at least.
_LEAST, _LEAST_BESIDE = 0.3, 0.1
_REMEMBERED = 16  # calls, by which the next one's passes are expected


@dataclass(slots=True)
class _PathNode:
    token: int
    score: float  # log probability after its parent
    worth: float  # log probability of the path to it
    parent: "_PathNode | None"
    depth: int  # of the first tokens 0
    row: int = -1  # in the tree that the model verifies; -1: it has not been continued
    children: "list[_PathNode]" = field(default_factory=list)  # best first

    def path(self) -> "list[_PathNode]":
        """Return the nodes from the first token to this one."""
        return [*(self.parent.path() if self.parent else ()), self]


class _Search:
    """The nodes of one call, from the candidates after the anchor on."""

    def __init__(self, ids: Tensor, scores: Tensor, *, budget: int):
        """ids, scores [k]: the candidates; `budget`: nodes of a tree, at most."""
        self._ids, self._scores, self._budget = ids, scores, budget
        self.first = _nodes(None, ids.tolist(), scores.tolist())
        self.rows: list[_PathNode] = []  # continued, in the order of their rows

    def best(self, least: float, beside: float) -> list[_PathNode]:
        """Return the likeliest nodes to continue, with new rows; none if the best has less than `least`."""
        if self.likeliest < least:
            return []
        likely = [node for node in self._open() if node.worth >= math.log(min(beside, least))]
        nodes = likely[: min(_BEAMS, SMALL_ROWS - len(self.rows))]
        for node in nodes:
            node.row = len(self.rows)
            self.rows.append(node)
        return nodes

    @property
    def likeliest(self) -> float:
        """Return the probability of the best path that can be continued; 0: there is none."""
        ends = self._open()
        return math.exp(ends[0].worth) if ends and len(self.rows) < SMALL_ROWS else 0.0

    def _open(self) -> list[_PathNode]:
        """Return the nodes to continue, best first: those whose children may be in a tree of the budget."""
        worths = sorted((node.worth for node in self._all()), reverse=True)
        least = worths[self._budget - 1] if len(worths) >= self._budget else -math.inf
        ends = [node for node in self._ends() if node.depth < _DEPTH - 1 and node.worth > least]
        return sorted(ends, key=lambda node: -node.worth)

    def tree(self) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the rows; those after the anchor have no parent."""
        parents = [node.parent.row if node.parent else -1 for node in self.rows]
        return [node.token for node in self.rows], parents

    def proposal(self) -> Proposal:
        """Return candidates after the anchor and along the path of best children; other paths as chains."""
        spine, width = list(self._spine()), len(self._ids)
        best = [node.children[:width] for node in spine]
        leaves = [node.path() for node in self._ends() if node.parent is not None]
        leaves = sorted(leaves, key=lambda path: -path[-1].worth)[:_CHAINS]
        more = (0, 0, 0, _DEPTH - 1 - len(spine))
        ids = _table([[node.token for node in nodes] for nodes in best], width, -1)
        scores = _table([[node.score for node in nodes] for nodes in best], width, -math.inf)
        given = _table(
            [[node.token for node in spine[:depth]] for depth in range(len(spine) + 1)], _DEPTH, -1
        )
        return Proposal(
            pad(torch.cat([self._ids[None], ids]), more, value=-1),
            pad(torch.cat([self._scores[None], scores]), more, value=-math.inf),
            _table([[node.token for node in path] for path in leaves], _DEPTH, -1),
            _table([[node.score for node in path] for path in leaves], _DEPTH, -math.inf),
            # No text follows a path of -2: depths that were not drafted are not learnt from.
            given=pad(given, more, value=-2),
        )

    def _spine(self) -> Iterator[_PathNode]:
        """Yield the path of best children, as far as it was continued."""
        nodes = self.first
        while nodes and nodes[0].row >= 0:
            yield nodes[0]
            nodes = nodes[0].children

    def _ends(self) -> list[_PathNode]:
        """Return the nodes that have not been continued."""
        return [node for node in self._all() if node.row < 0]

    def _all(self) -> list[_PathNode]:
        return [*self.first, *(child for node in self.rows for child in node.children)]


def _nodes(parent: _PathNode | None, tokens: Sequence[int], scores: Sequence[float]) -> list[_PathNode]:
    worth, depth = (parent.worth, parent.depth + 1) if parent else (0.0, 0)
    pairs = [(token, score) for token, score in zip(tokens, scores, strict=True) if score > -math.inf]
    return [_PathNode(token, score, worth + score, parent, depth) for token, score in pairs]


def _table(lines: Sequence[Sequence[float]], width: int, value: float) -> Tensor:
    """Return lines [n, width] of the value's type, padded with it."""
    padded = [[*line, *[value] * (width - len(line))] for line in lines]
    dtype = torch.int64 if isinstance(value, int) else torch.float32
    return torch.tensor(padded, dtype=dtype).reshape(len(lines), width)


@dataclass(slots=True)
class _Reading:
    """What the model has read of one text."""

    slot: int  # of its own states
    tokens: list[int] = field(default_factory=list)  # committed
    rest: list[int] = field(default_factory=list)  # that the next call reads
    hidden: Tensor | None = None  # [1, width] after the last token; None: the text is too long
    search: _Search | None = None  # whose rows lie after the committed tokens


class SmallModel:
    """A small decoder that reads the same texts: a `DraftModel`.

    It needs no features: what was accepted it learns from the text. Of a path that it proposed the rows are
    committed as they are, and the rest is read by the next call's first forward pass. For each depth of a
    call the whole tree so far is verified again: earlier rows cost little beside a pass, and no state within
    a tree has to be kept. What was read of a text stays until its slot is needed: the next text goes on after
    their common beginning.
    """

    depth = _DEPTH
    taps: tuple[int, ...] = ()
    context_length = 0

    def __init__(
        self,
        model: Target,
        states: SequenceStates,
        *,
        vocabulary: int,
        budget: int = SMALL_ROWS,
        costs: StepCosts | None = None,
    ):
        """`vocabulary`: the target's; `budget` of a tree; `costs` of the target's steps.

        Without costs each call looks as far as the budget can.
        """
        self._model, self._states, self._costs = model, states, costs
        self._vocabulary, self._budget = vocabulary, budget
        self._idle = [_Reading(states.open()) for _ in states.lengths]
        self._readings: dict[int, _Reading] = {}  # by the target's slot
        self._pass_s = 0.0  # of a forward pass beyond the first
        self.passes = 1.0  # of the last call, for each text
        # Of the last texts: the probability of the best path before each pass, and where it ended.
        self._followed: deque[list[float]] = deque(maxlen=_REMEMBERED)

    @property
    def next_passes(self) -> float:
        """As many as the last calls would have made by the costs of now."""
        if not self._followed:
            return 1.0
        least = self._limits()[0]
        return 1 + sum(sum(p >= least for p in followed) for followed in self._followed) / len(self._followed)

    def begin(self, slot: int) -> None:
        if (reading := self._readings.pop(slot, None)) is not None:
            self._idle.append(reading)

    def append(self, slot: int, features: Tensor, *, skipped: int = 0) -> None: ...

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None: ...

    def rollback(self, slot: int, count: int) -> None: ...

    def save(self, slot: int) -> SavedRings | None:
        """Return nothing: what was read is found again by its tokens, or read again."""
        return None

    def restore(self, slot: int, saved: SavedRings) -> None: ...

    def unread(self, slot: int, text: Sequence[int]) -> int:
        reading = self._readings.get(slot) or self._attached(slot, text)
        return max(0, len(text) - len(reading.tokens) - _RECENT) if self._fits(text) else 0

    def flush(self, slot: int, text: Sequence[int] = ()) -> int:
        if not text:
            return 0
        reading = self._readings.get(slot) or self._attached(slot, text)
        if not self._fits(text):
            reading.rest, reading.hidden = [], None
            return 0
        self._commit_path(reading, text)
        reading.rest = list(text[len(reading.tokens) :])
        backlog = len(reading.rest) - 1 if len(reading.rest) > _RECENT else 0
        if backlog:
            self._read(reading, reading.rest[:backlog])
            reading.rest = reading.rest[backlog:]
        return backlog

    def candidates(
        self, anchors: Tensor, slots: Tensor, rank: Rank, count: int, chains: Tensor | None = None
    ) -> Proposal:
        """Return what the model proposes after the anchors [S], the last tokens of the texts."""
        proposals = [
            self._proposal(*each, rank, count) for each in zip(slots.split(1), anchors.split(1), strict=True)
        ]
        last = [*self._followed][-len(proposals) :]
        self.passes = max(1.0, sum(map(len, last)) / len(proposals))
        most = max(len(proposal.chains) for proposal in proposals)
        return Proposal.stack([_with_chains(proposal, most) for proposal in proposals])

    def _proposal(self, slots: Tensor, anchors: Tensor, rank: Rank, count: int) -> Proposal:
        reading = self._readings[int(slots)]
        if reading.rest:
            self._read(reading, reading.rest)
            reading.rest = []
        if reading.hidden is None:
            nothing = anchors.new_full((count,), -1), torch.full((count,), -math.inf)
            return _Search(*nothing, budget=self._budget).proposal()

        def ranked(hidden: Tensor, depths: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
            """Rank what follows rows [n, width]: [n, count]."""
            positions = torch.tensor([depths]) + len(reading.tokens)
            ids, scores = rank(self._logits(hidden)[None], positions, anchors, slots, count)
            return ids[0], scores[0]

        ids, scores = ranked(reading.hidden, [0], count)
        search = reading.search = _Search(ids[0], scores[0], budget=self._budget)
        least, beside = self._limits()
        self._followed.append(followed := [search.likeliest])
        while nodes := search.best(least, beside):
            start = time.perf_counter()
            hidden = self._verified(reading, search)
            rows, depths = [node.row for node in nodes], [node.depth + 1 for node in nodes]
            found = ranked(hidden[rows], depths, min(_CHILDREN, count))
            for node, tokens, values in zip(nodes, *(part.tolist() for part in found), strict=True):
                node.children = _nodes(node, tokens, values)
            followed.append(search.likeliest)
            self._observe(time.perf_counter() - start)
        return search.proposal()

    @torch.inference_mode()
    def measure(self) -> None:
        """Time a forward pass, so that the first call knows how far ahead it pays to look."""
        for _ in range(3):
            start = time.perf_counter()
            self._read(self._idle[0], [0])
            self._observe(time.perf_counter() - start)

    def _observe(self, seconds: float) -> None:
        """Learn what a pass takes; a faster one counts at once."""
        before = self._pass_s or seconds
        self._pass_s = min(seconds, before + COST_RATE * (seconds - before))

    def _limits(self) -> tuple[float, float]:
        """Return the least probability that a pass is made for, and that of rows beside: by what they cost.

        A token that is accepted saves at most a plain step.
        """
        if self._costs is None:
            return 1e-9, 1e-9
        plain = self._costs.of(1)
        row = max(0.0, self._costs.of(4) - plain) / 3
        least = min(max(_LEAST, (self._pass_s + row) / plain), 0.95)
        return least, max(_LEAST_BESIDE, 1.5 * row / plain)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V] of the target's tokens: the smaller file may lack the last ones."""
        logits = self._model.draft_logits(hidden)[:, : self._vocabulary]
        return pad(logits, (0, self._vocabulary - logits.shape[1]), value=-math.inf)

    def _verified(self, reading: _Reading, search: _Search) -> Tensor:
        """Return the hidden states [rows, width] of the search's rows."""
        tokens, parents = search.tree()
        self._states.reserve(reading.slot, len(tokens))
        slots = torch.tensor([reading.slot])
        lengths = self._states.buffers.lengths[slots]
        step = Step.tree(slots, self._known(tokens), torch.tensor([parents]), lengths)
        return self._model.forward(step, self._states.buffers).hidden[0]

    def _read(self, reading: _Reading, tokens: Sequence[int]) -> None:
        """Process and commit the next tokens of a text."""
        slots = torch.tensor([reading.slot])
        for start in range(0, len(tokens), _PIECE):
            piece = tokens[start : start + _PIECE]
            self._states.reserve(reading.slot, len(piece))
            lengths = self._states.buffers.lengths[slots]
            span = len(reading.tokens) + len(piece)
            step = Step.chunk(slots, self._known(piece), lengths, span=span)
            output = self._model.forward(step, self._states.buffers, tapped=0)
            self._states.advance(step, [reading.slot])
            reading.hidden = output.hidden[0, -1:].clone()
            reading.tokens += piece
        reading.search = None

    def _known(self, tokens: Sequence[int]) -> Tensor:
        """Return tokens [1, n]; another for those of images and for those that the file lacks."""
        return torch.tensor([tokens]).clamp(0, self._model.spec.vocab_size - 1)

    def _fits(self, text: Sequence[int]) -> bool:
        return len(text) + SMALL_ROWS <= self._states.max_ctx

    def _commit_path(self, reading: _Reading, text: Sequence[int]) -> None:
        """Commit the rows of the last call that the text followed, but not the anchor's: it is read again."""
        search, path = reading.search, []
        if search is None:
            return
        nodes = search.first
        for token in text[len(reading.tokens) : -1]:
            node = next((node for node in nodes if node.token == token and node.row >= 0), None)
            if node is None:
                break
            path.append(node.row)
            nodes = node.children
        if path:
            self._states.commit_rows(reading.slot, path, size=len(search.rows))
            self._states.lengths[reading.slot] += len(path)
            reading.tokens += text[len(reading.tokens) : len(reading.tokens) + len(path)]
            reading.search = None

    def _attached(self, slot: int, text: Sequence[int]) -> _Reading:
        """Return the reading that has most in common with a text, without what differs."""
        best = max(self._idle, key=lambda reading: self._usable(reading, text))
        self._idle.remove(best)
        keep = self._usable(best, text)
        if not keep:
            self._states.close(best.slot)
            best.slot = self._states.open()
        elif keep < len(best.tokens):
            self._states.truncate(best.slot, keep)
        best.tokens, best.hidden, best.search = best.tokens[:keep], None, None
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


def _with_chains(proposal: Proposal, count: int) -> Proposal:
    """Return a proposal with `count` chains, the last ones empty."""
    missing = count - len(proposal.chains)
    chains = proposal.chains.new_full((missing, _DEPTH), -1)
    return proposal.with_chains(chains, proposal.chain_scores.new_full((missing, _DEPTH), -math.inf))
