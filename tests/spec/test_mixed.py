"""Two drafts and prompt lookup on a simulated clock: never much slower than the better draft alone."""

import random

import pytest
import torch

from bough.config import SpecConfig
from bough.errors import UsageError
from bough.kernels.tree.reference import accept_path
from bough.session.pairing import NamedDraft
from bough.spec.calibration import SHARE_PRIOR, Share
from bough.spec.costs import StepCosts
from bough.spec.drafter import HostPath, StepOutcome, Turn
from bough.spec.mixed import MixedModel
from bough.spec.policy import MIX_TRIES, Mixes
from bough.spec.speculator import Speculator
from bough.spec.tree import Proposal
from tests.spec.test_speculator import VOCABULARY, Clock, ScriptedDraft, depths_of, novel, propose


class ScriptedBlock(ScriptedDraft):
    """Proposes a chain of four tokens, as an MTP block does."""

    def __init__(self, text: list[int], right: float):
        super().__init__(text, right)
        self._choose = random.Random(2)

    def candidates(self, anchors, slots, rank, count: int, chains=None) -> Proposal:
        found = super().candidates(anchors, slots, rank, count)
        found.ids[found.ids >= VOCABULARY] += 10  # wrong ones of its own
        found.ids[:, 4:], found.scores[:, 4:] = -1, -torch.inf
        path, gains = found.ids[..., 0].clone(), found.scores[..., 0].clone()
        given = torch.full((1, 15, 15), -2)
        for depth in range(4):
            given[0, depth] = torch.where(torch.arange(15) < depth, path[0], -1)
        first = found.scores.clone()
        first[:, 1:] = -torch.inf
        return Proposal(found.ids, found.scores, path[:, None], gains[:, None], given)


class Calls:
    """Counts the calls of several drafts, each at its own price."""

    def __init__(self, prices: dict[ScriptedDraft, float]):
        self._prices = prices

    @property
    def calls(self) -> float:
        return sum(price * draft.calls for draft, price in self._prices.items())


def clock(right: tuple[float, float], price: tuple[float, float], which: str, **options) -> Clock:
    text = novel(3000)
    drafts = ScriptedDraft(text, right[0]), ScriptedBlock(text, right[1])
    model = {"first": drafts[0], "other": drafts[1], "both": MixedModel(*drafts, width=0)}[which]
    speculator = Speculator(model, SpecConfig(**{"budget": 11, "lookup": False, **options}), StepCosts())
    return Clock(speculator, text, Calls(dict(zip(drafts, price, strict=True))))  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("right", "price"),
    [
        ((0.85, 0.3), (1.0, 1.0)),
        ((0.85, 0.85), (1.0, 2.0)),
        ((0.0, 0.8), (1.0, 1.0)),
        ((0.0, 0.0), (1.0, 1.0)),
        ((0.4, 0.7), (0.5, 0.2)),
    ],
)
def test_both_are_never_much_slower_than_the_better_one(
    right: tuple[float, float], price: tuple[float, float]
) -> None:
    speeds = {}
    for which in ("first", "other", "both"):
        run = clock(right, price, which)
        run.run(200)
        speeds[which] = run.run(1000)
    assert speeds["both"] > 0.94 * max(1.0, speeds["first"], speeds["other"]), speeds


def test_two_that_know_different_things_are_asked_together() -> None:
    speeds = {}
    for which in ("first", "other", "both"):
        run = clock((0.5, 0.5), (0.05, 0.05), which)
        run.run(200)
        speeds[which] = run.run(800)
    assert speeds["both"] > 1.1 * max(speeds["first"], speeds["other"]), speeds


def test_a_fixed_tree_holds_both_proposals() -> None:
    run = clock((1.0, 0.0), (0.0, 0.0), "both", adaptive=False, budget=22)
    tokens, parents = propose(run.drafter, Turn(0, run.text[:1], 64)).lists()
    # The first draft's path, and tokens of the other, which the text never has.
    assert set(run.text[1:9]) <= set(tokens) and max(tokens) >= VOCABULARY + 10
    assert len(parents) == 23


def test_each_draft_is_calibrated_by_itself() -> None:
    run = clock((0.95, 0.0), (0.1, 0.1), "both", adaptive=False)
    run.run(1000)
    call = run.drafter._draft_calls[2, False]
    claimed = torch.full((15, 1), 0.7).log()
    first, other = (float(each.correction().applied(claimed)[0].exp()) for each in call._calibrations)
    assert first > 0.85 and other < 0.15


def test_the_share_is_what_makes_the_text_likeliest() -> None:
    share, choose = Share(), random.Random(4)
    for _ in range(3000):
        # One draft is right three times as often as the other, and both are sure.
        token = 1 if choose.random() < 0.75 else 2
        share.observe([(2, 0.9), (3, 0.0)], [(1, 0.9)], 0, token)
    assert float(share.table()[0]) == pytest.approx(0.25, abs=0.08)
    assert float(share.table()[4]) == pytest.approx(SHARE_PRIOR)
    share.observe([(7, 0.0)], [(7, 0.0)], 0, 7)  # scores so low that nothing is left of them
    mixed = share.mixed(torch.tensor([0.9]).log(), torch.tensor([-torch.inf]))
    assert float(mixed.exp()) == pytest.approx(0.9 * float(share.table()[0]))


def test_mixes_are_compared_by_what_they_cost_and_have_accepted() -> None:
    step = {1: 1.0, 8: 1.2, 16: 1.4}

    def best(accepted: list[int], draft: list[float], found: Mixes | None = None) -> int:
        found = found or Mixes(3, list(step))
        for _ in range(30):
            found.observe([range(1 + count) for count in accepted])
        return found.best(step.__getitem__, draft.__getitem__)

    assert best([5, 3, 5], [0.3, 0.3, 0.6]) == 0
    assert best([2, 4, 4], [0.3, 0.3, 0.6]) == 1
    assert best([4, 4, 7], [0.1, 0.1, 0.2]) == 2
    # One that is slightly faster does not replace the one in use; one that is much faster does.
    mixes = Mixes(2, list(step))
    assert best([4, 2], [0.3, 0.3], mixes) == 0
    assert mixes.best(step.__getitem__, [0.32, 0.0].__getitem__) == 0
    for _ in range(200):
        mixes.observe([range(3), range(6)])
    assert mixes.best(step.__getitem__, [0.3, 0.3].__getitem__) == 1


def test_comparisons_are_seldom_once_they_are_enough() -> None:
    mixes, cost = Mixes(3, [1, 8]), [0.2, 0.2, 0.5]
    compared = []
    for _ in range(1000):
        mixes.step()
        compared.append(mixes.compares(0, 1.0, cost.__getitem__))
    assert all(compared[:MIX_TRIES]) and 15 < sum(compared) < 40
    assert not Mixes(1, [1, 8]).compares(0, 1.0, cost.__getitem__)


def test_several_texts_ask_the_mix_that_pays() -> None:
    """A step of several texts compares, then uses one mix for all; what each tree accepts is learnt."""
    text = novel(4000)
    drafts = ScriptedDraft(text, 0.0), ScriptedBlock(text, 0.9)
    for draft in drafts:
        one = draft.candidates

        def each(anchors, *asked, one=one) -> Proposal:
            return Proposal.stack([one(anchors, *asked).one(0)] * len(anchors))

        draft.candidates = each  # the same text in every slot
    drafter = Speculator(MixedModel(*drafts, width=0), SpecConfig(lookup=False), StepCosts())
    drafter.bind(lambda logits, positions, anchors, slots, count: (logits, logits))
    for slot in range(2):
        drafter.open(slot)
    position = 0
    for _ in range(150):
        turns = [Turn(slot, text[: position + 1], 23) for slot in range(2)]
        calls = [draft.calls for draft in drafts]
        drafter.draft(turns)
        trees = drafter.trees(turns)
        paths = []
        for tree in trees:
            tokens, parents = tree.lists()
            paths.append(
                accept_path(tokens, parents, [text[position + depth + 1] for depth in depths_of(parents)])
            )
        taken = min(map(len, paths))  # both go on at the same position
        made = [draft.calls - before for draft, before in zip(drafts, calls, strict=True)]
        drafter.commit(torch.zeros(taken, 0), [HostPath(0, None, [])])
        seconds = 0.2 * sum(made)
        drafter.observe(
            {
                slot: StepOutcome(
                    tree.size, path[:taken], text[position + 1 :][:taken], seconds, 1.0 + 0.05 * tree.size
                )
                for slot, (tree, path) in enumerate(zip(trees, paths, strict=True))
            }
        )
        position += taken
    # The first is called where both are compared, and there alone.
    assert 5 < drafts[0].calls < drafts[1].calls / 3
    assert position > 300


def test_names() -> None:
    assert NamedDraft.read("auto") == NamedDraft("auto", "auto")
    assert NamedDraft.read("lookup") == NamedDraft("lookup", "off")
    assert NamedDraft.read("auto,mtp") == NamedDraft("auto", "on")
    assert NamedDraft.read("a/b, c,mtp") == NamedDraft("a/b, c", "on")
    for bad in ("none,mtp", "mtp,mtp", "lookup,mtp", ",mtp"):
        with pytest.raises(UsageError, match="beside a draft only"):
            NamedDraft.read(bad)
