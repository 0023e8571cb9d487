"""The row policy alone, on texts with a probability for each token, and with costs by formula."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.spec.costs import StepCosts
from bough.spec.policy import EAGER_SIZES, PLAIN_INTERVAL, Plan, PlanRates, RowPolicy

DEPTH = 15
ROWS = 23


def cpu(rows: int) -> float:
    """Of a plain step: as measured with the pair in the package, where the draft costs 1.6."""
    return 1 + 0.6 * min(rows - 1, 1) + 0.1 * (rows - 1)


def gpu(rows: int) -> float:
    return 1 + 0.012 * (rows - 1)


class Play:
    """Text after text; each proposal is a chain, right at a depth with the chance of the token there."""

    def __init__(self, cost: Callable[[int], float], draft: float, *, fixed: bool = False, rows: int = ROWS):
        self._cost, self._draft = cost, draft
        self.policy = RowPolicy(StepCosts(), max_rows=rows, drafts=True, adaptive=not fixed)
        self._choose = random.Random(7)
        self.calls: list[int] = []  # the steps that asked
        self.steps = 0

    def speed(self, chances: Sequence[float], claim: float | None = None) -> float:
        """Over one text, in units of plain decoding; without a claim the draft's are honest on the whole."""
        claim = sum(chances) / len(chances) if claim is None else claim
        self.policy = self.policy.fork()
        costs, position, time = self.policy.costs, 0, 0.0
        while position < len(chances):
            plan = self.policy.plan()
            seconds, accepted = self._cost(plan.rows), 0
            if plan.draft:
                self.calls.append(self.steps)
                time += self._draft
                costs.observe_draft(self._draft)
                right = 0
                for chance in chances[position : position + DEPTH]:
                    if self._choose.random() >= chance:
                        break
                    right += 1
                accepted = min(right, plan.rows - 1)
                verified = plan.rows if plan.rows > 1 else DEPTH + 1
                path = list(range(1 + min(right, verified - 1)))
                weights = [claim**depth for depth in range(DEPTH + 1)]
                self.policy.history.observe(weights, path, verified=verified, waited=plan.waited)
            costs.observe_step(plan.rows, seconds)
            time += seconds
            position += 1 + accepted
            self.steps += 1
        return position / time


def uneven(count: int, seed: int) -> list[float]:
    """Stretches that the draft knows, and stretches in which it is nearly always wrong."""
    choose, chances = random.Random(seed), []
    while len(chances) < count:
        easy, hard = choose.randint(8, 24), choose.randint(3, 9)
        chances += [0.97] * easy + [0.1] * hard
    return chances[:count]


def best_fixed(cost: Callable[[int], float], draft: float, texts: Sequence[Sequence[float]]) -> float:
    def mean(rows: int) -> float:
        play = Play(cost, draft, fixed=True, rows=rows)
        return sum(map(len, texts)) / sum(len(text) / play.speed(text) for text in texts)

    return max(mean(rows) for rows in (2, 4, 8, 12, 16))


@settings(max_examples=40, deadline=None)
@given(draft=st.floats(0.05, 4), row=st.floats(0.005, 0.2), claim=st.floats(0.05, 0.99))
def test_a_useless_draft_costs_no_more_than_its_share(draft: float, row: float, claim: float) -> None:
    play = Play(lambda rows: 1 + row * (rows - 1), draft)
    for _ in range(6):
        play.speed([0.0] * 100, claim)
    time = sum(100 / play.speed([0.0] * 100, claim) for _ in range(30))
    assert 3000 / time >= 0.98


@pytest.mark.parametrize(("cost", "draft"), [(cpu, 1.6), (gpu, 0.15), (gpu, 0.6)])
def test_a_draft_that_pays_is_found_in_short_texts(cost: Callable[[int], float], draft: float) -> None:
    texts = [[0.9] * 100] * 20
    play, best = Play(cost, draft), best_fixed(cost, draft, texts)
    first = play.speed(texts[0])
    time = sum(100 / play.speed(text) for text in texts)
    assert first >= 0.8 * best and 2000 / time >= 0.9 * best


def test_a_draft_that_pays_at_times_is_asked_at_those_times() -> None:
    """Right behind a miss it does not pay here; some plain steps later it does."""
    texts = [uneven(100, seed) for seed in range(40)]
    assert best_fixed(cpu, 1.6, texts) < 0.9
    play = Play(cpu, 1.6)
    for text in texts[:10]:
        play.speed(text)
    time = sum(100 / play.speed(text) for text in texts)
    assert 4000 / time > 1.03
    # Where questions are cheap, it waits for nothing.
    play, best = Play(gpu, 0.15), best_fixed(gpu, 0.15, texts)
    assert 4000 / sum(100 / play.speed(text) for text in texts) >= 0.9 * best


@pytest.mark.parametrize(("cost", "draft"), [(cpu, 1.6), (gpu, 0.15), (gpu, 0.6)])
def test_what_was_good_on_one_text_costs_little_on_another(
    cost: Callable[[int], float], draft: float
) -> None:
    play = Play(cost, draft)
    for _ in range(8):
        play.speed([0.9] * 100)
    assert 1000 / sum(100 / play.speed([0.0] * 100) for _ in range(10)) >= 0.94
    assert 1000 / sum(100 / play.speed([0.0] * 100) for _ in range(10)) >= 0.97


@pytest.mark.parametrize(("draft", "steps"), [(0.15, 32), (0.3, 64), (1.6, 324)])
def test_a_useless_draft_that_becomes_good_is_found_by_the_next_question(draft: float, steps: int) -> None:
    """Which comes after as many steps as its share of the time takes to pay for it."""
    play = Play(gpu, draft)
    play.speed([0.0] * 800)
    since = play.steps
    play.speed([0.95] * 400)
    asked = [step - since for step in play.calls if step >= since]
    assert asked[0] <= steps
    assert asked[1:6] == list(range(asked[1], asked[1] + 5)) and asked[1] <= asked[0] + 16


def test_a_tree_that_was_asked_for_is_verified_if_that_alone_pays() -> None:
    """A draft this dear never pays, but once a question is paid for, its tree does."""
    play = Play(gpu, 6.0)
    for _ in range(5):
        play.speed([0.8] * 200)
    plans = [play.policy.plan() for _ in range(600)]
    asked = [plan for plan in plans if plan.draft]
    assert asked and all(plan.rows > 1 for plan in asked)
    useless = Play(gpu, 0.3)
    useless.speed([0.0] * 600)
    asked = [plan for plan in (useless.policy.plan() for _ in range(100)) if plan.draft]
    assert asked and all(plan.rows == 1 for plan in asked)


def test_a_new_text_begins_with_what_the_draft_is_worth() -> None:
    play = Play(cpu, 1.6)
    for seed in range(12):
        play.speed(uneven(100, seed))
    play.policy = play.policy.fork()
    assert any(play.policy.plan().draft for _ in range(5))
    useless = Play(cpu, 1.6)
    useless.speed([0.0] * 600)
    useless.policy = useless.policy.fork()
    assert not any(useless.policy.plan().draft for _ in range(5))


def test_a_question_without_a_tree_leaves_no_miss_behind() -> None:
    """The step was plain: the text goes on as it would have, and the next question is no nearer to a tree."""
    play = Play(gpu, 0.3)
    play.speed([0.0] * 600)
    plans = [play.policy.plan() for _ in range(200)]
    asked = [number for number, plan in enumerate(plans) if plan.draft]
    assert len(asked) > 1 and all(plans[number].rows == 1 for number in asked)
    waits = [plans[number].waited - number for number in asked]
    assert waits == [waits[0]] * len(asked)


def test_steps_that_are_planned_ahead_ask_as_often() -> None:
    """A draft that never guesses right: the same questions whether plain steps are planned ahead or not."""
    asked = []
    for ahead in (False, True):
        policy, rested = RowPolicy(StepCosts({1: 1.0, 24: 1.3}, {0: 0.2}), max_rows=24, drafts=True), 0
        policy = policy.fork()
        calls = []
        for step in range(400):
            if ahead and step and policy.plan_root():
                rested += 1
                continue
            plan = policy.plan()
            if plan.draft:
                calls.append(step)
                policy.history.observe([1.0] + [0.5] * 23, [0], verified=24, waited=plan.waited)
        asked.append(calls)
        assert (rested > 300) == ahead
    assert asked[0] == asked[1] and 10 < len(asked[0]) < 60


def test_no_rest_where_a_copy_pays() -> None:
    policy = RowPolicy(StepCosts({1: 1.0, 8: 1.1}), max_rows=8, drafts=False)
    assert not policy.plan_root()  # a text's beginning is planned when it is there
    policy.plan()
    assert policy.plan_root()
    assert policy.plan_root(copied=7, probability=0.01)
    assert not policy.plan_root(copied=7, probability=0.9)
    assert policy.history.steps == 3


def test_rows_are_dear_by_measured_costs() -> None:
    cheap, dear = StepCosts(step={1: 1.0, 8: 1.5}), StepCosts(step={1: 1.0, 4: 1.8, 12: 4.0})
    for costs, expected in ((StepCosts(), False), (cheap, False), (dear, True)):
        assert RowPolicy(costs, max_rows=16, drafts=True).rows_are_dear is expected
    assert not RowPolicy(dear, max_rows=16, drafts=True, adaptive=False).rows_are_dear


def test_a_wrong_cost_of_plain_decoding_is_corrected() -> None:
    """Where trees are always chosen nothing else would measure it again."""
    costs, rows = StepCosts(), []
    policy = RowPolicy(costs, max_rows=8, drafts=False)
    for step in range(3 * PLAIN_INTERVAL):
        rows.append(policy.plan(copied=7, probability=0.5).rows)
        costs.observe_step(rows[-1], 10.0 if step == 0 else 1.0 if rows[-1] == 1 else 4.0)
    assert rows[0] == 1 and rows[1] > 1 and rows[-PLAIN_INTERVAL:] == [1] * PLAIN_INTERVAL


def test_on_a_cpu_few_plain_steps_decide_about_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = []

    def best_draft(rates: PlanRates, best: Plan, speed: float) -> tuple[Plan, float]:
        decided.append(list(rates._sizes))
        return best, speed

    monkeypatch.setattr(PlanRates, "best_draft", best_draft)
    costs = StepCosts({1: 1.0, 8: 4.0}, {0: 3.0})
    policy, padded = (RowPolicy(costs, max_rows=8, drafts=1, sizes=sizes) for sizes in (EAGER_SIZES, (1, 8)))
    for each in (policy, padded):
        each.history.observe([1.0] + [0.1] * 7, [0], verified=8, waited=16)
        assert not any(each.plan().draft for _ in range(80))
    assert decided.count([8]) == 80 and 1 <= len(decided) - 80 <= 3
    # What prompt lookup finds is used at once.
    for _ in range(4):
        assert policy.plan().rows == 1
        assert policy.plan(copied=7, probability=0.99).rows == 8


def test_work_that_waits_for_cores_costs_what_it_takes() -> None:
    """On a busy CPU a draft call of many short parts waits at each, a plain step seldom."""
    costs = StepCosts({1: 1.0, 8: 1.5}, {0: 0.8})
    policy = RowPolicy(costs, max_rows=8, drafts=1)
    policy.history.observe([1.0] + [0.7] * 7, [0, 1, 2], verified=8, waited=16)

    def drafts(steps: int, wait: float) -> int:
        """Return how many draft calls there are while they take `wait` times what they cost."""
        count = 0
        for _ in range(steps):
            plan = policy.plan()
            if plan.draft:
                count += 1
                costs.observe_draft(0.8, 0, wait * 0.8)
                policy.history.observe([1.0] + [0.7] * 7, [0, 1, 2], verified=8, waited=plan.waited)
            cost = 1.0 if plan.rows == 1 else 1.5
            costs.observe_step(plan.rows, cost, cost * (wait if plan.rows > 1 else 1.1))
        return count

    assert drafts(64, 1.0) > 50
    drafts(24, 6.0)
    assert drafts(128, 6.0) < 20
    # A plain step that was preempted says nothing about the draft.
    assert StepCosts({1: 1.0}, {0: 1.0}).of(1) == 1.0
    drafts(64, 1.0)
    drafts(256, 1.0)
    assert drafts(64, 1.0) > 30


class LookupPlay:
    """Texts in which a draft is right by chance and prompt lookup in stretches of 12 tokens."""

    def __init__(self, draft: float | None, seed: int):
        """`draft`: what a call costs, in plain steps; None: lookup alone."""
        self._draft, self._choose = draft, random.Random(seed)
        sizes = (1, 8, 16, 24)
        self._policy = RowPolicy(StepCosts(), max_rows=24, drafts=draft is not None, sizes=sizes)

    def time(self, right: float, tokens: int = 150) -> float:
        """Return how long a text takes of which the draft has a token right with probability `right`."""
        self._policy = policy = self._policy.fork()
        position, seconds, copies = 0, 0.0, self._copies(tokens)
        while position < tokens:
            copied = next(count for count in range(DEPTH + 1) if not copies[position + count])
            plan = policy.plan(copied=DEPTH if copied else 0, probability=0.85 if copied else 0.0)
            cost = gpu(plan.rows)
            policy.costs.observe_step(plan.rows, cost)
            accepted = min(copied, plan.rows - 1) if plan.lookup else 0
            if plan.draft and self._draft is not None:
                cost += self._draft
                policy.costs.observe_draft(self._draft)
                accepted = self._call(plan, copied, right)
            if plan.lookup:
                policy.settle(1 + accepted, cost)
            seconds, position = seconds + cost, position + 1 + accepted
        return seconds * tokens / position

    def _call(self, plan: Plan, copied: int, right: float) -> int:
        followed = next((depth for depth in range(DEPTH) if self._choose.random() >= right), DEPTH)
        verified, weights = plan.rows if plan.rows > 1 else DEPTH + 1, [0.7**row for row in range(24)]
        path = list(range(1 + min(max(followed, copied), verified - 1)))
        self._policy.history.observe(weights, path, verified=verified, waited=plan.waited)
        return min(len(path), plan.rows) - 1

    def _copies(self, tokens: int) -> list[bool]:
        """Return which tokens prompt lookup has; a stretch begins at three of a hundred places."""
        copies = [False] * (tokens + 2 * DEPTH)
        begins = [index for index in range(tokens) if self._choose.random() < 0.03]
        for begin in begins:
            copies[begin : begin + 12] = [True] * 12
        return [copy and index % 15 != 0 for index, copy in enumerate(copies)]


@pytest.mark.parametrize(("draft", "gain"), [(1.15, 1.08), (0.3, 1.3)])
def test_a_draft_beside_lookup_costs_poor_texts_little(draft: float, gain: float) -> None:
    """As on MT-Bench, where a draft and lookup together were slower than lookup alone."""
    times = {cost: {0.8: 0.0, 0.2: 0.0} for cost in (None, draft)}
    for seed in range(10, 16):
        for cost, of_texts in times.items():
            play = LookupPlay(cost, seed)
            for text in range(20):
                right = (0.8, 0.2)[text % 2]
                of_texts[right] += play.time(right)
    alone, both = times.values()
    assert sum(alone.values()) / sum(both.values()) > gain
    assert alone[0.2] / both[0.2] > 0.945


def test_a_prompt_is_read_where_the_answer_may_pay_for_it() -> None:
    """By a draft that has not seen it: a call costs 0.1 plain steps, each position to be read 0.02."""

    def asks(unread: int, steps: int = 0) -> bool:
        costs = StepCosts({rows: gpu(rows) for rows in (1, 2, 4, 8)}, {0: 0.1}, backlog=0.02)
        policy = RowPolicy(costs, max_rows=8, drafts=1).fork()
        policy.rested(steps)
        policy.unread = unread
        return policy.plan().draft

    assert asks(0) and asks(800)
    assert not asks(2_000) and not asks(20_000)
    assert not asks(20_000, steps=160)
    assert asks(20_000, steps=1_600)
