"""What a session is asked and what it answers, as values; knows no tensors and no protocol."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treeflash.engine.events import Progress
from treeflash.engine.sampler import SamplingParams, TokenLogprob
from treeflash.engine.stats import RequestStats
from treeflash.text.grammar import Grammar

__all__ = [
    "Finished",
    "Grammar",
    "Progress",
    "Reasoning",
    "SessionEvent",
    "Text",
    "TextRequest",
    "TokenLogprob",
    "ToolArguments",
    "ToolCall",
    "TreeStep",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Exactly one of `messages` (rendered by the chat template) and `prompt` (taken as it is)."""

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | list[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None  # {"type": "function", "function": {...}}
    tool_choice: Literal["auto", "none", "required"] | str = "auto"  # or the name of the tool to call
    parallel_tool_calls: bool = True
    max_tokens: int | None = None  # None: what fits in the context
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    thinking: bool | None = None  # None: the template's default
    thinking_budget: int | None = None  # tokens of reasoning, after which it is brought to an end
    grammar: Grammar | None = None  # of the answer; reasoning is free
    template_options: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    draft_budget: int | None = None  # nodes of a tree, at most; 0: plain decoding; None: as configured
    trees: bool = False  # report every step's tree
    cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers; whole characters."""

    text: str
    logprobs: list[TokenLogprob] | None = None  # of tokens since the last piece, when asked for


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer; whole characters."""

    text: str
    logprobs: list[TokenLogprob] | None = None  # of tokens since the last piece, when asked for


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins; its arguments follow."""

    index: int  # of the answer's calls, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next piece of a call's arguments; the pieces of one call join to a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class TreeStep:
    """One step's tree, after it was verified; row 0 is the token that was already decided."""

    tokens: list[str]
    parents: list[int]  # -1 for the root
    accepted: list[int]  # rows, the root first
    draft_ms: float
    step_ms: float  # the whole step, the draft included


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    reason: Literal["stop", "length", "tool_calls", "cancelled"]
    stop_string: str | None = None  # of the request's, which ended the text
    tokens: list[int]  # delivered, end tokens not among them
    stats: RequestStats
    logprobs: list[TokenLogprob] | None = None  # one for each token, when asked for


SessionEvent = Progress | Reasoning | Text | ToolCall | ToolArguments | TreeStep | Finished
