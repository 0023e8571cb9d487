"""Requests to a session."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bough.compress.compressor import Compressed
from bough.engine.images import PlacedPicture
from bough.engine.sampler import SamplingParams
from bough.prefix_cache.boundaries import SnapshotKind
from bough.text.grammar import Grammar
from bough.text.grammar_jobs import CompiledGrammar
from bough.text.infill import Infill
from bough.text.tools import Tool


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    boundaries: dict[int, SnapshotKind]  # how many ids precede each turn
    reasoning: Literal["open", "possible", "none"]  # begun in the prompt, or the answer may begin with it
    tools: list[Tool]  # the answer may call these
    images: tuple[PlacedPicture, ...] = ()
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
    break_loops: bool = True  # reasoning and answers that repeat themselves are ended
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
        if self.grammar is not None or self.allowed_tools is not None:
            return True
        functions = [tool.get("function", tool) for tool in self.tools or () if isinstance(tool, Mapping)]
        strict = any(isinstance(each, Mapping) and each.get("strict") for each in functions)
        return strict or self.tool_choice not in ("auto", "none")
