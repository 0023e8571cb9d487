"""What is learnt of draft calls: each is compared with the text that followed, while the device is busy."""

from collections.abc import Callable
from dataclasses import dataclass, field

from bough.kernels.tree.reference import accept_path
from bough.spec.draft_call import DraftCall, DraftReport
from bough.spec.drafter import StepOutcome
from bough.spec.policy import Plan, RowPolicy


@dataclass(slots=True)
class CalledDraft:
    """A draft call, and the tokens that followed it."""

    call: DraftCall
    report: DraftReport
    plan: Plan
    followed: list[int] = field(default_factory=list)

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
class Lessons:
    """What one text teaches: of verified trees at once, of others when the text has left them."""

    policy: RowPolicy
    depth: int  # of a tree, at most
    watched: CalledDraft | None = None  # a call that was not verified, compared with what follows
    compared: list[CalledDraft] | None = None  # the trees of each mix, compared with what follows

    def learn(self, called: CalledDraft | None, outcome: StepOutcome) -> None:
        """Learn from a step and the draft call it had."""
        if called is not None and outcome.rows > 1:
            self._learn_call(called, outcome.tokens, outcome.path, verified=outcome.rows)
        elif called is not None and self.watched is None:
            self.watched = called
        if called is not None and called.report.alone and self.compared is None:
            reports = (*called.report.alone, called.report)
            self.compared = [CalledDraft(called.call, report, called.plan) for report in reports]
        self._follow_watched(outcome.tokens)
        self._follow_compared(outcome.tokens)

    def _follow_watched(self, tokens: list[int]) -> None:
        """Compare a call that was not verified with the text until the text leaves its tree."""
        called = self.watched
        if called is not None and called.left(tokens, self.depth):
            path = called.path()
            verified = len(called.report.tokens)
            self._learn_call(called, called.followed[: len(path)], path, verified=verified)
            self.watched = None

    def _follow_compared(self, tokens: list[int]) -> None:
        """Compare the trees of several mixes with the text until it has left all of them."""
        if self.compared is None:
            return
        left = [called.left(tokens, self.depth) for called in self.compared]
        if all(left):
            paths = [called.path() for called in self.compared]
            self.policy.mixes.observe(paths)
            for mix, (called, path) in enumerate(zip(self.compared[:-1], paths[:-1], strict=True)):
                self._learn_acceptance(called, path, verified=len(called.report.tokens), mix=mix)
            self.compared = None

    def _learn_call(self, called: CalledDraft, tokens: list[int], path: list[int], *, verified: int) -> None:
        """Learn from a draft call, the tokens that followed it and the rows that they followed."""
        called.call.learn(called.report, tokens)
        self._learn_acceptance(called, path, verified=verified, mix=called.plan.mix)

    def _learn_acceptance(self, called: CalledDraft, path: list[int], *, verified: int, mix: int) -> None:
        weights, waited = called.report.probabilities, called.plan.waited
        self.policy.history.observe(weights, path, verified=verified, waited=waited, mix=mix)


class LessonQueue:
    """Steps that nothing has been learnt from yet: the next draft call need not wait for it."""

    def __init__(self) -> None:
        self._steps: list[tuple[Lessons, Callable[[], CalledDraft] | None, StepOutcome]] = []

    def add(
        self, lessons: Lessons, outcome: StepOutcome, called: Callable[[], CalledDraft] | None = None
    ) -> None:
        """`called` reads the step's draft call, which the device has finished."""
        self._steps.append((lessons, called, outcome))

    def learn(self) -> None:
        steps, self._steps = self._steps, []
        for lessons, called, outcome in steps:
            lessons.learn(None if called is None else called(), outcome)
