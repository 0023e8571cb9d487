"""The draft call: from anchors to trees, with what is learnt of it."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.kernels.tree import MAX_ROWS
from bough.spec.calibration import LEADING, Calibration, Share, candidates_after
from bough.spec.dflash import DFlashModel
from bough.spec.draft_model import DraftModel
from bough.spec.drafter import Rank
from bough.spec.policy import FEW_ROWS
from bough.spec.tree import Proposal, Tree, build_trees
from bough.state.graphs import CapturedFunction, StagedNumbers

_GROUPS = (1, 2, 4)  # sequences of a call at a time
TREE_WORDS = 5 * MAX_ROWS  # a packed tree and the weights of its rows


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A draft call on the host, to learn from: the leading candidates and the tree they gave."""

    proposals: Sequence[Proposal]  # of each proposer, uncorrected
    tokens: list[int]  # of the tree's rows, without padding
    parents: list[int]
    probabilities: list[float]  # of the path to each row
    packed: Tensor | None = None  # [4, 64] the tree as it was built; None: a part of it
    alone: Sequence["DraftReport"] = ()  # where drafts are compared: the tree that each would have given

    def tree(self, rows: int) -> Tree:
        """Return the best `rows` rows of the tree, on the host."""
        rows = min(rows, len(self.tokens))
        if self.packed is None:
            return Tree.of(self.tokens[:rows], self.parents[:rows])
        return Tree(self.packed, rows)

    def only(self, rows: Sequence[int]) -> "DraftReport":
        """Return the report of a part of the tree that holds the parent of every row; it compares nothing."""
        index = {row: new for new, row in enumerate(rows)}
        return DraftReport(
            self.proposals,
            [self.tokens[row] for row in rows],
            [index.get(self.parents[row], -1) for row in rows],
            [self.probabilities[row] for row in rows],
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence's part of a draft call."""

    slot: int
    anchor: int
    chain: list[int]  # what prompt lookup found
    score: float  # of each token of it
    text: Sequence[int] = ()  # up to the anchor


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Of the trees that draft calls give."""

    depth: int  # at most
    nodes: int
    candidates: int  # of a depth
    spine: float  # the likeliest path is in the tree while its log probability is at least this


class DraftCall:
    """From anchors to trees over static buffers: drafts, ranking, calibration and trees in one function.

    The candidates of a tree are those of the first draft. What others propose is added to them as chains,
    whose scores are a mixture of both drafts'.

    On a GPU a call for many sequences is made for a few of them at a time: their rows fit into the matmuls of
    small steps, and few functions have to be captured.
    """

    def __init__(
        self,
        drafts: Mapping[DraftModel, Calibration],
        share: Share,
        rank: Rank,
        *,
        shape: TreeShape,
        forest: Tensor,
        compares: bool = False,
    ):
        """`share` of the other drafts; `compares`: the tree of each draft alone is reported, too.

        forest [slots, TREE_WORDS]: where the tree of each slot that is asked goes.
        """
        self._drafts, self._calibrations, self._rank = list(drafts), list(drafts.values()), rank
        self._share, self._depth = share, shape.depth
        self._nodes, self._candidates, self._spine = shape.nodes, shape.candidates, shape.spine
        depth, candidates = shape.depth, shape.candidates
        self._leading = min(LEADING, candidates)
        self._forest, self._device = forest, forest.device
        self._on_device = on_device = self._device.type == "cuda"
        # Of a report: tree; of each draft leading candidates, the paths that they follow, their edges.
        self._parts = [2 * depth * self._leading, depth**2, depth * self._leading**2]
        self._trees = 1 + (len(drafts) if compares else 0)
        self._sizes = [*[TREE_WORDS] * self._trees, *[sum(self._parts)] * len(drafts)]
        self._has = [(False, False)] * len(drafts)  # paths and edges in the last reports
        sizes = [size for size in _GROUPS if size == 1 or size * (depth + 1) <= MAX_ROWS]
        # By sequences: slot, anchor, score of the lookup, the lookup.
        self._inputs = {size: self._new(size, 3 + depth) for size in sizes}
        # By sequences and forward passes.
        self._functions = {
            (size, passes): CapturedFunction(partial(self._run, size, passes), sequences=size)
            for size in sizes
            for passes in self._drafts[0].pass_counts
        }
        self._staged = StagedNumbers(MAX_ROWS, 3 + depth, device=self._device)
        self._slot = 0  # of the first sequence of the last call
        self._reports = torch.zeros(MAX_ROWS, sum(self._sizes), dtype=torch.int64, pin_memory=on_device)
        self._asked = 1  # sequences of the last call
        self.backlog = 0, 0.0  # positions that had waited for the last call, and their seconds
        self.passes: float = self._drafts[0].pass_counts[0]  # of the last call

    @property
    def functions(self) -> list[CapturedFunction]:
        """The functions that can be captured as CUDA graphs, that of one sequence first."""
        return list(self._functions.values())

    def __call__(self, asks: Sequence[Ask], *, nodes: int | None = None, short: bool = False) -> None:
        """Launch the call for some sequences; `nodes`: other than usual, never captured.

        `short`: for few positions, on a CPU.
        """
        self._flush(asks)
        for calibration in self._calibrations:
            calibration.correction()
        self._share.table()
        self.passes = self._drafts[0].next_passes
        self._staged.wait()
        rows, self._asked, self._slot = self._staged.numbers, len(asks), asks[0].slot
        for row, ask in zip(rows, asks, strict=False):
            chain = ask.chain[: self._depth]
            row[0], row[1], row[2:3].view(np.float64)[0] = ask.slot, ask.anchor, ask.score
            row[3 : 3 + len(chain)], row[3 + len(chain) :] = chain, -1
        most = max(self._inputs)
        for start in range(0, len(asks), most):
            self._call_some(slice(start, min(start + most, len(asks))), nodes)

    def tree(self, rows: int) -> Tree:
        """Return the best `rows` rows of the last call's first tree.

        The slot's next call overwrites it. On a GPU its last rows may be padding: how many candidates there
        were is not read back.
        """
        return Tree(self._forest[self._slot, : 4 * MAX_ROWS].view(4, MAX_ROWS), rows)

    def report(self) -> "Tensor | list[DraftReport]":
        """Return the last call's reports for `read`; the device must have finished it."""
        return self._reports[: self._asked].clone()

    def reports(self) -> list[DraftReport]:
        """Return the last call's reports, one for each ask; synchronises with the device."""
        if self._on_device:
            torch.cuda.current_stream().synchronize()
        return self.read(self._reports[: self._asked])

    def read(self, reports: "Tensor | list[DraftReport]") -> list[DraftReport]:
        """Return what `report` gave in a form to learn from."""
        assert isinstance(reports, Tensor)
        parts = reports.split(self._sizes, 1)
        learnt = zip(parts[self._trees :], self._has, strict=True)
        proposals = [self._read_learnt(part, *has) for part, has in learnt]
        alone = [self._read_trees(part, []) for part in parts[1 : self._trees]]
        trees = self._read_trees(parts[0], proposals)
        if not alone:
            return trees
        return [replace(each, alone=alone_trees) for each, *alone_trees in zip(trees, *alone, strict=True)]

    def _read_trees(self, words: Tensor, proposals: Sequence[Proposal]) -> list[DraftReport]:
        packed, weights = words[:, : 4 * MAX_ROWS].unflatten(1, (4, MAX_ROWS)).clone(), self._weights(words)
        sizes, weights = (weights > -torch.inf).sum(1).tolist(), weights.exp().tolist()
        tokens, parents = packed[:, 0].tolist(), packed[:, 1].tolist()
        return [
            DraftReport(
                [proposal.one(i) for proposal in proposals],
                tokens[i][:rows],
                parents[i][:rows],
                weights[i][:rows],
                packed[i],
            )
            for i, rows in enumerate(sizes)
        ]

    def learn(self, report: DraftReport, followed: list[int]) -> None:
        """Calibrate each draft by the tokens that followed a call."""
        (first, *others), (first_calibration, *calibrations) = report.proposals, self._calibrations
        for other, calibration in zip(others, calibrations, strict=True):
            for depth, token in enumerate(followed[: first.depth]):
                ours = candidates_after(first, followed[:depth], first_calibration)
                theirs = candidates_after(other, followed[:depth], calibration)
                if ours and theirs:
                    self._share.observe(theirs, ours, depth, token)
        learners = zip(self._drafts, self._calibrations, report.proposals, strict=True)
        for draft, calibration, proposal in learners:
            draft.observe(proposal)
            calibration.observe(proposal, followed)

    def _call_some(self, part: slice, nodes: int | None) -> None:
        """Launch the call for some of the staged asks, as many as a function takes."""
        size = next(size for size in self._inputs if size >= part.stop - part.start)
        inputs, count, passes = self._inputs[size], part.stop - part.start, round(self.passes)
        self._staged.copy(part, into=inputs[:count])
        if count < size:
            inputs[count:] = inputs[0]
        reports = self._functions[size, passes]() if nodes is None else self._run(size, passes, nodes)
        self._reports[part].copy_(reports[:count], non_blocking=True)

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    @staticmethod
    def _weights(reports: Tensor) -> Tensor:
        return word_floats(reports[..., 4 * MAX_ROWS : TREE_WORDS])

    def _run(self, size: int, passes: int, nodes: int | None = None) -> Tensor:
        """Return the reports [size, ...] of the asks in the input buffer."""
        inputs, self._drafts[0].passes = self._inputs[size], passes
        (slots, anchors), chains = inputs[:, :2].T.contiguous(), inputs[:, 3:].contiguous()
        scores = inputs[:, 2:3].contiguous().view(torch.float64).float().expand(chains.shape)
        proposals, built = self._build(anchors, slots, chains, scores, nodes)
        learnt = [self._learnt(index, proposal) for index, proposal in enumerate(proposals)]
        parts = [part for packed, weights in built for part in (packed, word_bits(weights))]
        reports = torch.cat([part.flatten(1) for part in (*parts, *learnt)], 1)
        self._forest.index_copy_(0, slots, reports[:, :TREE_WORDS])
        return reports

    def _flush(self, asks: Sequence[Ask]) -> int:
        """Bring the drafts' states up to date; return the most positions that were missing."""
        return max(draft.flush(ask.slot, ask.text) for draft in self._drafts for ask in asks)

    def _build(
        self, anchors: Tensor, slots: Tensor, chains: Tensor, scores: Tensor, nodes: int | None
    ) -> tuple[list[Proposal], list[tuple[Tensor, Tensor]]]:
        """Return what each draft proposes, and trees with the weights of their rows: the joint one first.

        anchors, slots [S]; chains and their scores [S, depth].
        """
        proposals = self._proposals(anchors, slots, chains)
        corrections = [calibration.correction() for calibration in self._calibrations]
        corrected = [proposal.corrected(each) for proposal, each in zip(proposals, corrections, strict=True)]
        looked_up = (chains[:, None], scores[:, None])
        joined = corrected[0].with_chains(*looked_up)
        for other in corrected[1:]:
            known = corrected[0].scores_of(other.chains, corrections[0])
            joined = joined.with_chains(other.chains, self._share.mixed(other.chain_scores, known))
        trees = [joined, *(each.with_chains(*looked_up) for each in corrected[: self._trees - 1])]
        built = [
            build_trees(anchors, tree, nodes=nodes or self._nodes, spine=self._spine, correction=correction)
            for tree, correction in zip(trees, [corrections[0], *corrections], strict=False)
        ]
        return proposals, built

    def _proposals(self, anchors: Tensor, slots: Tensor, chains: Tensor) -> list[Proposal]:
        """Return what each draft proposes; chains [S, depth]: what prompt lookup found, then -1."""
        first, *others = self._drafts
        proposals = [
            draft.candidates(anchors, slots, self._rank, self._candidates).resized(self._depth)
            for draft in others
        ]
        for other in proposals:
            # Where the first draft scores pairs of tokens, their best path is scored as a lookup is.
            chains = torch.where(chains >= 0, chains, other.ids[..., 0])
        known = pad(chains, (0, first.depth - self._depth), value=-1)
        proposal = first.candidates(anchors, slots, self._rank, self._candidates, known)
        # Of one draft alone a short call has fewer depths.
        depth = self._depth if others else min(self._depth, proposal.depth)
        return [proposal.resized(depth), *proposals]

    def _learnt(self, index: int, proposal: Proposal) -> Tensor:
        """Return what of a draft's proposal is learnt from, of a fixed size."""
        ids, scores = proposal.ids[..., : self._leading], proposal.scores[..., : self._leading]
        self._has[index] = (proposal.given is not None, proposal.edges is not None)
        given, edges = (ids.new_zeros(len(ids), size) for size in self._parts[1:])
        if proposal.given is not None:
            given = proposal.given.flatten(1)
        if proposal.edges is not None:
            edges = word_bits(proposal.edges[..., : self._leading, : self._leading]).flatten(1)
        return torch.cat([ids.flatten(1), word_bits(scores).flatten(1), given, edges], 1)

    def _read_learnt(self, words: Tensor, has_given: bool, has_edges: bool) -> Proposal:
        """Return the proposals of several sequences, without chains."""
        leading, given, edges = words.split(self._parts, 1)
        ids, scores = leading.unflatten(1, (2, self._depth, self._leading)).unbind(1)
        shape = (self._depth, self._leading, self._leading)
        return replace(
            Proposal.of(ids.clone(), word_floats(scores)),
            given=given.unflatten(1, (self._depth, -1)).clone() if has_given else None,
            edges=word_floats(edges).unflatten(1, shape) if has_edges else None,
        )


class HostDraftCall(DraftCall):
    """The same on a CPU, without static buffers: packing and reading them takes a tenth of a draft call."""

    _made: list[DraftReport]  # by the last call

    def __call__(self, asks: Sequence[Ask], *, nodes: int | None = None, short: bool = False) -> None:
        start, positions = time.perf_counter(), self._flush(asks)
        self.backlog = positions, time.perf_counter() - start
        for draft in self._drafts:
            if isinstance(draft, DFlashModel):
                draft.positions = min(draft.depth, FEW_ROWS - 1) if short else draft.depth
        chains = [(ask.chain + [-1] * self._depth)[: self._depth] for ask in asks]
        slots, anchors = torch.tensor([[ask.slot for ask in asks], [ask.anchor for ask in asks]])
        tokens, scores = torch.tensor(chains), torch.tensor([ask.score for ask in asks])
        scores = scores[:, None].expand(tokens.shape)
        proposals, built = self._build(anchors, slots, tokens, scores, nodes)
        self.passes = max(draft.passes for draft in self._drafts)
        leading = [self._led(proposal) for proposal in proposals]
        trees = [[self._reported(*tree) for tree in zip(*each, strict=True)] for each in built]
        self._made = [
            replace(first, proposals=[proposal.one(index) for proposal in leading], alone=alone)
            for index, (first, *alone) in enumerate(zip(*trees, strict=True))
        ]

    def tree(self, rows: int) -> Tree:
        return self._made[0].tree(rows)

    def report(self) -> list[DraftReport]:
        return self._made

    def reports(self) -> list[DraftReport]:
        return self._made

    def read(self, reports: Tensor | list[DraftReport]) -> list[DraftReport]:
        assert isinstance(reports, list)
        return reports

    def _led(self, proposal: Proposal) -> Proposal:
        """Return the leading candidates of several sequences alone."""
        lead, edges = self._leading, proposal.edges
        return replace(
            Proposal.of(proposal.ids[..., :lead], proposal.scores[..., :lead]),
            given=proposal.given,
            edges=None if edges is None else edges[..., :lead, :lead],
        )

    @staticmethod
    def _reported(packed: Tensor, weights: Tensor) -> DraftReport:
        """Return the report of one tree [4, 64]."""
        known = [weight for weight in weights.tolist() if weight > -math.inf]
        tokens, parents = packed[:2, : len(known)].tolist()
        return DraftReport([], tokens, parents, [math.exp(weight) for weight in known], packed)


def word_bits(values: Tensor) -> Tensor:
    """Return float32 values as int64 words, so that one copy brings integers and floats to the host."""
    return values.contiguous().view(torch.int32).long()


def word_floats(words: Tensor) -> Tensor:
    return words.int().view(torch.float32)
