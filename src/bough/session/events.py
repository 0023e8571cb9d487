"""The events that a session yields of a request. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bough.engine.events import Progress

if TYPE_CHECKING:
    from bough.engine.sampler import TokenLogprob
    from bough.engine.stats import RequestStats


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str
    logprobs: list["TokenLogprob"] | None = None  # of the tokens since the last piece, if requested


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    logprobs: list["TokenLogprob"] | None = None  # of the tokens since the last piece, if requested


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The start of a tool call; its arguments follow."""

    index: int  # of the call within the answer, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next piece of a call"s arguments; all pieces of a call form a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class TreeStep:
    """The tree of one step after verification; row 0 is the token committed by the step before."""

    tokens: list[str]
    parents: list[int]  # -1 for the root
    accepted: list[int]  # rows, the root first
    draft_ms: float
    step_ms: float  # the whole step, the draft included


@dataclass(frozen=True, slots=True)
class Vector:
    """What was computed of a prompt: its pooled hidden state, or a relevance alone."""

    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    reason: Literal["stop", "length", "tool_calls", "cancelled"]
    stop_string: str | None = None  # the stop string that ended the text
    tokens: list[int]  # delivered, without end tokens
    stats: "RequestStats"
    logprobs: list["TokenLogprob"] | None = None  # one for each token, if requested


SessionEvent = Progress | Reasoning | Text | ToolCall | ToolArguments | TreeStep | Vector | Finished
