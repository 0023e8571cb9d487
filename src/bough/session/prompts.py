"""Prompts: a request's prompt tokens, the constraint on its output, and the stream that decodes it."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from bough.config import EFFORTS
from bough.engine.images import PlacedPicture
from bough.errors import UsageError
from bough.images.pixels import Picture
from bough.prefix_cache.boundaries import SnapshotKind
from bough.session.constraint import ConstraintSpec, TokenConstraint
from bough.session.output import OutputStream
from bough.session.pictures import PAD, VISION_END, Pictures
from bough.session.repeats import Repeats
from bough.session.requests import Prompt, TextRequest
from bough.text.grammar import GrammarCompiler, Matcher
from bough.text.grammar_jobs import CompiledGrammar, GrammarJob, Grammars
from bough.text.infill import infill_prompt
from bough.text.output import END_THINK, THINK, OutputParser
from bough.text.recipients import RecipientStream
from bough.text.stops import LineStop
from bough.text.stream import TextStream
from bough.text.template import ChatTemplate, Rendered
from bough.text.tokenizer import EncodeLimit, Tokenizer
from bough.text.tools import CLOSE, OPEN, Syntax, Tool, read_tools, syntax_of

# Forced when reasoning has used up its budget; the answer can continue from it.
CLOSING = "\n\nThat is enough thinking; I will answer now.\n"
_PAD = re.compile(re.escape(PAD))
_END = re.compile(f"{re.escape(PAD)}(?:{re.escape(VISION_END)})?")
GAP = "\n\n"  # as templates write it between reasoning and answer


class Prompts:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        break_loops: bool = True,
        sentences: int = 0,
        pictures: Pictures | None = None,
    ):
        """`sentences`: see Recommended. `pictures` None: the model is loaded without its image encoder."""
        self._tokenizer, self._template, self._break_loops = tokenizer, template, break_loops
        self._sentences, self._pictures = sentences, pictures
        self.grammars = Grammars(GrammarCompiler(tokenizer))

    def encode(
        self, request: TextRequest, limit: EncodeLimit | None = None, *, counting: bool = False
    ) -> Prompt:
        """Return the prompt; `limit` ends the tokenising of one that does not fit.

        counting: only its length is wanted, and images are not decoded.
        """
        if (request.messages is None) == (request.prompt is None):
            raise UsageError("give either messages or a raw prompt")
        tools = read_tools(request.tools) if request.tool_choice != "none" else []
        if request.messages is None:
            return self._raw(request, tools, limit)
        alone = self._template.has_recipients and request.grammar is not None and not request.thinking
        rendered = self._template.render(
            request.messages,
            tools=request.tools if tools else None,  # all of them, so that the prefix cache holds
            # A grammar is for the message to the user, which then is the only one.
            thinking=False if alone else request.thinking,
            boundaries=True,
            continue_final=request.continue_final,
            effort=request.effort,
            **request.template_options,
        )
        if limit is not None:
            limit.check(self._tokenizer.longest_token, rendered.text)
        slots = self._slots(rendered, limit, counting=counting) if rendered.images else {}
        ids, boundaries, images = self._tokens(rendered, limit, slots)
        if request.allowed_tools is not None:
            tools = [tool for tool in tools if tool.name in request.allowed_tools]
        return Prompt(ids, boundaries, self._reasoning(rendered), tools, images)

    def beginning(self, request: TextRequest, limit: EncodeLimit | None = None) -> Prompt:
        """Return the tokens that the prompt has in common with all that continue it.

        The last message may go on if it is the user's; others are complete, and a user's message follows.
        """
        if isinstance(request.prompt, list):
            return self.encode(request, limit)
        first, second = (self.encode(_continued(request, text), limit) for text in ("\n\nA", " z"))
        pairs = zip(first.ids, second.ids, strict=False)
        length = next((index for index, (a, b) in enumerate(pairs) if a != b), 0)
        inside = {at: kind for at, kind in first.boundaries.items() if at < length}
        if first.boundaries.get(length) == "image":
            # A state is kept before the end of a prompt: one more token, so that it is kept after the image.
            inside[length] = "image"
            length += 1
        images = tuple(image for image in first.images if image.end <= length)
        return replace(first, ids=first.ids[:length], boundaries=inside, images=images)

    def _budget(self, request: TextRequest) -> int | None:
        """Return the most tokens of reasoning; an effort is a number if the template has no word for it."""
        budget, effort = request.thinking_budget, request.effort or self._template.default_effort
        if budget is None and effort is not None and self._template.effort(effort) is None:
            budget = EFFORTS[effort]
        if budget is not None and budget < 0:
            raise UsageError(f"thinking_budget is {budget}, needed 0 or more tokens", param="thinking_budget")
        return budget

    def _reasoning(self, rendered: Rendered) -> Literal["open", "possible", "none"]:
        if rendered.continued:
            return "open" if rendered.continued == "reasoning" else "none"
        opened = rendered.text.rfind(THINK) > rendered.text.rfind(END_THINK)
        if rendered.text.rstrip().endswith(THINK) and opened:
            return "open"
        if self._template.supports_thinking and not rendered.text.rstrip().endswith(END_THINK):
            return "possible"
        return "none"

    def _raw(self, request: TextRequest, tools: list[Tool], limit: EncodeLimit | None) -> Prompt:
        if tools:
            raise UsageError("tools need messages: a raw prompt is not rendered by the chat template")
        prompt = request.prompt
        if request.infill is not None:
            gap, most = request.infill, request.max_tokens
            ids, others = infill_prompt(self._tokenizer, prompt or "", gap, limit, most)
            # Other files stay as they are while one writes.
            return Prompt(ids, {others: "head"} if others else {}, "none", [])
        if isinstance(prompt, str):
            return Prompt(self._with_bos(self._tokenizer.encode(prompt, limit=limit)), {}, "none", [])
        return Prompt(list(prompt or ()), {}, "none", [])

    def _slots(
        self, rendered: Rendered, limit: EncodeLimit | None, *, counting: bool
    ) -> dict[int, Picture | int]:
        """Return where in the text images belong, and each, or the number of its tokens.

        What a message spells is no slot.
        """
        files, pictures = rendered.images, self._pictures
        assert pictures is not None, "images for a model that was loaded without its image encoder"
        spelled = {start for start, _ in rendered.literals}
        places = [match.start() for match in _PAD.finditer(rendered.text) if match.start() not in spelled]
        if len(places) != len(files):
            raise UsageError(
                f"the chat template has {len(places)} places for {len(files)} images: it is made for text",
                param="messages",
            )
        counts = [pictures.tokens(file) for file in files]
        if limit is not None:
            limit.count(sum(counts) - len(counts), more=True)  # before any is decoded
        return dict(zip(places, counts if counting else map(pictures.of, files), strict=True))

    def _tokens(
        self, rendered: Rendered, limit: EncodeLimit | None, slots: Mapping[int, Picture | int]
    ) -> tuple[list[int], dict[int, SnapshotKind], tuple[PlacedPicture, ...]]:
        """Return the ids of the text, how many of them precede each turn or end an image, and the images.

        The template reports where the last turns begin. The control tokens there begin the earlier ones, too.
        """
        text = rendered.text
        after_images = {match.end() for match in _END.finditer(text) if match.start() in slots}
        kinds: dict[int, SnapshotKind] = dict.fromkeys(after_images, "image")
        kinds |= dict.fromkeys(rendered.boundaries, "turn")
        if len(rendered.boundaries) > 1:
            kinds[rendered.boundaries[0]] = "head"
        if rendered.last_user_end is not None:
            kinds[rendered.last_user_end] = "question"
        # Most templates write the BOS token themselves.
        bos = self._tokenizer.bos_id
        written = bos is None or text.startswith(self._tokenizer.token_bytes(bos).decode())
        ids: list[int] = [] if written else self._with_bos([])
        boundaries: dict[int, SnapshotKind] = {}
        images: list[PlacedPicture] = []
        start = 0
        for end in [*sorted({*kinds, *slots} - {0}), len(text)]:
            # Splitting the text right before or after a control token, and only there, keeps its tokens.
            if end < len(text) and end not in after_images and not self._template.is_control_at(text, end):
                continue
            # A control token spelled out in a message stays text.
            literals = [(a - start, b - start) for a, b in rendered.literals if start <= a and b <= end]
            tokens = self._tokenizer.encode(text[start:end], literals=literals, limit=limit)
            if start in slots:
                picture = slots[start]
                if isinstance(picture, Picture):
                    images.append(PlacedPicture(len(ids), picture))
                tokens[:1] = picture.ids if isinstance(picture, Picture) else [-1] * picture
            ids += tokens
            if end < len(text) and end in kinds:
                boundaries[len(ids)] = kinds[end]
            start = end
        openers = {ids[position] for position, kind in boundaries.items() if kind != "image"}
        turns: dict[int, SnapshotKind] = dict.fromkeys(_positions(ids, openers), "turn")
        return ids, turns | boundaries, tuple(images)

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self._tokenizer.bos_id is None else [self._tokenizer.bos_id, *ids]

    def output(self, request: TextRequest, prompt: Prompt) -> OutputStream:
        if request.messages is None:
            gap = request.infill
            lines = None if gap is None or not gap.ends_with_lines else LineStop(gap.line_s, gap.indent)
            return OutputStream(self._tokenizer.stream(), OutputParser(), request.stop, lines=lines)
        # Tags are parsed even where the file marks them as control tokens, whose text is otherwise dropped.
        tags = {self._tokenizer.id_of(tag) for tag in (THINK, END_THINK, OPEN, CLOSE)}
        visible = self._tokenizer

        def piece(id: int) -> bytes:
            return b"" if visible.is_control(id) and id not in tags else visible.token_bytes(id)

        # With a grammar the answer is either calls or text that matches it, which may spell a call.
        either = request.grammar is not None
        parser = OutputParser(reasoning=prompt.reasoning, tools=prompt.tools, either=either)
        stream = TextStream(piece)
        if self._template.has_recipients:
            begun = {"open": "self", "possible": "", "none": "user"}[prompt.reasoning]
            stream = RecipientStream(piece, self._tokenizer.id_of, recipient=begun)
        return OutputStream(stream, parser, request.stop, one_call=not request.parallel_tool_calls)

    def constraint(self, request: TextRequest, prompt: Prompt) -> TokenConstraint | None:
        token = self._tokenizer.id_of
        answer, call = _start(self.grammar(request, prompt))
        reasoning = prompt.reasoning
        if reasoning == "possible" and answer is not None and not request.thinking:
            reasoning = "none"  # the request asks for a grammar and not for reasoning
        budget = self._budget(request) if reasoning != "none" else None
        end = token(END_THINK)
        loops = self._break_loops and request.break_loops and reasoning != "none" and end is not None
        repeats = self._repeats(request, prompt) if answer is None and call is None else None
        if answer is None and call is None and budget is None and not loops and repeats is None:
            return None
        if reasoning != "none" and end is None:
            if repeats is None or budget is not None:
                raise UsageError(f"the model has no token {END_THINK}, so its reasoning cannot be limited")
            reasoning = "none"  # the text is looked at as one
        return TokenConstraint(
            ConstraintSpec(
                vocabulary=self._tokenizer.vocab_size,
                ends=self._tokenizer.stop_ids,
                reasoning=reasoning,
                begin_reasoning=token(THINK),
                end_reasoning=end,
                budget=budget,
                break_loops=loops,
                closing=[*self._tokenizer.encode(CLOSING, begins=False), end] if end is not None else (),
                gap=self._tokenizer.encode(GAP, begins=False),
                answer=answer,
                call_token=token(OPEN),
                call=call,
                repeats=repeats,
            )
        )

    def _repeats(self, request: TextRequest, prompt: Prompt) -> Repeats | None:
        """Return what keeps a chat by the recommended sampling from repeating itself; None: it may."""
        sampling = request.sampling
        chat = request.messages is not None and not prompt.tools and not request.ignore_eos
        usual = sampling.recommended and sampling.temperature > 0
        if not (chat and usual and self._break_loops and request.break_loops):
            return None
        assert request.messages is not None
        return Repeats(self._tokenizer, request.messages, self._sentences, begun=request.continue_final)

    def grammar(self, request: TextRequest, prompt: Prompt) -> CompiledGrammar | None:
        """Return the compiled grammar of the answer, or of each tool call; None for any text."""
        if prompt.grammar is not None:
            return prompt.grammar
        job = self._job(request, prompt.tools)
        return None if job is None else self.grammars.compiled(job, request.cancelled)

    def _job(self, request: TextRequest, tools: Sequence[Tool]) -> GrammarJob | None:
        if forced := self._forced_tools(request, tools):
            # A forced call takes precedence over the grammar, which is for text.
            many = request.parallel_tool_calls and request.tool_choice == "required"
            return GrammarJob(tools=tuple(forced), syntax=self._syntax, many=many)
        if request.grammar is not None:
            syntax = self._syntax if tools else None
            return GrammarJob(request.grammar, tuple(tools), syntax, many=request.parallel_tool_calls)
        limited = any(tool.strict for tool in tools) or request.allowed_tools is not None
        if tools and limited and self._tokenizer.id_of(OPEN) is not None:
            # A call of a strict tool matches its schema, even where other tools have none.
            return GrammarJob(tools=tuple(tools), syntax=self._syntax, opened=True)
        return None

    def _forced_tools(self, request: TextRequest, tools: Sequence[Tool]) -> list[Tool]:
        """Return the tools of which one has to be called; none where the model decides."""
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

    @property
    def _syntax(self) -> Syntax:
        syntax = syntax_of(self._template.source)
        if syntax is None:
            raise UsageError("the model's chat template has no tool calls, so none can be enforced")
        return syntax


def _start(compiled: CompiledGrammar | None) -> tuple[Matcher | None, Matcher | None]:
    """Return the matcher of the whole answer, or that of each tool call."""
    if compiled is None:
        return None, None
    return (None, compiled.matcher()) if compiled.opened else (compiled.matcher(), None)


def _positions(ids: list[int], indices: Iterable[int]) -> list[int]:
    positions = []
    for id in indices:
        at = 0
        with contextlib.suppress(ValueError):
            while True:
                positions.append(at := ids.index(id, at + 1))
    return sorted(positions)


def _continued(request: TextRequest, text: str) -> TextRequest:
    if request.messages is None:
        return replace(request, prompt=f"{request.prompt}{text}")
    *before, last = request.messages or [{}]
    content = last.get("content")
    if last.get("role") != "user" or not isinstance(content, str | list):
        messages = [*request.messages, {"role": "user", "content": text}]
    else:
        more = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
        messages = [*before, {**last, "content": more}]
    return replace(request, messages=messages, continue_final=False)
