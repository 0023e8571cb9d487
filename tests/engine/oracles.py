"""Drafters that hold the answer, more or less, for tests of the loop around them."""

import random
from collections.abc import Mapping, Sequence

import torch

from bough.spec.drafter import NoDrafter, Piece, StepOutcome, Turn
from bough.spec.prompt_lookup import PromptLookup
from bough.spec.tree import Proposal, Tree, build_tree


def trimmed(tree: Tree, weights: torch.Tensor) -> Tree:
    """Return the tree without padding rows."""
    return Tree(tree.packed, int((weights > -torch.inf).sum()))


class Oracle(NoDrafter):
    """Ranks each token of the answer first with probability `right`; else lower, or not at all."""

    def __init__(
        self,
        prompt: int,
        answer: list[int],
        *,
        budget: int,
        candidates: int = 4,
        right: float = 0.8,
        vocabulary: int,
        lookup: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        self._start, self._answer, self._budget = prompt, answer, budget
        self._candidates, self._right, self._vocabulary = candidates, right, vocabulary
        self._choose = random.Random(seed)
        self._lookup = PromptLookup() if lookup else None

    def prefill(self, slot: int, tokens: list[int], features: torch.Tensor | None) -> None:
        if self._lookup is not None:
            self._lookup.append(tokens)

    def observe(self, outcomes: Mapping[int, StepOutcome], prompts: Sequence[int] = ()) -> None:
        for outcome in outcomes.values():
            if self._lookup is not None:
                self._lookup.append(outcome.tokens)

    def trees(self, turns: Sequence[Turn], prompts: Sequence[Piece] = ()) -> list[Tree]:
        return [self._tree(turn.anchor, turn.position, turn.max_rows) for turn in turns]

    def _tree(self, anchor: int, position: int, max_rows: int) -> Tree:
        future = self._answer[position - self._start + 1 :][:15]
        if not future or max_rows < 2:
            return Tree.root(anchor)
        ids = torch.tensor([self._ranked(token) for token in future])
        scores = torch.tensor([0.7, 0.15, 0.08, 0.04][: self._candidates]).log().expand(len(future), -1)
        proposal = Proposal.of(ids, scores)
        if self._lookup is not None:
            if len(self._lookup) == position:
                self._lookup.append([anchor])
            copied, score = self._lookup.propose(len(future))
            chain = torch.tensor([copied or [-1] * len(future)])
            proposal = proposal.with_chains(chain, torch.full_like(chain, score, dtype=torch.float32))
        nodes = min(self._budget, max_rows - 1)
        return trimmed(*build_tree(torch.tensor([anchor]), proposal, nodes=nodes))

    def plain_steps(self, turns: Sequence[Turn]) -> int:
        return 0

    def _ranked(self, token: int) -> list[int]:
        others = self._choose.sample([t for t in range(self._vocabulary) if t != token], self._candidates)
        place = 0 if self._choose.random() < self._right else self._choose.choice([1, 2, self._candidates])
        return [*others[:place], token, *others[place:]][: self._candidates]


class RandomTrees(NoDrafter):
    """Trees of any shape, siblings in any order; most nodes hold the true token of their depth."""

    def __init__(self, prompt: int, answer: list[int], *, vocabulary: int, seed: int = 0):
        super().__init__()
        self._start, self._answer, self._vocabulary = prompt, answer, vocabulary
        self._choose = random.Random(seed)
        self._rests = False
        self.rested = 0

    def plain_steps(self, turns: Sequence[Turn]) -> int:
        self._rests = self._choose.random() < 0.7
        return self._rests

    def trees(self, turns: Sequence[Turn], prompts: Sequence[Piece] = ()) -> list[Tree]:
        return [self._tree(turn.anchor, turn.position, turn.max_rows) for turn in turns]

    def _tree(self, anchor: int, position: int, max_rows: int) -> Tree:
        assert not self._rests or max_rows == 1
        self.rested += self._rests
        self._rests = False
        choose, future = self._choose, self._answer[position - self._start + 1 :]
        tokens, parents, depths = [anchor], [-1], [0]
        for row in range(1, choose.choice([1, 1, choose.randint(1, max_rows)])):
            parent = row - 1 if choose.random() < 0.6 else choose.randrange(row)
            depth = depths[parent]
            taken = {tokens[other] for other in range(1, row) if parents[other] == parent}
            token = choose.randrange(self._vocabulary)
            if depth < len(future) and choose.random() < 0.75:
                token = future[depth]
            if token in taken:
                continue_with = [t for t in range(self._vocabulary) if t not in taken]
                token = choose.choice(continue_with)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth + 1)
        return Tree.of(tokens, parents)
