"""One request and the sequence that runs it: its phase, its tokens, and where it ends."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, TypeVar

import numpy as np

from bough.engine.chunk import ChunkForward
from bough.engine.events import FinishReason, Progress
from bough.engine.images import PlacedPicture
from bough.engine.sampler import SamplingParams
from bough.engine.stats import RequestStats
from bough.errors import PromptTooLong, UsageError
from bough.prefix_cache.boundaries import SnapshotKind
from bough.spec.drafter import Constraint
from bough.state.draft_ring import SavedRings
from bough.state.snapshots import SavedSequence

LaunchAhead = Literal["nothing", "draft", "forward"]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]  # at the rows of an image, which names it by them, ids that are in no vocabulary
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
    # Prefill alone, while nothing else runs, for a later request that begins with this prompt: nothing is
    # sampled. The snapshot is evicted first if nobody has used it after these seconds.
    prefill_for_s: float | None = None
    images: tuple[PlacedPicture, ...] = ()  # of the prompt, in order

    @property
    def text(self) -> list[int]:
        """Return the prompt's tokens without images."""
        return [token for token in self.prompt if token >= 0] if self.images else self.prompt

    @property
    def prefill_only(self) -> bool:
        return self.prefill_for_s is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can run, in tokens; enough to refuse a request where the engine is not."""

    max_ctx: int
    context_length: int  # that the model was made for
    vocabulary: int

    @property
    def raisable(self) -> bool:
        """Return whether the model was made for a longer context than this."""
        return self.max_ctx < self.context_length

    def check(self, request: Request) -> None:
        if not request.prompt:
            raise UsageError("the prompt has no tokens", "give some text", param="prompt")
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens is {request.max_tokens}, needed at least 1", param="max_tokens")
        if len(request.prompt) > self.max_ctx:
            raise PromptTooLong(len(request.prompt), self.max_ctx, raisable=self.raisable)
        pads = {index for image in request.images for index in range(image.start, image.end)}
        outside = [
            token
            for index, token in enumerate(request.prompt)
            if not 0 <= token < self.vocabulary and index not in pads
        ]
        if outside:
            raise UsageError(
                f"token {outside[0]} in the prompt, the vocabulary has ids 0 to {self.vocabulary - 1}",
                param="prompt",
            )
        request.sampling.check_vocabulary(self.vocabulary)


class Phase(Enum):
    WAITING = auto()  # for a slot and pages
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


class OwnConstraint:
    """A request's constraint, whose first error is kept: it ends this request, not the step of several.

    After an error it allows everything; the sequence's tokens are then not delivered.
    """

    def __init__(self, constraint: Constraint):
        self._constraint = constraint
        self.error: Exception | None = None

    def forced(self, limit: int) -> list[int]:
        return self._try(lambda: self._constraint.forced(limit), [])

    def kept(self, tokens: Sequences[int], parents: Sequences[int]) -> list[int]:
        return self._try(lambda: self._constraint.kept(tokens, parents), [0])

    def masks(self, tokens: Sequences[int], parents: Sequences[int]) -> list[np.ndarray | None]:
        return self._try(lambda: self._constraint.masks(tokens, parents), [None] * len(tokens))

    def idle(self, rows: int) -> bool:
        return self._try(lambda: self._constraint.idle(rows), True)

    def accept(self, tokens: Sequences[int]) -> int | None:
        return self._try(lambda: self._constraint.accept(tokens), None)

    def _try(self, work: Callable[[], Found], otherwise: Found) -> Found:
        if self.error is None:
            try:
                return work()
            except Exception as error:  # of any kind: a constraint is the caller's
                self.error = error
        return otherwise


@dataclass(frozen=True, slots=True)
class Parked:
    """A sequence's state while it has no slot."""

    state: SavedSequence
    draft: SavedRings | None


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    sampling: SamplingParams  # the request's, with a seed
    stats: RequestStats
    # What of the next step may be launched before its events are returned.
    launch_ahead: LaunchAhead
    max_tokens: int  # to generate: the request's limit and what fits in the context
    constraint: OwnConstraint | None = None  # the request's
    slot: int = -1
    phase: Phase = Phase.WAITING
    chunk_ends: list[int] = field(default_factory=list)  # of the prompt
    processed: int = 0  # prompt tokens
    chunk: ChunkForward | None = None  # of the prompt, begun: the state is between two of its layers
    tokens: list[int] = field(default_factory=list)  # prompt and generated tokens
    arrival: int = 0  # its number in the order of arrival
    # A sequence with the same prompt that processes it for both.
    leader: "Sequence | None" = None
    parked: Parked | None = None
    reason: FinishReason | None = None
    in_flight: bool = False  # the next step's forward is launched: no committed row can be rolled back
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
    def chunk_end(self) -> int:
        """Where the prompt's next chunk ends."""
        return next(end for end in self.chunk_ends if end > self.processed)

    @property
    def sees(self) -> bool:
        """Whether the prompt's next chunk has rows of images: decode steps cannot read it."""
        images = self.request.images
        return bool(images) and any(
            image.start < self.chunk_end and image.end > self.processed for image in images
        )

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def ready(self) -> bool:
        """Whether it may be admitted: not while another processes its prompt."""
        return self.leader is None or self.leader.phase not in (Phase.WAITING, Phase.PREFILL)

    @property
    def error(self) -> Exception | None:
        return self.constraint.error if self.constraint is not None else None

    @property
    def progress(self) -> Progress:
        """What of the prompt has been processed."""
        whole, cached = self.processed, self.stats.cached_tokens
        processed = whole + (self.chunk.processed if self.chunk is not None else 0)
        return Progress(processed, len(self.request.prompt), cached, whole)

    def deliver(self, sampled: list[int]) -> "Delivered":
        """Append what plain decoding would have delivered of a step's sampled tokens."""
        delivered = self._delivered(sampled)
        if self.error is not None:
            delivered = Delivered([], "cancelled", 0)
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

    def _delivered(self, sampled: list[int]) -> "Delivered":
        kept = sampled[: self.room]
        delivered = Delivered(kept, "length" if len(sampled) >= self.room else None, len(kept))
        for count, token in enumerate(kept):
            if token in self.request.stop_ids:
                # An end token is sampled after the row before it, which has therefore been processed.
                delivered = Delivered(kept[:count], "stop", count + 1)
                break
        if self.constraint is not None:
            complete = self.constraint.accept(delivered.tokens)
            if complete is not None:
                return Delivered(delivered.tokens[:complete], "stop", complete)
        return delivered


@dataclass(frozen=True, slots=True)
class Delivered:
    tokens: list[int]
    reason: FinishReason | None  # why the text ends here; None: it goes on
    rows: int  # of the step that plain decoding would have processed by now
