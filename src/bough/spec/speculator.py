"""The drafter users get: drafts and prompt lookup in one tree, of a size that pays."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from bough.config import SpecConfig
from bough.kernels.tree import MAX_ROWS
from bough.spec.calibration import Calibration, Share
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.diagnosis import DraftWatch
from bough.spec.draft_call import TREE_WORDS, Ask, DraftCall, DraftReport, HostDraftCall, TreeShape
from bough.spec.draft_model import DraftModel, NoDraftModel
from bough.spec.drafter import (
    DevicePaths,
    Drafter,
    Features,
    HostPath,
    Notes,
    Piece,
    Rank,
    StepOutcome,
    Turn,
)
from bough.spec.learning import CalledDraft, LessonQueue, Lessons
from bough.spec.mixed import mixes_of
from bough.spec.policy import EAGER_SIZES, PLAIN, Plan, RowPolicy
from bough.spec.prompt_lookup import LookupAccuracy, PromptLookup
from bough.spec.sharing import BatchCosts, DeviceSharing, Offer, RowSharing, SharedPart
from bough.spec.tree import SharedTrees, Tree
from bough.state.draft_ring import SavedRings
from bough.state.graphs import CapturedFunction

CANDIDATES = 24  # of a depth; a tree of 63 nodes rarely needs more
SPINE = math.log(0.02)  # the likeliest path is in the tree while its probability is at least this
_FORCED = math.log(0.97)  # text without a choice may still be tokenised in another way
_LOOK_EVERY = 4  # plain steps on a host, after which lookup reads their tokens: 20 us on a CPU
_MOST_UNREAD = 512  # tokens that a draft reads by itself while other texts wait
_CONSTRAINED = 3  # times as many nodes are built under a constraint, which then prunes them


@dataclass(slots=True)
class _Text:
    """What is known of one slot's text."""

    policy: RowPolicy
    lookup: PromptLookup
    lessons: Lessons
    copies: bool  # whether the lookup is used
    plan: Plan = PLAIN  # of the current step
    report: DraftReport | None = None  # the current step's draft, where it was read on the host
    copied: tuple[list[int], float] = field(default_factory=lambda: ([], 0.0))  # what needs no draft
    position: int = -1  # of the anchor when it was looked up
    # Of a sequence alone, on a host.
    resting: int = 0  # steps from now on that are plain unless prompt lookup finds something
    rested: int = 0  # such steps that the policy has not counted yet
    # In steps of several: in which call the draft was asked, and what it is expected to give.
    expected: list[float] = field(default_factory=list)  # tokens accepted of a draft call, by size
    asked: tuple[int, int] | None = None  # number of the call, index in it

    def take(self, rows: int) -> None:
        """Note how many rows it had in a step of several texts."""
        history = self.policy.history
        self.plan = replace(self.plan, rows=rows, waited=history.waited)
        history.end_steps(rows=rows, draft=self.plan.draft)

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Look up the text's new tokens; return whether the last ones were there before."""
        return self.lookup.append(list(tokens[len(self.lookup) :]))

    def rest(self, turn: Turn) -> int:
        """Return how many of its steps are plain now; 0: the next one is to be planned."""
        if turn.constraint is not None or not self.resting:
            return 0
        found = self.catch_up(turn.text)
        if found and self.copy_pays():
            self.resting = 0
        steps = min(self.resting, 1 if found else _LOOK_EVERY)
        self.resting, self.rested = self.resting - steps, self.rested + steps
        return steps

    def begin_turn(self, turn: Turn) -> None:
        """Begin a step that is planned: look up what needs no draft."""
        if self.rested:
            self.policy.rested(self.rested)
        self.resting = self.rested = 0
        self.catch_up(turn.text)
        self.position, self.plan = turn.position, PLAIN
        self.asked = self.report = None
        self.copied = ([], 0.0) if turn.max_rows == 1 else self._allowed(turn)

    def was_asked(self, call: int) -> bool:
        """Return whether a draft call for several asked for this text."""
        return self.asked is not None and self.asked[0] == call

    def ask(self, turn: Turn, *, chain: bool) -> Ask:
        """Return its part of a draft call; where trees are chains, no lookup is among the candidates."""
        copied, score = self.copied
        return Ask(turn.slot, turn.anchor, [] if chain else copied, score, self.lookup.text)

    def tree(self, turn: Turn, rows: int) -> Tree:
        """Return the first rows of what was proposed for it."""
        if self.report is not None:
            return self.report.tree(rows)
        return Tree.root(turn.anchor) if rows == 1 else Tree.chain([turn.anchor, *self.copied[0]][:rows])

    def looked_up(self) -> tuple[list[int], float]:
        """Return what followed the last tokens earlier in the text, and each one's log probability."""
        return self.lookup.propose(self.lessons.depth) if self.copies else ([], 0.0)

    def copy_pays(self) -> bool:
        """Return whether what the lookup has found may pay."""
        copied, score = self.looked_up()
        return bool(copied) and self.policy.copy_pays(len(copied), math.exp(score))

    def _allowed(self, turn: Turn) -> tuple[list[int], float]:
        """Return the likeliest continuation that needs no draft and that the constraint allows."""
        copied, score = self.looked_up()
        if turn.constraint is None:
            return copied, score
        forced = turn.constraint.forced(self.lessons.depth)
        if forced:
            return forced, _FORCED
        chain = [turn.anchor, *copied]
        return copied[: len(turn.constraint.kept(chain, range(-1, len(copied)))) - 1], score


class Speculator(Drafter):
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
        on_host: bool | None = None,
    ):
        """`draft` None: prompt lookup alone; `sizes`: the sizes of steps that differ in cost.

        `on_host`: draft calls give lists on the host, not trees on the device; None: on a CPU.
        """
        self._draft: DraftModel = draft or NoDraftModel()
        self._has_draft, self.passes = draft is not None, 0.0
        depth = self._draft.depth
        self.features = Features(self._draft.taps, self._draft.context_length, depth + 1)
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
        self._on_host = on_host if on_host is not None else torch.device(device).type == "cpu"
        # The trees that draft calls gave, by slot.
        forest = torch.zeros(MAX_ROWS, TREE_WORDS, dtype=torch.int64, device=device)
        self._forest, self._device_sharing = forest, DeviceSharing(forest)
        self._size = 0  # rows in all of the step, if they were shared on the device
        self._clock = time.thread_time if self._on_host else time.perf_counter
        self._observed = -1, 0.0  # slot and time of the last step of one text
        self._lessons = LessonQueue()
        self._alone = True  # the current step is that of one text, and planned as such

    def bind(self, rank: Rank) -> list[CapturedFunction]:
        calibrations = {draft: Calibration(self._device) for mix in self._mixes for draft in mix}
        share, candidates = Share(self._device), 1 if self._config.chain else CANDIDATES
        shape = TreeShape(self._draft.depth, self._config.budget, candidates, SPINE)
        kind = HostDraftCall if self._on_host else DraftCall

        def call(mix: Sequence[DraftModel], *, compares: bool = False) -> DraftCall:
            return kind(
                {draft: calibrations[draft] for draft in mix},
                share,
                rank,
                shape=shape,
                forest=self._forest,
                compares=compares,
            )

        self._draft_calls = {(index, False): call(mix) for index, mix in enumerate(self._mixes)}
        if len(self._mixes) > 1 and self._config.adaptive:
            self._draft_calls[len(self._mixes) - 1, True] = call(self._mixes[-1], compares=True)
        for last in list(self._draft_calls.values())[-1:]:
            self._call, self.passes = last, last.passes
        if self._on_host and self._has_draft:
            return [CapturedFunction(self._call_once)]
        calls = [function for call in self._draft_calls.values() for function in call.functions]
        return [*calls, *self._device_sharing.functions] if calls else []

    def open(self, slot: int, tokens: Sequence[int] = (), saved: SavedRings | None = None) -> None:
        self._policy = self._policy.fork()
        self._observed = -1, 0.0
        lookup, lessons = PromptLookup(self._usual_copies), Lessons(self._policy, self._draft.depth)
        self._texts[slot] = _Text(self._policy, lookup, lessons, self._config.lookup)
        self._draft.begin(slot)
        self._watch.begin(slot)
        lookup.append(list(tokens))
        if saved is not None:
            self._draft.restore(slot, saved)
        if self._on_host:
            self._texts[slot].resting = self._policy.rest_at_first()

    def prefill(self, slot: int, tokens: list[int], features: Tensor | None) -> None:
        text = self._texts[slot]
        text.lookup.append(tokens)
        if features is not None:
            self._draft.append(slot, features, skipped=len(tokens) - len(features))
            self._draft.flush(slot)

    def commit(self, features: Tensor, paths: Sequence[HostPath] | DevicePaths) -> None:
        if isinstance(paths, DevicePaths):
            self._draft.commit(features, paths.rows, paths.counts, paths.slots)
            return
        for path in paths:
            self._draft.append(path.slot, features if path.rows is None else features[path.rows])

    def rollback(self, slot: int, count: int) -> None:
        self._draft.rollback(slot, count)

    def save(self, slot: int) -> SavedRings | None:
        return self._draft.save(slot)

    def draft(self, turns: Sequence[Turn], prompts: Sequence[Piece] = ()) -> None:
        self._alone = len(turns) == 1 and not prompts
        if self._alone:
            self._draft_alone(turns[0])
        else:
            self._draft_together(turns)

    def trees(self, turns: Sequence[Turn], prompts: Sequence[Piece] = ()) -> list[Tree] | SharedTrees:
        if self._alone:
            return [self._tree_alone(*turns)]
        for turn in turns:
            text = self._texts[turn.slot]
            if text.position != turn.position:  # it was not there when the draft was called
                text.begin_turn(turn)
            text.plan = self._planned if text.was_asked(self._calls) else PLAIN
        reads = self._on_host or any(turn.shown or turn.constraint is not None for turn in turns)
        if any(self._texts[turn.slot].was_asked(self._calls) for turn in turns) and not reads:
            return self._shared(turns, prompts)
        self._size, read = 0, [len(piece.tokens) for piece in prompts]
        reports = self._call.reports() if self._asked else []
        weights = [self._weights(turn, reports) for turn in turns]
        rows = self._sharing.shares(weights, padded=self._padded_sizes is not None, prompts=read)
        return [self._texts[turn.slot].tree(turn, count) for turn, count in zip(turns, rows, strict=True)]

    def observe(self, outcomes: Mapping[int, StepOutcome], prompts: Sequence[int] = ()) -> None:
        reports = cache(lambda: cache(partial(self._call.read, self._call.report())))  # read once, and later
        for slot, outcome in outcomes.items():
            text = self._texts[slot]
            if not self._alone:
                text.take(outcome.rows)
            if outcome.rows > 1:
                copied = [] if self._config.chain and text.plan.draft else text.copied[0]
                self._watch.observe(slot, outcome.tokens[:-1], copied, drafted=text.plan.draft)
            self._note_lesson(text, outcome, reports)
        if self._alone:
            [(slot, outcome)] = outcomes.items()
            self._observe_costs(self._texts[slot], slot, outcome)
        else:
            self._observe_shared_costs(outcomes, prompts)

    def notes(self, slot: int, text: Sequence[int] = ()) -> Notes:
        note = self._watch.diagnosis
        if (own := self._texts.get(slot)) is not None:
            own.catch_up(text)
            note = self._watch.look_into(own.lookup.tokens) if self._has_draft else None
        return Notes([note] if note else [], self._watch.shares(slot))

    def examine(self, tokens: Sequence[int]) -> str | None:
        return self._watch.examine(tokens)

    def _note_lesson(
        self, text: _Text, outcome: StepOutcome, reports: Callable[[], Callable[[], list[DraftReport]]]
    ) -> None:
        """Note what a step teaches; without a draft call nothing has to wait."""
        plan, report = text.plan, text.report
        if not plan.draft:
            self._lessons.add(text.lessons, outcome)
        elif report is not None:
            self._lessons.add(text.lessons, outcome, partial(CalledDraft, self._call, report, plan))
        else:
            call, read, index = self._call, reports(), text.asked[1] if text.asked is not None else 0
            self._lessons.add(text.lessons, outcome, lambda: CalledDraft(call, read()[index], plan))
        if self._alone and not plan.draft:
            self._lessons.learn()

    def _call_once(self) -> None:
        """Call the draft for the text that was begun last, to see what that takes."""
        *_, slot = self._texts
        self._call, self._calls = self._draft_calls[0, False], self._calls + 1
        text = [0] * self._calls  # a draft that reads it has something to read
        self._call([Ask(slot, 0, [], 0.0, text)], short=self._policy.rows_are_dear)
        self.passes = self._call.passes

    # -- Steps of one text: the tree stays on the device

    def plain_steps(self, turns: Sequence[Turn]) -> int:
        if len(turns) > 1:
            return 0
        text = self._texts[turns[0].slot]
        if self._on_host:
            return text.rest(turns[0])
        text.catch_up(turns[0].text)
        copied, score = text.looked_up()
        return int(text.policy.plan_root(copied=len(copied), probability=math.exp(score)))

    def _draft_alone(self, turn: Turn) -> None:
        text = self._texts[turn.slot]
        self._observe_rested(text, turn.slot)
        self._asked = 0
        text.begin_turn(turn)
        copied, score = text.copied
        if turn.max_rows == 1:
            return
        text.policy.passes = self._draft.next_passes
        text.policy.unread = self._draft.unread(turn.slot, text.lookup.text)
        text.plan = plan = text.policy.plan(copied=len(copied), probability=math.exp(score))
        if plan.draft:
            # Of a larger tree the constraint leaves enough.
            nodes = None if turn.constraint is None else min(_CONSTRAINED * self._config.budget, MAX_ROWS - 1)
            self._call = self._draft_calls[plan.mix, plan.compares]
            self._call(
                [text.ask(turn, chain=self._config.chain)], nodes=nodes, short=text.policy.rows_are_dear
            )
            self._lessons.learn()  # while the device is busy
            return
        waits = text.lessons.watched or text.lessons.compared
        if self._on_host and not plan.lookup and turn.constraint is None and not waits:
            text.resting = text.policy.rest()

    def _tree_alone(self, turn: Turn) -> Tree:
        text, plan = self._texts[turn.slot], self._texts[turn.slot].plan
        rows = min(plan.rows, turn.max_rows)
        if plan.lookup:
            return Tree.chain([turn.anchor, *text.copied[0]][:rows])
        if plan.draft and turn.constraint is not None:
            report = self._call.reports()[0]
            allowed = turn.constraint.kept(report.tokens, report.parents)[: self._config.budget + 1]
            text.report = report = report.only(allowed)
            return Tree.of(report.tokens[:rows], report.parents[:rows])
        return self._call.tree(rows) if plan.draft and rows > 1 else Tree.root(turn.anchor)

    def _observe_rested(self, text: _Text, slot: int) -> None:
        """Learn what the host does in a step that is not planned, from those since the last observed one."""
        before, start = self._observed
        if text.rested and before == slot:
            costs, now = text.policy.costs, self._clock()
            costs.observe_gap("plain", max((now - start) / text.rested - costs.of(1), 0.0))
            self._observed = slot, now - costs.gap_before("plain")

    def _observe_costs(self, text: _Text, slot: int, outcome: StepOutcome) -> None:
        """Learn what a step cost, and what the host did since the one before."""
        costs, plan, (before, start) = text.policy.costs, text.plan, self._observed
        draft_s = outcome.draft_share * outcome.draft_s
        costs.observe_step(outcome.rows, outcome.verify_cost, outcome.verify_s)
        if plan.draft:
            positions, backlog_s = self._call.backlog
            wall_s = outcome.draft_s - backlog_s
            backlog_s *= outcome.draft_share
            passes = self._call.passes
            costs.observe_draft((draft_s - backlog_s) / passes, plan.mix, wall_s / passes)
            costs.observe_backlog(backlog_s, positions)
        if plan.lookup:
            spent = (draft_s + outcome.verify_cost) / costs.of(1)
            text.policy.settle(len(outcome.tokens), spent)
        self._observed = slot, self._clock()
        kind = "draft" if plan.draft else "lookup" if outcome.rows > 1 else "plain"
        # On a host the gap before a plain step is that of one that was not planned: planning is half of it.
        rested = self._on_host and kind == "plain" and "plain" in costs.gap
        if before == slot and not rested:
            gap_s = self._observed[1] - start - draft_s - outcome.verify_cost
            costs.observe_gap(kind, max(gap_s, 0.0))

    # -- Steps of several texts: their trees share the rows, on the device if none has to be read before

    def _draft_together(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._texts[turn.slot].begin_turn(turn)
        asked = [turns[index] for index in self._choose(turns)] if self._has_draft else []
        self._asked, self._calls = len(asked), self._calls + 1
        for index, turn in enumerate(asked):
            self._texts[turn.slot].asked = (self._calls, index)
        if asked:
            self._call = self._draft_calls[self._planned.mix, self._planned.compares]
            asks = [self._texts[turn.slot].ask(turn, chain=self._config.chain) for turn in asked]
            self._call(asks, short=self._policy.rows_are_dear)
        self._lessons.learn()  # while the device is busy

    def _observe_shared_costs(self, outcomes: Mapping[int, StepOutcome], prompts: Sequence[int]) -> None:
        step = next(iter(outcomes.values()))
        if self._size:
            self._sharing.observe_gains(*self._device_sharing.gains())
        rows = self._size or sum(outcome.rows for outcome in outcomes.values()) + sum(prompts)
        if self._padded_sizes is not None:
            rows = next((size for size in self._padded_sizes if size >= rows), MAX_ROWS)
        self._sharing.costs.observe_step(len(outcomes) + len(prompts), rows, step.verify_cost)
        if self._asked:
            draft_s = step.draft_share * (step.draft_s - self._call.backlog[1])
            draft_s *= self._draft.next_passes / self._call.passes
            self._sharing.costs.observe_draft(self._asked, draft_s, self._planned.mix)
        self._asked = 0

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
        history = text.policy.history
        history.mix = mix
        history.begin()
        history.begin_steps()
        if history.acceptance.started and (due or not text.expected):
            text.expected = history.acceptance.expected(history.waited)
        unread = self._draft.unread(turn.slot, text.lookup.text)
        max_rows = 1 if unread > _MOST_UNREAD else min(turn.max_rows, self._config.budget + 1)
        since = history.since_draft
        return Offer(text.expected, len(copied), math.exp(score), max_rows, since, turn.slot)

    def _shared(self, turns: Sequence[Turn], prompts: Sequence[Piece]) -> SharedTrees:
        """Share the rows of a step on the device: how many there are is decided from expectations."""
        offers, parts = [], []
        for turn in turns:
            text = self._texts[turn.slot]
            (copied, score), history = text.copied, text.policy.history
            expected = text.expected or history.acceptance.expected(history.waited)
            most = min(turn.max_rows, self._config.budget + 1)
            offers.append(Offer(expected, len(copied), math.exp(score), most, 0))
            if text.was_asked(self._calls):
                parts.append(SharedPart(turn.slot, most, history.acceptance.kept.factor))
            else:
                chain = Tree.chain([turn.anchor, *copied][:most]) if copied else Tree.root(turn.anchor)
                parts.append(SharedPart(turn.slot, most, tree=chain, score=score))
        for piece in prompts:
            rows = len(piece.tokens)
            parts.append(SharedPart(piece.slot, rows, tree=Tree.chain(piece.tokens), given=True))
        asked = [self._texts[turn.slot].was_asked(self._calls) for turn in turns]
        self._size = self._sharing.planned_size(offers, asked, [len(piece.tokens) for piece in prompts])
        return self._device_sharing(parts, self._size)

    def _weights(self, turn: Turn, reports: list[DraftReport]) -> np.ndarray:
        """Return the expected gains of a text's rows below the root."""
        text = self._texts[turn.slot]
        if reports and text.asked is not None and text.was_asked(self._calls):
            report = reports[text.asked[1]]
            if turn.constraint is not None:
                report = report.only(turn.constraint.kept(report.tokens, report.parents))
            text.report = report
            gains = text.policy.history.acceptance.kept.factor * np.array(
                report.probabilities[1 : turn.max_rows]
            )
            return np.minimum(gains, 1.0)
        copied, score = text.copied
        return np.exp(score * np.arange(1, min(len(copied), turn.max_rows - 1) + 1))
