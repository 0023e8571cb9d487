"""The drafter users get: drafts and prompt lookup in one tree, of a size that pays."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from bough.config import SpecConfig
from bough.kernels.tree import MAX_ROWS
from bough.kernels.tree.reference import accept_path
from bough.spec.dflash import (
    Ask,
    DFlashModel,
    DraftCall,
    DraftModel,
    DraftReport,
    HostDraftCall,
    NoDraftModel,
    TreeShape,
)
from bough.spec.diagnosis import DraftWatch
from bough.spec.drafter import Constraint, Rank, StepOutcome, Turn
from bough.spec.mixed import mixes_of
from bough.spec.policy import (
    EAGER_SIZES,
    PLAIN,
    Calibration,
    LookupAccuracy,
    Plan,
    RowPolicy,
    Share,
    StepCosts,
)
from bough.spec.prompt_lookup import PromptLookup
from bough.spec.shares import Shares
from bough.spec.sharing import BatchCosts, Offer, RowSharing
from bough.spec.tree import Tree
from bough.state.draft_ring import SavedRings
from bough.state.graphs import CapturedFunction

CANDIDATES = 24  # of a depth; a tree of 63 nodes rarely needs more
SPINE = math.log(0.02)  # the likeliest path is in the tree while its probability is at least this
_FORCED = math.log(0.97)  # text without a choice may still be tokenised in another way
_RESTED = Plan(1, False)  # of a plain step that was not planned by itself
_CONSTRAINED = 3  # times as many nodes are built under a constraint, which then prunes them


@dataclass(slots=True)
class _Called:
    """A draft call, and the tokens that followed it."""

    report: DraftReport
    plan: Plan
    followed: list[int]

    def left(self, tokens: list[int], depth: int) -> bool:
        """Follow the text further; return whether it has left the tree, of at most this depth."""
        self.followed += tokens
        return len(self.path()) <= len(self.followed) or len(self.followed) >= depth

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


@dataclass(slots=True)
class _Text:
    """What is known of one slot's text."""

    policy: RowPolicy
    lookup: PromptLookup
    plan: Plan = PLAIN  # of the current step
    resting: int = 0  # steps from now on that are plain unless prompt lookup finds something
    root: Tree = field(default_factory=lambda: Tree.root(0))  # of such steps, changed in place
    root_numbers: np.ndarray = field(init=False)
    rested: int = 0  # such steps that the policy has not counted yet
    pruned: DraftReport | None = None  # the current step's tree, where a constraint pruned it
    # The last report, not learnt from yet.
    unread: tuple[Tensor | list[DraftReport], Plan, StepOutcome] | None = None
    watched: _Called | None = None  # a call that was not verified, compared with what follows
    compared: list[_Called] | None = None  # the trees of each mix, compared with what follows
    # In steps of several texts: what needs no draft, in which call the draft was asked, and what it gave.
    position: int = -1  # of the anchor when it was looked up
    copied: tuple[list[int], float] = field(default_factory=lambda: ([], 0.0))
    expected: list[float] = field(default_factory=list)  # tokens accepted of a draft call, by size
    asked: tuple[int, int] | None = None  # number of the call, index in it
    report: DraftReport | None = None

    def __post_init__(self) -> None:
        self.root_numbers = self.root.packed.numpy()


class Speculator:
    _draft_calls: dict[tuple[int, bool], DraftCall]  # by mix, and whether it compares; set by `bind`
    _call: DraftCall  # the last one called

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
        # Which drafts one call asks.
        self._mixes = mixes_of(draft, chain=config.chain) if draft is not None else []
        self._planned = PLAIN  # the last call for several
        self._usual_copies = LookupAccuracy()
        # Of the text that was last begun: another begins where it is.
        self._policy = RowPolicy(
            costs,
            max_rows=config.budget + 1,
            drafts=len(self._mixes),
            adaptive=config.adaptive,
            sizes=sizes,
        )
        self._sharing = RowSharing(
            BatchCosts(costs), sizes=sizes, max_rows=config.budget + 1, adaptive=config.adaptive
        )
        # Steps of several texts are padded to these sizes, too; without padding any number of rows will do.
        self._padded_sizes = None if sizes is EAGER_SIZES else sizes
        self._texts: dict[int, _Text] = {}  # by slot
        watched = draft.watched if isinstance(draft, DFlashModel) else (None, None)
        self._watch = DraftWatch(*watched, costs)
        self._calls = 0  # for several texts
        self._asked = 0  # texts in the last call for several
        self._on_host = torch.device(device).type == "cpu"
        self._clock = time.thread_time if self._on_host else time.perf_counter
        self._observed = -1, 0.0  # slot and time of the last step of one text
        # Of the last step of several texts: text, its plan and its draft's tree, outcome.
        self._unlearnt: list[tuple[_Text, Plan, DraftReport | None, StepOutcome]] = []

    @property
    def taps(self) -> tuple[int, ...]:
        return self._draft.taps

    @property
    def context_length(self) -> int:
        return self._draft.context_length

    @property
    def commit_rows(self) -> int:
        return self._draft.depth + 1

    def bind(self, rank: Rank) -> list[CapturedFunction]:
        calibrations = {draft: Calibration(self._device) for mix in self._mixes for draft in mix}
        share, candidates = Share(self._device), 1 if self._config.chain else CANDIDATES
        shape = TreeShape(self._draft.depth, self._config.budget, candidates, SPINE)
        kind = HostDraftCall if torch.device(self._device).type == "cpu" else DraftCall

        def call(mix: Sequence[DraftModel], *, compares: bool = False) -> DraftCall:
            return kind(
                {draft: calibrations[draft] for draft in mix},
                share,
                rank,
                shape=shape,
                compares=compares,
                device=self._device,
            )

        self._draft_calls = {(index, False): call(mix) for index, mix in enumerate(self._mixes)}
        if len(self._mixes) > 1 and self._config.adaptive:
            self._draft_calls[len(self._mixes) - 1, True] = call(self._mixes[-1], compares=True)
        for last in list(self._draft_calls.values())[-1:]:
            self._call = last
        return [function for call in self._draft_calls.values() for function in call.functions]

    def begin(self, slot: int) -> None:
        self._policy = self._policy.fork()
        self._observed = -1, 0.0
        self._texts[slot] = _Text(self._policy, PromptLookup(self._usual_copies))
        self._draft.begin(slot)
        self._watch.begin(slot)

    def append(self, slot: int, tokens: list[int], features: Tensor) -> None:
        self._texts[slot].lookup.append(tokens)
        self._draft.append(slot, features, skipped=len(tokens) - len(features))
        self._draft.flush(slot)

    def read(self, slot: int, tokens: list[int]) -> None:
        self._texts[slot].lookup.append(tokens)

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None:
        self._draft.commit(features, rows, counts, slots)

    def commit_eager(self, slot: int, features: Tensor) -> None:
        self._draft.append(slot, features)

    def rollback(self, slot: int, count: int) -> None:
        self._draft.rollback(slot, count)

    def save(self, slot: int) -> SavedRings | None:
        return self._draft.save(slot)

    def restore(self, slot: int, tokens: Sequence[int], saved: SavedRings | None) -> None:
        self._texts[slot].lookup.append(list(tokens))
        if saved is not None:
            self._draft.restore(slot, saved)

    # -- Steps of one text: the tree stays on the device

    def propose(
        self, slot: int, anchor: int, position: int, max_rows: int, constraint: Constraint | None = None
    ) -> Tree:
        text = self._texts[slot]
        if text.resting:
            text.resting -= 1
            text.rested += 1
            text.plan = _RESTED
            text.root_numbers[0, 0] = anchor
            return text.root
        self._asked = 0
        self._wake(text)
        self._learn_all()
        if len(text.lookup) == position:
            text.lookup.append([anchor])
        text.plan, text.pruned = PLAIN, None
        if max_rows == 1:
            return Tree.root(anchor)
        text.copied = copied, score = self._copied(text, anchor, constraint)
        if constraint is not None:
            self._learn_unread(text)
        text.plan = plan = text.policy.plan(copied=len(copied), probability=math.exp(score))
        rows = min(plan.rows, max_rows)
        if plan.lookup:
            return Tree.chain([anchor, *copied][:rows])
        if not plan.draft:
            if self._on_host and constraint is None and not (copied or text.watched or text.compared):
                text.resting = text.policy.rest()
            return Tree.root(anchor)
        chain = [] if self._config.chain else copied
        if constraint is not None:
            return self._propose_constrained(text, Ask(slot, anchor, chain, score), rows, constraint)
        self._call = self._draft_calls[plan.mix, plan.compares]
        self._call([Ask(slot, anchor, chain, score)], short=text.policy.rows_are_dear)
        self._learn_unread(text)  # while the device is busy
        return self._call.tree(rows) if rows > 1 else Tree.root(anchor)

    def plan_root(self, slot: int) -> bool:
        text = self._texts[slot]
        self._wake(text)
        copied, score = self._looked_up(text)
        return text.policy.plan_root(copied=len(copied), probability=math.exp(score))

    def observe(self, slot: int, outcome: StepOutcome) -> None:
        text = self._texts[slot]
        repeats = text.lookup.append(outcome.tokens)
        if text.plan is _RESTED:
            if repeats:
                text.resting = 0
            if not text.resting:
                self._observed = slot, self._clock()
            return
        self._learn_unread(text)
        self._watch_step(slot, text, outcome)
        plan = text.plan
        self._observe_costs(text, slot, outcome)
        if text.pruned is not None:
            self._learn(text, _Called(text.pruned, plan, []), outcome)
        elif plan.draft:
            # Read later, so that the next draft call need not wait for it.
            text.unread = (self._call.report(), plan, outcome)
        else:
            self._learn(text, None, outcome)

    def rehearse(self, slot: int) -> None:
        self._call = self._draft_calls[0, False]
        self._call([Ask(slot, 0, [], 0.0)], short=self._policy.rows_are_dear)

    def _observe_costs(self, text: _Text, slot: int, outcome: StepOutcome) -> None:
        """Learn what a step cost, and what the host did since the one before."""
        costs, plan, (before, start) = text.policy.costs, text.plan, self._observed
        draft_s = outcome.draft_share * outcome.draft_s
        costs.observe_step(outcome.rows, outcome.verify_cost)
        if plan.draft:
            positions, backlog_s = self._call.backlog
            backlog_s *= outcome.draft_share
            costs.observe_draft(draft_s - backlog_s, plan.mix)
            costs.observe_backlog(backlog_s, positions)
        self._observed = slot, self._clock()
        if before == slot:
            gap_s = self._observed[1] - start - draft_s - outcome.verify_cost
            kind = "draft" if plan.draft else "lookup" if outcome.rows > 1 else "plain"
            costs.observe_gap(kind, max(gap_s, 0.0))

    @staticmethod
    def _wake(text: _Text) -> None:
        """Let the policy know of steps that it did not plan."""
        if text.rested:
            text.policy.rested(text.rested)
        text.resting = text.rested = 0

    # -- Steps of several texts: the trees are read back and share the rows on the host

    def ask(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._look_up(turn)
        chosen = self._choose(turns) if self._has_draft else []
        self._asked, self._calls = len(chosen), self._calls + 1
        asks = []
        for index, turn in enumerate(turns[choice] for choice in chosen):
            text = self._texts[turn.slot]
            text.asked = (self._calls, index)
            copied, score = text.copied
            asks.append(Ask(turn.slot, turn.anchor, [] if self._config.chain else copied, score))
        if asks:
            self._call = self._draft_calls[self._planned.mix, self._planned.compares]
            self._call(asks, short=self._policy.rows_are_dear)
        self._learn_all()  # while the device is busy

    def share(self, turns: Sequence[Turn], prompts: Sequence[int] = ()) -> list[Tree]:
        reports = self._call.reports() if self._asked else []
        weights = [self._weights(turn, reports) for turn in turns]
        rows = self._sharing.shares(weights, padded=self._padded_sizes is not None, prompts=prompts)
        return [self._tree(turn, count) for turn, count in zip(turns, rows, strict=True)]

    def observe_all(self, outcomes: Mapping[int, StepOutcome], prompts: Sequence[int] = ()) -> None:
        step = next(iter(outcomes.values()))
        rows = sum(outcome.rows for outcome in outcomes.values()) + sum(prompts)
        if self._padded_sizes is not None:
            rows = next((size for size in self._padded_sizes if size >= rows), MAX_ROWS)
        self._sharing.costs.observe_step(len(outcomes) + len(prompts), rows, step.verify_cost)
        self._sharing.costs.observe_draft(self._asked, step.draft_share * step.draft_s, self._planned.mix)
        self._asked = 0
        for slot, outcome in outcomes.items():
            text = self._texts[slot]
            text.lookup.append(outcome.tokens)
            self._watch_step(slot, text, outcome)
            self._unlearnt.append((text, text.plan, text.report, outcome))
            text.report = None

    def _look_up(self, turn: Turn) -> None:
        text = self._texts[turn.slot]
        self._wake(text)
        self._learn_unread(text)
        if len(text.lookup) == turn.position:
            text.lookup.append([turn.anchor])
        text.copied = ([], 0.0) if turn.max_rows == 1 else self._copied(text, turn.anchor, turn.constraint)
        text.position = turn.position
        text.asked = text.pruned = text.report = None

    def _choose(self, turns: Sequence[Turn]) -> list[int]:
        """Return which of the texts are asked, and note with which mix of drafts."""
        costs, count = self._sharing.costs, len(turns)
        mixes, adaptive = self._policy.mixes, self._config.adaptive

        def draft_s(mix: int) -> float:
            return costs.draft(count, mix) / count

        def step_s(rows: int) -> float:
            return costs.step(count, min(MAX_ROWS, count * rows)) / count

        mixes.step()
        mix = mixes.best(step_s, draft_s) if adaptive else mixes.last
        due = self._sharing.due([turn.slot for turn in turns]) or mix != self._planned.mix
        offers = [self._offer(turn, mix, due=due) for turn in turns]
        chosen = self._sharing.asked(offers, padded=self._padded_sizes is not None, mix=mix)
        self._planned = Plan(1, True, mix=mix)
        if chosen and adaptive and mixes.compares(mix, step_s(1), draft_s):
            self._planned = Plan(1, True, mix=mixes.last, compares=True)
        return chosen

    def _offer(self, turn: Turn, mix: int, *, due: bool) -> Offer:
        text = self._texts[turn.slot]
        copied, score = text.copied
        text.policy.use_mix(mix)
        text.policy.begin_step()
        if text.policy.started and (due or not text.expected):
            text.expected = text.policy.expected()
        max_rows = min(turn.max_rows, self._config.budget + 1)
        since = text.policy.since_draft
        return Offer(text.expected, len(copied), math.exp(score), max_rows, since, turn.slot)

    def _weights(self, turn: Turn, reports: list[DraftReport]) -> np.ndarray:
        """Return the expected gains of a text's rows below the root."""
        text = self._texts[turn.slot]
        if text.position != turn.position:  # it was not there when the draft was called
            self._look_up(turn)
        if reports and text.asked is not None and text.asked[0] == self._calls:
            report = reports[text.asked[1]]
            if turn.constraint is not None:
                report = report.only(turn.constraint.kept(report.tokens, report.parents))
            text.report = report
            gains = text.policy.kept_promises * np.array(report.probabilities[1 : turn.max_rows])
            return np.minimum(gains, 1.0)
        copied, score = text.copied
        return np.exp(score * np.arange(1, min(len(copied), turn.max_rows - 1) + 1))

    def _tree(self, turn: Turn, rows: int) -> Tree:
        """Return the first rows of what was proposed for a text, and note it as its plan."""
        text = self._texts[turn.slot]
        drafted = text.report is not None
        plan = self._planned if drafted else Plan(rows, False, lookup=rows > 1)
        text.plan = text.policy.taken(replace(plan, rows=rows))
        if text.report is not None:
            return text.report.tree(rows)
        return Tree.root(turn.anchor) if rows == 1 else Tree.chain([turn.anchor, *text.copied[0]][:rows])

    # -- Both

    def warnings(self, slot: int) -> list[str]:
        text = self._texts.get(slot)
        known = self._watch.diagnosis if text is None else None
        note = self._watch.look_into(text.lookup.tokens) if text is not None and self._has_draft else known
        return [note] if note else []

    def examine(self, tokens: Sequence[int]) -> str | None:
        return self._watch.examine(tokens)

    def shares(self, slot: int) -> Shares:
        return self._watch.shares(slot)

    def _watch_step(self, slot: int, text: _Text, outcome: StepOutcome) -> None:
        if outcome.rows > 1:
            copied = [] if self._config.chain and text.plan.draft else text.copied[0]
            self._watch.observe(slot, outcome.tokens[:-1], copied, drafted=text.plan.draft)

    def last_report(self) -> DraftReport:
        """Return the last draft call, with its whole tree; synchronises with the device."""
        return self._call.reports()[0]

    def compared(self, slot: int, anchor: int, position: int) -> DraftReport:
        """Call all drafts and return the tree of all, and of each alone; for measurements."""
        text = self._texts[slot]
        if len(text.lookup) == position:
            text.lookup.append([anchor])
        self._call = self._draft_calls[len(self._mixes) - 1, True]
        self._call([Ask(slot, anchor, *self._looked_up(text))])
        return self.last_report()

    def learn_compared(self, report: DraftReport, followed: list[int]) -> None:
        """Calibrate the drafts by what followed `compared`."""
        self._call.learn(report, followed)

    def _propose_constrained(self, text: _Text, ask: Ask, rows: int, constraint: Constraint) -> Tree:
        """Build a larger tree, read it to the host and keep the rows that the constraint allows."""
        nodes = min(_CONSTRAINED * self._config.budget, MAX_ROWS - 1)
        self._call = self._draft_calls[text.plan.mix, text.plan.compares]
        self._call([ask], nodes=nodes, short=text.policy.rows_are_dear)
        report = self.last_report()
        kept = constraint.kept(report.tokens, report.parents)[: self._config.budget + 1]
        text.pruned = report = report.only(kept)
        return Tree.of(report.tokens[:rows], report.parents[:rows])

    def _copied(self, text: _Text, anchor: int, constraint: Constraint | None) -> tuple[list[int], float]:
        """Return the likeliest continuation that needs no draft, and the log probability of each token."""
        copied, score = self._looked_up(text)
        if constraint is None:
            return copied, score
        forced = constraint.forced(self._draft.depth)
        if forced:
            return forced, _FORCED
        chain = [anchor, *copied]
        return copied[: len(constraint.kept(chain, range(-1, len(copied)))) - 1], score

    def _looked_up(self, text: _Text) -> tuple[list[int], float]:
        return text.lookup.propose(self._draft.depth) if self._config.lookup else ([], 0.0)

    def _learn_unread(self, text: _Text) -> None:
        if text.unread is not None:
            (report, plan, outcome), text.unread = text.unread, None
            read = self._draft_calls[plan.mix, plan.compares].read(report)[0]
            self._learn(text, _Called(read, plan, []), outcome)

    def _learn_all(self) -> None:
        """Learn from the last step of several texts."""
        unlearnt, self._unlearnt = self._unlearnt, []
        for text, plan, report, outcome in unlearnt:
            called = _Called(report, plan, []) if report is not None else None
            self._learn(text, called, outcome)

    def _learn(self, text: _Text, called: _Called | None, outcome: StepOutcome) -> None:
        if called is not None and outcome.rows > 1:
            self._learn_call(text, called, outcome.tokens, outcome.path, verified=outcome.rows)
        elif called is not None and text.watched is None:
            text.watched = called
        if called is not None and called.report.alone and text.compared is None:
            text.compared = [_Called(each, called.plan, []) for each in (*called.report.alone, called.report)]
        self._follow_watched(text, outcome.tokens)
        self._follow_compared(text, outcome.tokens)

    def _follow_watched(self, text: _Text, tokens: list[int]) -> None:
        """Compare a call that was not verified with the text until the text leaves its tree."""
        called = text.watched
        if called is not None and called.left(tokens, self._draft.depth):
            path = called.path()
            verified = len(called.report.tokens)
            self._learn_call(text, called, called.followed[: len(path)], path, verified=verified)
            text.watched = None

    def _follow_compared(self, text: _Text, tokens: list[int]) -> None:
        """Compare the trees of several mixes with the text until it has left all of them."""
        if text.compared is None:
            return
        left = [called.left(tokens, self._draft.depth) for called in text.compared]
        if all(left):
            paths, policy = [called.path() for called in text.compared], text.policy
            policy.mixes.observe(paths)
            for mix, (called, path) in enumerate(zip(text.compared[:-1], paths[:-1], strict=True)):
                report = called.report
                policy.observe(
                    report.probabilities,
                    path,
                    verified=len(report.tokens),
                    waited=called.plan.waited,
                    mix=mix,
                )
            text.compared = None

    def _learn_call(
        self, text: _Text, called: _Called, tokens: list[int], path: list[int], *, verified: int
    ) -> None:
        """Learn from a draft call, the tokens that followed it and the rows that they followed."""
        plan, report = called.plan, called.report
        self._draft_calls[plan.mix, plan.compares].learn(report, tokens)
        text.policy.observe(report.probabilities, path, verified=verified, waited=plan.waited, mix=plan.mix)
