"""The drafter users get: a DFlash draft and copies from the text, as one tree of a size that pays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treeflash.config import SpecConfig
from treeflash.models.step import MAX_ROWS
from treeflash.spec.calibration import Calibration
from treeflash.spec.controller import BUCKETS, Controller, Costs, Plan
from treeflash.spec.draft import BlockDraft, Outcome, Rank, TreeGuide
from treeflash.spec.draft_part import DraftPart
from treeflash.spec.lookup import ContextLookup
from treeflash.spec.proposal import Proposal, ScoredTree, build_tree
from treeflash.spec.tree import DraftTree
from treeflash.spec.verify import walk
from treeflash.state.draft_ring import SavedRings
from treeflash.state.graphs import Part

CANDIDATES = 24  # of a depth; a tree of 63 nodes rarely looks further
SPINE = math.log(0.02)  # the likeliest path is in the tree as long as it survives this often
_LOOKUP_DEPTH = 15  # without a draft to set it
_FORCED = math.log(0.97)  # text without a choice may still be cut into other tokens
_GUIDED = 3  # times as many nodes are looked at


@dataclass(slots=True)
class _Asked:
    """A proposal, the tree it makes, and the tokens that came since."""

    proposal: Proposal  # as claimed, not corrected
    scored: ScoredTree
    came: list[int]
    waited: int = 0  # plain steps between the last tree and the question

    def weights(self) -> list[float]:
        return self.scored.weights.exp().tolist()

    def path(self) -> list[int]:
        """The rows that came true, the root first."""
        tokens, parents = self.scored.tokens.tolist(), self.scored.parents.tolist()
        chosen, rows = [-1] * len(tokens), [0]
        for token in self.came:
            chosen[rows[-1]] = token
            further = walk(tokens, parents, chosen).rows
            if len(further) == len(rows):
                break
            rows = further
        return rows


class Speculator:
    def __init__(
        self,
        draft: BlockDraft | None,
        config: SpecConfig,
        costs: Costs,
        *,
        device: torch.device | str = "cpu",
        sizes: Sequence[int] = BUCKETS,
    ):
        """`sizes`: of steps, those that differ in what they cost."""
        self._draft, self._config, self._device = draft, config, device
        self._depth = draft.spec.block_size - 1 if draft else _LOOKUP_DEPTH
        self._calibration = Calibration(device)
        self._controller = Controller(
            costs,
            max_rows=config.budget + 1,
            drafts=draft is not None,
            fixed=not config.adaptive,
            sizes=sizes,
        )
        self._lookup = ContextLookup()
        self._processed = 0
        self._asked: _Asked | None = None  # for the step under way
        self._part: DraftPart | None = None  # the draft over fixed tensors, where it is asked that way
        self._started: Plan | None = None  # it was, for the step under way
        self._unread: tuple[Tensor, Outcome, Plan] | None = None  # its last report, and what came of it
        self._watched: _Asked | None = None  # never verified, compared with what comes

    @property
    def taps(self) -> tuple[int, ...]:
        return self._draft.spec.taps if self._draft else ()

    @property
    def reach(self) -> int:
        return self._draft.reach if self._draft else 0

    def open(self) -> None:
        self._lookup = ContextLookup()
        self._processed = 0
        self._asked = self._watched = self._unread = None
        self._started = None
        self._controller.begin()
        if self._draft:
            self._draft.open()

    def fix(self, rank: Rank) -> list[Part]:
        if self._draft is None:
            return []
        self._part = DraftPart(
            self._draft,
            self._calibration,
            rank,
            nodes=self._config.budget,
            candidates=1 if self._config.chain else CANDIDATES,
            spine=SPINE,
            device=self._device,
        )
        return [self._part.part]

    def keep(self, features: Tensor, count: Tensor) -> None:
        if self._draft:
            self._draft.keep(features, count)

    def trim(self, count: int) -> None:
        if self._draft:
            self._draft.trim(count)

    def append(self, tokens: list[int], features: Tensor | None) -> None:
        self._processed += len(tokens)
        # The anchor was handed over when it was decided, one step before it was processed.
        new = self._processed - len(self._lookup)
        self._lookup.append(tokens[len(tokens) - new :])
        if self._draft and features is not None:
            self._draft.append(features, skipped=len(tokens) - len(features))

    def save(self) -> SavedRings | None:
        return self._draft.save() if self._draft else None

    def restore(self, tokens: Sequence[int], saved: SavedRings | None) -> None:
        self.open()
        self._lookup.append(list(tokens))
        self._processed = len(tokens)
        if self._draft and saved is not None:
            self._draft.restore(saved)

    def propose(
        self, anchor: int, position: int, limit: int, rank: Rank, guide: TreeGuide | None = None
    ) -> DraftTree:
        if len(self._lookup) == position:
            self._lookup.append([anchor])
        self._asked = self._started = None
        if self._part is not None and self._draft is not None:
            self._draft.flush()
        if limit == 1:
            return DraftTree.root(anchor)
        copied, score = self._copy(anchor, guide)
        if guide is not None:
            self._catch_up()
        plan = self._controller.plan(copied=len(copied), sure=math.exp(score))
        if plan.copy:
            tokens = [anchor, *copied][: min(plan.rows, limit)]
            return DraftTree.of(tokens, list(range(-1, len(tokens) - 1)))
        if plan.ask and self._part is not None and guide is None:
            self._part(anchor, self._chain(copied), score)
            self._started = plan
            self._catch_up()  # while the device is busy
            rows = min(plan.rows, limit)
            if rows > 1:
                tree = self._part.tree
                return DraftTree(tree[0, :rows], tree[1, :rows], tree)
        elif plan.ask:
            self._asked = asked = self._ask(anchor, rank, copied, score, guide)
            asked.waited = plan.waited
            rows = min(plan.rows, limit, len(asked.scored.tokens))
            if rows > 1:
                return DraftTree(asked.scored.tokens[:rows], asked.scored.parents[:rows])
        return DraftTree.root(anchor)

    def rests(self) -> bool:
        copied, score = self._from_text()
        return self._controller.rest(copied=len(copied), sure=math.exp(score))

    def learn(self, outcome: Outcome) -> None:
        self._catch_up()
        asked, costs = self._asked, self._controller.costs
        costs.learn_step(outcome.verified, outcome.step_seconds)
        if asked is not None or self._started is not None:
            costs.learn_draft(outcome.draft_seconds)
        if self._started is not None and self._part is not None:
            self._unread, self._started = (self._part.report(), outcome, self._started), None
        else:
            self._judge(asked, outcome)

    def _catch_up(self) -> None:
        """Learns from the report that was put off."""
        if self._unread is not None and self._part is not None:
            (report, outcome, plan), self._unread = self._unread, None
            self._judge(_Asked(*self._part.read(report), [], plan.waited), outcome)

    def _judge(self, asked: _Asked | None, outcome: Outcome) -> None:
        if asked is not None:
            if outcome.verified > 1:
                self._calibration.learn(asked.proposal, outcome.tokens)
                self._controller.learn(
                    asked.weights(), outcome.rows, verified=outcome.verified, waited=asked.waited
                )
            elif self._watched is None:
                self._watched = asked
        self._watch(outcome.tokens)

    def notes(self) -> list[str]:
        complaint = self._controller.complaint() if self._draft else None
        return [complaint] if complaint else []

    def _watch(self, tokens: list[int]) -> None:
        """Follows an unverified proposal until the text leaves it."""
        if self._watched is None:
            return
        watched = self._watched
        watched.came += tokens
        path = watched.path()
        if len(path) <= len(watched.came) or len(watched.came) >= self._depth:
            self._calibration.learn(watched.proposal, watched.came[: len(path)])
            self._controller.learn(
                watched.weights(), path, verified=len(watched.scored.tokens), waited=watched.waited
            )
            self._watched = None

    def _copy(self, anchor: int, guide: TreeGuide | None) -> tuple[list[int], float]:
        """The likeliest continuation that needs no draft, and the log probability of each of its tokens."""
        copied, score = self._from_text()
        if guide is None:
            return copied, score
        forced = guide.forced(self._depth)
        if forced:
            return forced, _FORCED
        chain = [anchor, *copied]
        return copied[: len(guide.kept(chain, range(-1, len(copied)))) - 1], score

    def _from_text(self) -> tuple[list[int], float]:
        """A copy of what followed the same tokens before."""
        return self._lookup.propose(self._depth) if self._config.lookup else ([], 0.0)

    def _ask(
        self, anchor: int, rank: Rank, copied: list[int], score: float, guide: TreeGuide | None
    ) -> _Asked:
        """The draft's candidates, corrected by how such claims have fared, and the copy, as one tree."""
        assert self._draft is not None
        # Of a tree with a guide some branches will fall, so that there should be more of them.
        nodes = self._config.budget if guide is None else min(_GUIDED * self._config.budget, MAX_ROWS - 1)
        if self._part is not None:
            self._part(anchor, self._chain(copied), score, nodes=nodes)
            if torch.device(self._device).type == "cuda":
                torch.cuda.current_stream().synchronize()
            return self._pruned(*self._part.read(self._part.report()), guide)
        claimed = self._draft.propose(anchor, rank, 1 if self._config.chain else CANDIDATES)
        proposal = replace(claimed, scores=self._calibration.correct(claimed.scores))
        if copied and not self._config.chain:
            ended = [-1] * (proposal.depth - len(copied))
            chain = torch.tensor([copied + ended], device=self._device)
            proposal = proposal.with_chains(chain, torch.full_like(chain, score, dtype=torch.float32))
        root = torch.tensor([anchor], device=self._device)
        return self._pruned(claimed, build_tree(root, proposal, nodes=nodes, spine=SPINE).trimmed(), guide)

    def _chain(self, copied: list[int]) -> list[int]:
        """What of a copy may stand beside the draft's own."""
        return [] if self._config.chain else copied

    def _pruned(self, claimed: Proposal, scored: ScoredTree, guide: TreeGuide | None) -> _Asked:
        if guide is not None:
            kept = guide.kept(scored.tokens.tolist(), scored.parents.tolist())
            scored = _only(scored, kept[: self._config.budget + 1])
        return _Asked(claimed, scored, [])


def _only(scored: ScoredTree, rows: list[int]) -> ScoredTree:
    """A part of a tree that holds every row's parent."""
    parents, place = scored.parents.tolist(), {row: index for index, row in enumerate(rows)}
    device = scored.tokens.device
    index = torch.tensor(rows, device=device)
    renamed = torch.tensor([place.get(parents[row], -1) for row in rows], device=device)
    return ScoredTree(scored.tokens[index], renamed, scored.weights[index])
