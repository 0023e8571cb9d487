"""What has happened in one text: its steps since the last tree, and what its draft calls had accepted."""

from collections.abc import Sequence
from copy import copy
from typing import Self

from bough.spec.acceptance import WAITS, AcceptanceEstimator, UsualAcceptance


class TextHistory:
    """Counts one text's steps and estimates its acceptance; `fork` makes that of another."""

    def __init__(self, sizes: Sequence[int], mixes: int):
        """`sizes` of trees that are asked for; `mixes` of drafts that a call may ask."""
        self._estimators = [AcceptanceEstimator(sizes) for _ in range(max(1, mixes))]
        self.begun = False
        self.mix = 0  # in use
        self.waited = 0  # plain steps since the last tree
        self.unchanged = 0  # the same, or since the last outcome or the beginning of the text
        self.hopeless = 0  # so long, in such steps, no draft call pays
        self.steps = 0
        self.since_draft = 0

    def fork(self) -> Self:
        """Return the history of a new text."""
        other = copy(self)
        other._estimators = [estimator.fork() for estimator in self._estimators]
        other.begun, other.unchanged, other.steps, other.hopeless = False, 0, 0, 0
        return other

    @property
    def usual(self) -> UsualAcceptance:
        """What all texts have in common, with the first mix."""
        return self._estimators[0].usual

    @property
    def acceptance(self) -> AcceptanceEstimator:
        """Of the mix in use."""
        return self._estimators[self.mix]

    def begin(self) -> None:
        """Begin the text, unless it has begun: no tree has just ended there."""
        if not self.begun:
            for estimator in self._estimators:
                estimator.step(new_text=True, count=0)
            self.waited, self.begun = WAITS[-1], True

    def begin_steps(self, count: int = 1) -> None:
        for estimator in self._estimators:
            estimator.step(count=count)

    def end_steps(self, count: int = 1, *, rows: int = 1, draft: bool = False) -> None:
        """Count steps; `rows` and `draft` of the last."""
        usual = self.usual
        usual.unasked += count
        self.since_draft += count
        self.waited += count
        self.unchanged += count
        self.steps += count
        if draft:
            self.since_draft = usual.unasked = 0
        if rows > 1:
            self.waited = self.unchanged = self.hopeless = 0

    def observe(
        self, weights: list[float], path: list[int], *, verified: int, waited: int, mix: int = 0
    ) -> None:
        """Learn from a draft call: probabilities of its rows' paths, the accepted rows, the rows verified."""
        self.unchanged = self.hopeless = 0
        self._estimators[mix].observe(weights, path, verified=verified, waited=waited)
