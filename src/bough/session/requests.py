"""Requests to a session and the events it yields."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bough.compress.compressor import Compressed
from bough.engine.events import Failed, Progress
from bough.engine.sampler import SamplingParams, TokenLogprob
from bough.engine.stats import RequestStats
from bough.prefix_cache.boundaries import SnapshotKind
from bough.text.grammar import Grammar
from bough.text.grammar_jobs import CompiledGrammar
from bough.text.infill import Infill
from bough.text.tools import Tool

__all__ = [
    "CompressOptions",
    "Failed",
    "Finished",
    "Grammar",
    "Infill",
    "Progress",
    "Prompt",
    "Reasoning",
    "SessionEvent",
    "Text",
    "TextRequest",
    "TokenLogprob",
    "ToolArguments",
    "ToolCall",
    "TreeStep",
    "Vector",
    "VectorOptions",
]


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    boundaries: dict[int, SnapshotKind]  # how many ids precede each turn
    reasoning: Literal["open", "possible", "none"]  # begun in the prompt, or the answer may begin with it
    tools: list[Tool]  # the answer may call these
    compressed: Compressed | None = None  # what compression did; None: it was not asked for
    grammar: CompiledGrammar | None = None  # of the answer or of calls, from `RequestReader.check`


@dataclass(frozen=True, slots=True)
class CompressOptions:
    """A request's own settings of compression; None: as configured."""

    mode: Literal["off", "auto", "on"] | None = None  # None: on, since the request asks for it
    above: int | None = None
    to: float | None = None
    query: str = ""  # what is asked of the text; empty: the conversation says it
    keep: tuple[str | int, ...] = ()  # texts, and numbers of messages, that are not left out


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """What is computed of a prompt alone: its vector, or how well it answers a query."""

    query: str | None = None  # None: the vector is wanted
    truncate: bool = False  # leave out the end of a prompt that is too long
    dimensions: int | None = None  # of the vector, which is cut and normalised again; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A request with exactly one of `messages` (rendered by the chat template) and `prompt` (raw)."""

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | list[int] | None = None
    infill: Infill | None = None  # a gap after the prompt, which the answer fills
    vector: VectorOptions | None = None  # nothing is generated
    tools: Sequence[Mapping[str, Any]] | None = None  # {"type": "function", "function": {...}}
    tool_choice: Literal["auto", "none", "required"] | str = "auto"  # or the name of the tool to call
    allowed_tools: frozenset[str] | None = None  # names that may be called; None: of all tools
    parallel_tool_calls: bool = True
    max_tokens: int | None = None  # None: as many as fit in the context
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()  # end the text, beside the model's end tokens
    ignore_eos: bool = False  # the model's end tokens do not end the text
    thinking: bool | None = None  # None: the template's default
    thinking_budget: int | None = None  # reasoning tokens, after which reasoning is ended
    effort: str | None = None  # of reasoning, one of EFFORTS; None: as recommended for the model
    break_loops: bool = True  # reasoning that repeats itself is ended
    grammar: Grammar | None = None  # of the answer; reasoning is unconstrained
    continue_final: bool = False  # the last message is the beginning of the answer
    template_options: Mapping[str, Any] = field(default_factory=dict)  # further template variables
    draft_budget: int | None = None  # most nodes of a tree; 0: plain decoding; None: as configured
    trees: bool = False  # report every step's tree
    compress: CompressOptions | None = None  # None: as configured
    # Only process the beginning that later requests share, and keep it for this time; nothing is generated.
    prefill_for_s: float | None = None
    cancelled: Callable[[], bool] = lambda: False
    affinity: str = ""  # replicas of a model keep requests of one affinity together, for their prefix cache
    streamed: bool = True  # its events are used as they come, not only all at the end
    encoded: Prompt | None = None  # from `Session.check`

    @property
    def constrained(self) -> bool:
        """Return whether a grammar may have to be compiled for it."""
        if self.grammar is not None or self.allowed_tools is not None:
            return True
        functions = [tool.get("function", tool) for tool in self.tools or () if isinstance(tool, Mapping)]
        strict = any(isinstance(each, Mapping) and each.get("strict") for each in functions)
        return strict or self.tool_choice not in ("auto", "none")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of reasoning; whole characters."""

    text: str
    logprobs: list[TokenLogprob] | None = None  # of the tokens since the last piece, if requested


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer; whole characters."""

    text: str
    logprobs: list[TokenLogprob] | None = None  # of the tokens since the last piece, if requested


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The start of a tool call; its arguments follow."""

    index: int  # of the call within the answer, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next piece of a call's arguments; all pieces of a call form a JSON object."""

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
    stats: RequestStats
    logprobs: list[TokenLogprob] | None = None  # one for each token, if requested


SessionEvent = Progress | Reasoning | Text | ToolCall | ToolArguments | TreeStep | Vector | Finished
