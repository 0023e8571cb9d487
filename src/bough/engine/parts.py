"""Parts: what the parts of an engine share."""

from dataclasses import dataclass

from bough.engine.images import PictureEncoder
from bough.engine.runner import StepRunner
from bough.engine.scheduler import Scheduler
from bough.engine.sequence import Sequence
from bough.models.decoder import Target
from bough.prefix_cache.cache import PrefixCache
from bough.spec.drafter import Drafter
from bough.state.sequences import SequenceStates


@dataclass(frozen=True, slots=True)
class Parts:
    target: Target
    drafter: Drafter
    states: SequenceStates
    runner: StepRunner
    prefixes: PrefixCache
    scheduler: Scheduler
    max_rows: int  # of a tree
    encoder: PictureEncoder | None  # None: the model is loaded without its vision tower
    working: list[Sequence]  # that the current step works for: if it raises, they have failed, and no others
