"""Prompts: what a request's text means for the engine: token ids, what may follow them, how it is read.

Knows no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from treeflash.errors import UsageError
from treeflash.prefix_cache.boundaries import Kind
from treeflash.session.answer import Answer
from treeflash.session.constraint import Guide, GuidePlan
from treeflash.session.requests import TextRequest
from treeflash.text.grammar import GrammarCompiler
from treeflash.text.output import END_THINK, THINK, OutputParser
from treeflash.text.stream import TextStream
from treeflash.text.template import ChatTemplate, Rendered
from treeflash.text.tokenizer import Tokenizer
from treeflash.text.tools import CLOSE, OPEN, Tool, call_grammar, read_tools, syntax_of

# Ends reasoning that has used up its budget, in words that the answer can go on from.
CLOSING = "\n\nThat is enough thinking; I will answer now.\n"
GAP = "\n\n"  # as templates write it between reasoning and answer


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    boundaries: dict[int, Kind]  # behind how many of the ids turns begin
    reasoning: Literal["open", "possible", "none"]  # whether it has begun, or the answer may begin it
    tools: list[Tool]  # that the answer may call


class Prompts:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self._tokenizer, self._template = tokenizer, template

    def encode(self, request: TextRequest) -> Prompt:
        if (request.messages is None) == (request.prompt is None):
            raise UsageError("give either messages or a raw prompt")
        tools = read_tools(request.tools) if request.tool_choice != "none" else []
        if request.messages is None:
            return self._raw(request, tools)
        rendered = self._template.render(
            request.messages,
            tools=request.tools if tools else None,
            thinking=request.thinking,
            boundaries=True,
            **request.template_options,
        )
        ids, boundaries = self._tokens(rendered)
        opened = rendered.text.rfind(THINK) > rendered.text.rfind(END_THINK)
        reasoning = "none"
        if rendered.text.rstrip().endswith(THINK) and opened:
            reasoning = "open"
        elif self._template.supports_thinking and not rendered.text.rstrip().endswith(END_THINK):
            reasoning = "possible"
        return Prompt(ids, boundaries, reasoning, tools)

    def _raw(self, request: TextRequest, tools: list[Tool]) -> Prompt:
        if tools:
            raise UsageError("tools need messages: a raw prompt is not rendered by the chat template")
        prompt = request.prompt
        ids = self._begun(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt or ())
        return Prompt(ids, {}, "none", [])

    def _tokens(self, rendered: Rendered) -> tuple[list[int], dict[int, Kind]]:
        """Ids of the text, and behind how many of them turns begin.

        The template knows where the last turns do. The control tokens found there begin all the others.
        """
        kinds: dict[int, Kind] = dict.fromkeys(rendered.boundaries, "turn")
        if len(rendered.boundaries) > 1:
            kinds[rendered.boundaries[0]] = "head"
        if rendered.question is not None:
            kinds[rendered.question] = "question"
        # Templates write the first token themselves, all but the one we supply.
        begun = self._template.is_fallback and self._tokenizer.bos_id is not None
        ids: list[int] = self._begun([]) if begun else []
        known: dict[int, Kind] = {}
        start = 0
        for end in [*sorted(kinds), len(rendered.text)]:
            # A cut in front of a control token, and only there, leaves the tokens as they are.
            if end < len(rendered.text) and not self._template.is_control_at(rendered.text, end):
                continue
            # What a message merely spells like a control token stays text.
            literals = [(a - start, b - start) for a, b in rendered.literals if start <= a and b <= end]
            ids += self._tokenizer.encode(rendered.text[start:end], literals=literals)
            if end < len(rendered.text):
                known[len(ids)] = kinds[end]
            start = end
        openers = {ids[place] for place in known}
        turns: dict[int, Kind] = {place: "turn" for place, id in enumerate(ids) if place and id in openers}
        return ids, turns | known

    def _begun(self, ids: list[int]) -> list[int]:
        return ids if self._tokenizer.bos_id is None else [self._tokenizer.bos_id, *ids]

    def answer(self, request: TextRequest, prompt: Prompt) -> Answer:
        """What reads the tokens that follow."""
        if request.messages is None:
            return Answer(self._tokenizer.stream(), OutputParser(), request.stop)
        # Tags are read even where a file calls them control tokens, which are not shown otherwise.
        tags = {self._tokenizer.id_of(tag) for tag in (THINK, END_THINK, OPEN, CLOSE)}
        visible = self._tokenizer

        def piece(id: int) -> bytes:
            return b"" if visible.is_control(id) and id not in tags else visible.token_bytes(id)

        parser = OutputParser(reasoning=prompt.reasoning, tools=prompt.tools)
        return Answer(TextStream(piece), parser, request.stop, one_call=not request.parallel_tool_calls)

    def guide(self, request: TextRequest, prompt: Prompt) -> Guide | None:
        """What may follow, where the request limits it."""
        token = self._tokenizer.id_of
        forced = self._forced_tools(request, prompt.tools)
        strict = [tool for tool in prompt.tools if tool.strict]
        answer = call = None
        if forced:
            if request.grammar is not None:
                raise UsageError("a request cannot ask for both a tool call and a grammar of its answer")
            answer = self._calls(
                forced, many=request.parallel_tool_calls and request.tool_choice == "required"
            )
        elif request.grammar is not None:
            answer = self._compiler.compile(request.grammar)
        elif strict and token(OPEN) is not None:
            # Whatever the others allow, a call of a strict tool obeys its schema.
            call = self._calls(prompt.tools, many=False, opened=True)
        reasoning = prompt.reasoning
        if reasoning == "possible" and answer is not None and not request.thinking:
            reasoning = "none"  # it was not asked for, and the grammar was
        budget = request.thinking_budget if reasoning != "none" else None
        if budget is not None and budget < 0:
            raise UsageError(f"thinking_budget is {budget}, needed 0 or more tokens", param="thinking_budget")
        if answer is None and call is None and budget is None:
            return None
        end = token(END_THINK)
        if reasoning != "none" and end is None:
            raise UsageError(f"the model has no token {END_THINK}, so that its reasoning cannot be limited")
        return Guide(
            GuidePlan(
                vocabulary=self._tokenizer.vocab_size,
                ends=self._tokenizer.stop_ids,
                reasoning=reasoning,
                begin_reasoning=token(THINK),
                end_reasoning=end,
                budget=budget,
                closing=[*self._tokenizer.encode(CLOSING), end] if end is not None else (),
                gap=self._tokenizer.encode(GAP),
                answer=answer,
                call_token=token(OPEN),
                call=call,
            )
        )

    def _forced_tools(self, request: TextRequest, tools: Sequence[Tool]) -> list[Tool]:
        """Those of which one has to be called; none where calls are the model's choice."""
        if request.tool_choice in ("auto", "none"):
            return []
        if not tools:
            raise UsageError(
                f"tool_choice is {request.tool_choice!r}, but the request has no tools", param="tool_choice"
            )
        if request.tool_choice == "required":
            return list(tools)
        named = [tool for tool in tools if tool.name == request.tool_choice]
        if not named:
            names = ", ".join(tool.name for tool in tools)
            raise UsageError(
                f"tool_choice is {request.tool_choice!r}, needed auto, none, required or {names}",
                param="tool_choice",
            )
        return named

    def _calls(self, tools: Sequence[Tool], *, many: bool, opened: bool = False):
        syntax = syntax_of(self._template.source)
        if syntax is None:
            raise UsageError("the model's chat template knows no tools, so that no call can be enforced")
        return self._compiler.compile(call_grammar(tools, syntax, many=many, opened=opened))

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer)
