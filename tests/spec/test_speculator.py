"""The speculator on a simulated clock: never much slower than plain decoding, and back when it pays."""

import random
from collections.abc import Sequence

import pytest
import torch

from bough.config import SpecConfig
from bough.kernels.tree.reference import accept_path
from bough.spec.costs import StepCosts
from bough.spec.drafter import HostPath, StepOutcome, Turn
from bough.spec.speculator import Speculator
from bough.spec.tree import Proposal, Tree

VOCABULARY = 1000
DRAFT_COST = 0.3  # of a plain step


def step_cost(rows: int) -> float:
    return 1 + 0.03 * (rows - 1)


def propose(drafter: Speculator, turn: Turn) -> Tree:
    """Return the tree of a sequence that is alone."""
    drafter.draft([turn])
    return drafter.trees([turn])[0]


class ScriptedDraft:
    """Proposes the text with probability `right` a position, and claims `claim` for its first candidate."""

    taps: tuple[int, ...] = ()
    context_length = 0
    depth = 15
    passes = next_passes = 1.0
    pass_counts = (1,)

    def __init__(self, text: list[int], right: float, claim: float = 0.7, candidates: int = 4):
        self.text, self.right, self.claim = text, right, claim
        self.calls, self._candidates = 0, candidates
        self._length = 0
        self._choose = random.Random(1)

    def begin(self, slot: int) -> None: ...

    def flush(self, slot: int, text=()) -> int:
        return 0

    def unread(self, slot: int, text) -> int:
        return 0

    def observe(self, proposal: Proposal) -> None: ...

    def append(self, slot: int, features: torch.Tensor, *, skipped: int = 0) -> None:
        self._length += len(features)

    def candidates(self, anchors, slots, rank, count: int, chains=None) -> Proposal:
        self.calls += 1
        future = self.text[self._length + 1 :][:15]
        future += [-2] * (15 - len(future))
        # Wrong ones are tokens that the text never has.
        ids = VOCABULARY + torch.arange(4).repeat(len(future), 1)
        for depth, token in enumerate(future):
            if self._choose.random() < self.right and token >= 0:
                ids[depth, 0] = token
        rest = (1 - self.claim) / 4
        scores = torch.tensor([self.claim, rest, rest, rest]).log().expand(len(future), -1)
        scores = scores.clone()
        scores[:, self._candidates :] = -torch.inf  # as a ranking is padded
        return Proposal.of(ids[None, :, :count], scores[None, :, :count])


class Clock:
    """Runs a drafter over a given text as the engine would; `ahead`: as on a GPU, where the next forward is
    launched before the read-back, if the drafter plans the root alone."""

    def __init__(
        self, drafter: Speculator, text: list[int], draft: ScriptedDraft | None, *, ahead: bool = False
    ):
        self.drafter, self.text, self.draft = drafter, text, draft
        self.position, self.time, self.steps = 0, 0.0, 0
        self._ahead, self._root, self.planned = ahead, False, 0
        self._plain = 0  # steps that are not drafted
        drafter.bind(lambda logits, positions, anchors, slots, count: (logits, logits))
        drafter.open(0)

    def run(self, tokens: int) -> float:
        """Speed over so many tokens, in units of plain decoding."""
        start, begin = self.position, self.time
        while self.position < start + tokens:
            self._step()
        return (self.position - start) / (self.time - begin)

    def _turn(self, rows: int) -> Turn:
        return Turn(0, self.text[: self.position + 1], rows)

    def _tree(self, rows: int) -> Tree:
        """Return the next tree; on a host it may be decided that some are roots alone."""
        if not self._ahead and not self._plain:
            self._plain = self.drafter.plain_steps([self._turn(rows)])
        return Tree.root(self.text[self.position]) if self._plain else propose(self.drafter, self._turn(rows))

    def _step(self) -> None:
        calls = self.draft.calls if self.draft else 0
        tree = self._tree(1 if self._root else 64)
        drafting = DRAFT_COST * ((self.draft.calls if self.draft else 0) - calls)
        tokens, parents = tree.lists()
        observed = not self._plain
        self._plain = max(0, self._plain - 1)
        self._root = self._ahead and len(tokens) == 1 and self.drafter.plain_steps([self._turn(1)]) > 0
        self.planned += self._root
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        sampled = [self.text[self.position + depth + 1] for depth in depths]
        path = accept_path(tokens, parents, sampled)
        decided = [sampled[row] for row in path]
        cost = step_cost(len(tokens))
        self.drafter.commit(torch.zeros(len(path), 0), [HostPath(0, None, decided)])
        if observed:
            self.drafter.observe({0: StepOutcome(len(tokens), path, decided, drafting, cost)})
        self.time += cost + drafting
        self.position += len(decided)
        self.steps += 1


def novel(count: int, seed: int = 0) -> list[int]:
    """Text without repetitions to copy."""
    choose = random.Random(seed)
    return [choose.randrange(VOCABULARY) for _ in range(count)]


def clock(
    text: list[int],
    right: float | None,
    *,
    claim: float = 0.7,
    candidates: int = 4,
    ahead: bool = False,
    **options,
) -> Clock:
    draft = ScriptedDraft(text, right, claim, candidates) if right is not None else None
    drafter = Speculator(draft, SpecConfig(**options), StepCosts(), on_host=not ahead)
    return Clock(drafter, text, draft, ahead=ahead)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("claim", [0.1, 0.7, 0.99])
def test_a_draft_that_knows_nothing_costs_little(claim: float, ahead: bool) -> None:
    text = novel(3000)
    assert clock(text, 0.0, claim=claim, ahead=ahead).run(600) >= 0.95
    steady = clock(text, 0.0, claim=claim, ahead=ahead)
    steady.run(600)
    assert steady.run(2000) >= 0.97
    assert (steady.planned > 1500) == ahead


@pytest.mark.parametrize("ahead", [False, True])
def test_copying_text_is_taken_up_at_once(ahead: bool) -> None:
    """After 600 tokens with a useless draft the text repeats a block of 80 tokens over and over."""
    block = novel(80, seed=5)
    text = novel(600) + block * 30
    for right in (0.0, None):
        run = clock(text, right, ahead=ahead)
        run.run(690)
        before = run.steps
        run.run(100)
        assert run.steps - before <= 50
        assert run.run(600) > 3


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_that_gets_better_is_used_again(ahead: bool) -> None:
    run = clock(novel(4000), 0.0, lookup=False, ahead=ahead)
    run.run(800)
    assert run.draft is not None
    run.draft.right = 0.9
    run.run(150)
    assert run.run(400) > 2


@pytest.mark.parametrize("right", [0.5, 0.8, 0.95])
def test_the_size_is_near_the_best_fixed_one(right: float) -> None:
    text = novel(4000)
    fixed = max(
        clock(text, right, adaptive=False, budget=budget, lookup=False).run(1500)
        for budget in (3, 7, 15, 22, 31)
    )
    assert clock(text, right, budget=31, lookup=False).run(1500) >= 0.9 * fixed


def test_a_chain_has_no_branches_and_a_spine_tree_accepts_the_same() -> None:
    """With one candidate a depth, the tree of the same size is the chain: same acceptance, step for step."""
    text = novel(1500)
    chain = clock(text, 0.8, chain=True, adaptive=False, budget=15, lookup=False)
    tree = clock(text, 0.8, candidates=1, adaptive=False, budget=15, lookup=False)
    chain.run(1000)
    tree.run(1000)
    assert (chain.steps, chain.position) == (tree.steps, tree.position)


def test_silence_is_named_in_words() -> None:
    useless = clock(novel(3000), 0.0)
    assert useless.drafter.notes(0).warnings == []
    useless.run(1500)
    (note,) = useless.drafter.notes(0).warnings
    assert "not one token of" in note and "the draft of this target" in note
    assert useless.drafter.notes(0).warnings == [] and useless.drafter.notes(-1).warnings == [
        note
    ]  # once, and ever
    working = clock(novel(3000), 0.4)
    working.run(1500)
    assert working.drafter.notes(0).warnings == []


def test_without_a_draft_nothing_is_asked_and_plain_text_costs_nothing() -> None:
    assert clock(novel(1500), None).run(1200) >= 0.99


class KnownTokens:
    """Forbids what the text never has; may know what has to come."""

    def __init__(self, coming: list[int] | None = None):
        self._coming = coming or []

    def forced(self, limit: int) -> list[int]:
        return self._coming[:limit]

    def kept(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        kept: list[int] = []
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if row == 0 or (parent in kept and token < VOCABULARY):
                kept.append(row)
        return kept


@pytest.mark.parametrize("options", [{}, {"chain": True}, {"budget": 5}])
def test_forbidden_branches_are_never_proposed(options: dict) -> None:
    text = novel(200)
    for right, coming in ((0.6, []), (0.0, text[1:6]), (0.6, text[1:4])):
        run = clock(text, right, adaptive=False, **options)
        tokens, parents = propose(run.drafter, Turn(0, text[:1], 64, KnownTokens(coming))).lists()
        assert tokens[0] == text[0] and parents[0] == -1
        assert all(token < VOCABULARY for token in tokens)
        assert all(0 <= parent < row for row, parent in enumerate(parents) if row)
        assert len(tokens) <= options.get("budget", 22) + 1
        if not options.get("chain"):
            path = accept_path(tokens, parents, [text[depth + 1] for depth in depths_of(parents)])
            assert len(path) > len(coming)
        # Rows are still those of the tree that the drafter learns from.
        run.drafter.commit(torch.zeros(1, 0), [HostPath(0, None, [text[1]])])
        run.drafter.observe({0: StepOutcome(len(tokens), [0], [text[1]], 0.1, 1.0)})


def depths_of(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def test_forced_text_is_copied_without_a_draft() -> None:
    text = novel(50)
    run = clock(text, None, adaptive=False)
    tree = propose(run.drafter, Turn(0, text[:1], 64, KnownTokens(text[1:8])))
    assert tree.tokens.tolist() == text[:8]
    assert propose(run.drafter, Turn(0, text[:1], 1, KnownTokens(text[1:8]))).tokens.tolist() == text[:1]


def test_a_restored_drafter_copies_from_the_text_before() -> None:
    phrase = novel(30)
    run = clock([*phrase, *phrase], None)
    run.drafter.open(0, [*phrase, *phrase[:10]])
    run.drafter.observe({0: StepOutcome(1, [0], [phrase[10]], 0.0, 1.0)})
    tree = propose(run.drafter, Turn(0, [*phrase, *phrase[:11]], 8))
    assert tree.tokens.tolist() == phrase[10:18]
