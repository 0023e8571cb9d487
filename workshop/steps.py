"""Steps by hand, for tests and measurements."""

from torch import Tensor

from bough.models.step import Step
from bough.state.sequences import SequenceStates


def commit(states: SequenceStates, step: Step, last: Tensor) -> None:
    """Commit row `last` [S] of each slot's tree and its ancestors, and synchronise; -1 commits nothing."""
    counts = states.commit(step, last)
    for slot, count in zip(step.slots.tolist(), counts.tolist(), strict=True):
        states.lengths[slot] += count
