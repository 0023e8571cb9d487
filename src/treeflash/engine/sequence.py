"""One request and the sequence that runs it: its phase, its tokens, and where it ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from treeflash.engine.events import FinishReason
from treeflash.engine.runner import Forward
from treeflash.engine.sampler import SamplingParams
from treeflash.engine.stats import RequestStats
from treeflash.prefix_cache.boundaries import SnapshotKind
from treeflash.spec.drafter import Constraint
from treeflash.spec.tree import Tree


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    # The caller may end the text inside a step's tokens (`Engine.stop`): no forward is launched before it has
    # seen them, because the recurrent states could not be rolled back.
    may_stop: bool = True
    constraint: Constraint | None = None  # which tokens may follow
    draft_budget: int | None = None  # nodes of a tree, at most; None: the engine's own limit
    trees: bool = False  # report every step's tree
    # Prompt positions where turns begin; None: nothing of this request goes to the prefix cache.
    boundaries: Mapping[int, SnapshotKind] | None = None


class Phase(Enum):
    WAITING = auto()  # for a slot
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Launched:
    """Work of the sequence's next step that is already enqueued on the device.

    Without a forward only the draft is. Once a forward is in flight, committed rows cannot be rolled back.
    """

    tree: Tree
    forward: Forward | None


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    sampling: SamplingParams  # the request's, with a seed
    stats: RequestStats
    # What of the next step may be launched before its events are returned.
    launch_ahead: Literal["nothing", "draft", "forward"]
    max_tokens: int  # to generate: the request's limit and what fits in the context
    slot: int = -1
    phase: Phase = Phase.WAITING
    chunk_ends: list[int] = field(default_factory=list)  # of the prompt
    processed: int = 0  # prompt tokens
    tokens: list[int] = field(default_factory=list)  # prompt and generated tokens
    reason: FinishReason | None = None
    launched: Launched | None = None
    committed_rows: int = 0  # of the last step, which `Engine.stop` may roll back
    new_tokens: int = 0  # of the last step

    @property
    def anchor(self) -> int:
        """The last token: sampled, and the root of the next tree."""
        return self.tokens[-1]

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.stats.generated_tokens

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    def deliver(self, sampled: list[int]) -> "Delivered":
        """Append what plain decoding would have delivered of a step's sampled tokens."""
        delivered = _delivered(sampled, self.request, self.room)
        self.tokens += delivered.tokens
        self.stats.generated_tokens += len(delivered.tokens)
        self.new_tokens = len(delivered.tokens)
        if delivered.tokens:
            self.stats.token_arrived()
        if delivered.reason is not None:
            self.finish(delivered.reason)
        return delivered

    def finish(self, reason: FinishReason) -> None:
        self.reason, self.phase = reason, Phase.FINISHED


@dataclass(frozen=True, slots=True)
class Delivered:
    tokens: list[int]
    reason: Literal["stop", "length"] | None  # why the text ends here; None: it goes on
    rows: int  # of the step that plain decoding would have processed by now


def _delivered(sampled: list[int], request: Request, room: int) -> Delivered:
    kept = sampled[:room]
    delivered = Delivered(kept, "length" if len(sampled) >= room else None, len(kept))
    for count, token in enumerate(kept):
        if token in request.stop_ids:
            # An end token is sampled after the row before it, which has therefore been processed.
            delivered = Delivered(kept[:count], "stop", count + 1)
            break
    if request.constraint is not None:
        complete = request.constraint.accept(delivered.tokens)
        if complete is not None:
            return Delivered(delivered.tokens[:complete], "stop", complete)
    return delivered
