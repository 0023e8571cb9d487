"""The drafter users get: a DFlash draft and prompt lookup in one tree, of a size that pays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeflash.config import SpecConfig
from treeflash.kernels.tree import MAX_ROWS
from treeflash.kernels.tree.reference import accept_path
from treeflash.spec.dflash import DraftCall, DraftModel, DraftReport, NoDraftModel
from treeflash.spec.drafter import Constraint, Rank, StepOutcome
from treeflash.spec.policy import EAGER_SIZES, Calibration, Plan, RowPolicy, StepCosts
from treeflash.spec.prompt_lookup import PromptLookup
from treeflash.spec.tree import Tree
from treeflash.state.draft_ring import SavedRings
from treeflash.state.graphs import CapturedFunction

CANDIDATES = 24  # of a depth; a tree of 63 nodes rarely needs more
SPINE = math.log(0.02)  # the likeliest path is in the tree while its probability is at least this
_FORCED = math.log(0.97)  # text without a choice may still be tokenised in another way
_CONSTRAINED = 3  # times as many nodes are built under a constraint, which then prunes them


@dataclass(slots=True)
class _Called:
    """A draft call, and the tokens that followed it."""

    report: DraftReport
    waited: int  # plain steps between the last tree and the call
    followed: list[int]

    def path(self) -> list[int]:
        """Return the rows that the text followed, the root first."""
        tokens, parents = self.report.tokens, self.report.parents
        sampled, rows = [-1] * len(tokens), [0]
        for token in self.followed:
            sampled[rows[-1]] = token
            longer = accept_path(tokens, parents, sampled)
            if len(longer) == len(rows):
                break
            rows = longer
        return rows


class Speculator:
    _call: DraftCall  # set by `bind`

    def __init__(
        self,
        draft: DraftModel | None,
        config: SpecConfig,
        costs: StepCosts,
        *,
        device: torch.device | str = "cpu",
        sizes: Sequence[int] = EAGER_SIZES,
    ):
        """`draft` None: prompt lookup alone; `sizes`: the sizes of steps that differ in cost."""
        self._draft: DraftModel = draft or NoDraftModel()
        self._has_draft = draft is not None
        self._config, self._device = config, device
        self._calibration = Calibration(device)
        self._policy = RowPolicy(
            costs,
            max_rows=config.budget + 1,
            drafts=draft is not None,
            adaptive=config.adaptive,
            sizes=sizes,
        )
        self._lookup = PromptLookup()
        self._plan = Plan(1, False)  # of the current step
        self._pruned: DraftReport | None = None  # the current step's tree, where a constraint pruned it
        self._unread: tuple[Tensor, Plan, StepOutcome] | None = None  # the last report, not learnt from yet
        self._watched: _Called | None = None  # a call that was not verified, compared with what follows

    @property
    def taps(self) -> tuple[int, ...]:
        return self._draft.taps

    @property
    def context_length(self) -> int:
        return self._draft.context_length

    def bind(self, rank: Rank) -> list[CapturedFunction]:
        self._call = DraftCall(
            self._draft,
            self._calibration,
            rank,
            nodes=self._config.budget,
            candidates=1 if self._config.chain else CANDIDATES,
            spine=SPINE,
            device=self._device,
        )
        return [self._call.function] if self._has_draft else []

    def begin(self) -> None:
        self._lookup = PromptLookup()
        self._plan = Plan(1, False)
        self._pruned = self._watched = self._unread = None
        self._policy.begin()
        self._draft.begin()

    def append(self, tokens: list[int], features: Tensor) -> None:
        self._lookup.append(tokens)
        self._draft.append(features, skipped=len(tokens) - len(features))
        self._draft.flush()

    def commit(self, features: Tensor, count: Tensor) -> None:
        self._draft.commit(features, count)

    def commit_eager(self, features: Tensor) -> None:
        self._draft.append(features)

    def rollback(self, count: int) -> None:
        self._draft.rollback(count)

    def save(self) -> SavedRings | None:
        return self._draft.save()

    def restore(self, tokens: Sequence[int], saved: SavedRings | None) -> None:
        self.begin()
        self._lookup.append(list(tokens))
        if saved is not None:
            self._draft.restore(saved)

    def propose(
        self, anchor: int, position: int, max_rows: int, constraint: Constraint | None = None
    ) -> Tree:
        if len(self._lookup) == position:
            self._lookup.append([anchor])
        self._plan, self._pruned = Plan(1, False), None
        if max_rows == 1:
            return Tree.root(anchor)
        copied, score = self._copied(anchor, constraint)
        if constraint is not None:
            self._learn_unread()
        self._plan = plan = self._policy.plan(copied=len(copied), probability=math.exp(score))
        rows = min(plan.rows, max_rows)
        if plan.lookup:
            return Tree.chain([anchor, *copied][:rows])
        if not plan.draft:
            return Tree.root(anchor)
        chain = [] if self._config.chain else copied
        if constraint is not None:
            return self._propose_constrained(anchor, chain, score, rows, constraint)
        self._call(anchor, chain, score)
        self._learn_unread()  # while the device is busy
        return self._call.tree(rows) if rows > 1 else Tree.root(anchor)

    def plan_root(self) -> bool:
        copied, score = self._looked_up()
        return self._policy.plan_root(copied=len(copied), probability=math.exp(score))

    def observe(self, outcome: StepOutcome) -> None:
        self._learn_unread()
        self._lookup.append(outcome.tokens)
        costs, plan = self._policy.costs, self._plan
        costs.observe_step(outcome.rows, outcome.verify_s)
        if plan.draft:
            costs.observe_draft(outcome.draft_s)
        if self._pruned is not None:
            self._learn(_Called(self._pruned, plan.waited, []), outcome)
        elif plan.draft:
            # Read later, so that the next draft call need not wait for it.
            self._unread = (self._call.report(), plan, outcome)
        else:
            self._learn(None, outcome)

    def warnings(self) -> list[str]:
        warning = self._policy.warning() if self._has_draft else None
        return [warning] if warning else []

    def last_report(self) -> DraftReport:
        """Return the last draft call, with its whole tree; synchronises with the device."""
        return self._call.finished_report()

    def _propose_constrained(
        self, anchor: int, chain: list[int], score: float, rows: int, constraint: Constraint
    ) -> Tree:
        """Build a larger tree, read it to the host and keep the rows that the constraint allows."""
        nodes = min(_CONSTRAINED * self._config.budget, MAX_ROWS - 1)
        self._call(anchor, chain, score, nodes=nodes)
        report = self.last_report()
        kept = constraint.kept(report.tokens, report.parents)[: self._config.budget + 1]
        self._pruned = report = report.only(kept)
        return Tree.of(report.tokens[:rows], report.parents[:rows])

    def _copied(self, anchor: int, constraint: Constraint | None) -> tuple[list[int], float]:
        """Return the likeliest continuation that needs no draft, and the log probability of each token."""
        copied, score = self._looked_up()
        if constraint is None:
            return copied, score
        forced = constraint.forced(self._draft.depth)
        if forced:
            return forced, _FORCED
        chain = [anchor, *copied]
        return copied[: len(constraint.kept(chain, range(-1, len(copied)))) - 1], score

    def _looked_up(self) -> tuple[list[int], float]:
        return self._lookup.propose(self._draft.depth) if self._config.lookup else ([], 0.0)

    def _learn_unread(self) -> None:
        if self._unread is not None:
            (report, plan, outcome), self._unread = self._unread, None
            self._learn(_Called(self._call.read(report), plan.waited, []), outcome)

    def _learn(self, called: _Called | None, outcome: StepOutcome) -> None:
        if called is not None and outcome.rows > 1:
            report = called.report
            self._calibration.observe(report.proposal, outcome.tokens)
            self._policy.observe(
                report.probabilities, outcome.path, verified=outcome.rows, waited=called.waited
            )
        elif called is not None and self._watched is None:
            self._watched = called
        self._follow_watched(outcome.tokens)

    def _follow_watched(self, tokens: list[int]) -> None:
        """Compare a call that was not verified with the text until the text leaves its tree."""
        if self._watched is None:
            return
        called, report = self._watched, self._watched.report
        called.followed += tokens
        path = called.path()
        if len(path) <= len(called.followed) or len(called.followed) >= self._draft.depth:
            self._calibration.observe(report.proposal, called.followed[: len(path)])
            verified = len(report.tokens)
            self._policy.observe(report.probabilities, path, verified=verified, waited=called.waited)
            self._watched = None
