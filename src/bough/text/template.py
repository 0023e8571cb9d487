"""ChatTemplate: renders a conversation as prompt text with the model's own Jinja template."""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from bough.errors import BadGGUF, TemplateFailed, UsageError
from bough.images.opening import ImageFile
from bough.text.bounded_jinja import BUDGET, BoundedEnvironment, Budget, within
from bough.text.messages import Message, merge_neighbours, normalise
from bough.text.output import END_THINK, THINK
from bough.text.recipients import NEXT, START, TO_ITSELF, TO_USER, has_recipients
from bough.text.tokenizer import KEY, TokenType

FALLBACK = """\
{%- if tools %}{{- raise_exception('the model has no chat template that could describe tools') }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
RAW_HINT = "`raw` sends the prompt without a chat template"
# Far above what any conversation needs, and at most a few seconds of work.
MAX_ITERATIONS = 1_000_000
MAX_CHARACTERS = 64_000_000
MAX_CONSTANT = 100_000  # characters that are written when the template is compiled
MAX_NESTING = 100
# Turn ends to report, from the last one backwards.
BOUNDARY_TURNS = 8
# Openings (system message and tools) whose rendering is kept, and the most characters of one.
REMEMBERED, MAX_REMEMBERED = 4, 1_000_000
# Words for how much to reason, and what comes nearest where a template does not have them.
EFFORT = "reasoning_effort"
STRENGTH = "reasoning_strength"  # a variable for any word, in Muse-Glimmer's
_NEAREST = {
    "minimal": ("minimal", "low"),
    "low": ("low", "minimal"),
    "medium": ("medium",),
    "high": ("high", "xhigh", "max"),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}
# Unicode reserves these for a program's own use: they enclose control tokens that the conversation spells.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True, slots=True)
class Rendered:
    """Prompt text and character offsets into it."""

    text: str
    # Ends of prefixes that a shorter or differently continued conversation shares; ascending.
    boundaries: list[int]
    # The end of the last user message: templates may rewrite what follows it in a later turn.
    last_user_end: int | None
    # Spans where a message spells out a control token; `Tokenizer.encode` keeps them plain text.
    literals: list[tuple[int, int]]
    # What the last message has begun and the model continues.
    continued: Literal["", "reasoning", "answer"] = ""
    images: tuple[ImageFile, ...] = ()  # of the conversation, in order


class ChatTemplate:
    """One template, compiled on first use; `controls` are the token strings that user text must not forge."""

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        controls: Sequence[str] = (),
        is_fallback: bool = False,
        effort: str | None = None,
    ):
        """`effort`: of reasoning, for conversations rendered without one."""
        self.source = source
        self.default_effort = effort
        self.is_fallback = is_fallback
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._openings: list[tuple[list[Message], Mapping[str, Any], str]] = []
        longest_first = sorted(filter(None, controls), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], *, source: str = "", effort: str | None = None
    ) -> "ChatTemplate":
        """Return the template in `tokenizer.chat_template`, or plain ChatML where the file has none."""
        text = metadata.get("tokenizer.chat_template")
        if text is not None and not isinstance(text, str):
            name = source or "the metadata"
            raise BadGGUF(f"{name}: tokenizer.chat_template is of type {type(text).__name__}; needs a string")
        tokens = metadata.get(f"{KEY}tokens", [])
        types = metadata.get(f"{KEY}token_type", [])

        def spelling(key: str) -> str:
            id = metadata.get(KEY + key)
            return tokens[id] if id is not None and 0 <= id < len(tokens) else ""

        return cls(
            text or FALLBACK,
            bos=spelling("bos_token_id"),
            eos=spelling("eos_token_id"),
            controls=[t for t, type in zip(tokens, types, strict=False) if type == TokenType.CONTROL],
            is_fallback=not text,
            effort=effort,
        )

    @property
    def supports_thinking(self) -> bool:
        return "enable_thinking" in self.source or self.has_recipients

    @cached_property
    def has_recipients(self) -> bool:
        """Return whether an answer is messages with recipients (text/recipients.py)."""
        return has_recipients(self.source)

    @cached_property
    def _opens_reasoning(self) -> bool:
        """Return whether the prompt of an answer ends with the tag that begins its reasoning."""
        if THINK not in self.source:
            return False
        turns = [{"role": "user", "content": "a"}]
        try:
            prompt = self._run({**self._tokens, "messages": turns, "add_generation_prompt": True})
        except TemplateFailed:
            return False
        return prompt.rstrip().endswith(THINK)

    def effort(self, asked_word: str | None) -> str | None:
        """Return the template's own word for an effort; None: it has none, and most refuse others."""
        if asked_word is not None and STRENGTH in self.source:
            return {"minimal": "low", "max": "xhigh"}.get(asked_word, asked_word)
        if asked_word is None or EFFORT not in self.source:
            return None
        listed = set(re.findall("[\"']([a-z]+)[\"']", self.source))
        return next((word for word in _NEAREST[asked_word] if word in listed), None)

    def is_control_at(self, text: str, offset: int) -> bool:
        """Return whether a control token's string begins at `offset`."""
        return self._controls.match(text, offset) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        effort: str | None = None,
        boundaries: bool = False,
        continue_final: bool = False,
        **extra: Any,
    ) -> Rendered:
        """Render a conversation as clients send it; `thinking` None leaves the template's default.

        `effort` of reasoning, as far as the template has a word for it.
        `continue_final`: the last message is the beginning of the assistant's answer; its turn stays open.
        """
        if reserved := {"messages", BUDGET, *self._tokens} & extra.keys():
            raise UsageError(f"template variable {min(reserved)!r} cannot be set; the conversation sets it")
        conversation: list[Message] = self._guard(normalise(messages, opens_reasoning=self._opens_reasoning))
        reasoning, answer = _final_text(conversation.pop()) if continue_final else ("", "")
        if answer and not reasoning:
            thinking = False
        add_generation_prompt |= continue_final
        variables = self._guard(extra) | self._tokens | {"tools": self._guard(_checked_tools(tools))}
        if thinking is not None:
            variables["enable_thinking"] = thinking
        word = self.effort(effort or self.default_effort)
        if word is not None and thinking is not False:
            variables.setdefault(STRENGTH if STRENGTH in self.source else EFFORT, word)

        def run(turns: list[Message], prompt: bool) -> str:
            return self._run({**variables, "messages": turns, "add_generation_prompt": prompt})

        try:
            marked = run(conversation, add_generation_prompt)
        except TemplateFailed:
            merged = merge_neighbours(conversation)
            if len(merged) == len(conversation):
                raise
            conversation = merged
            marked = run(conversation, add_generation_prompt)
        if reasoning or answer:
            begun = _begun_message if self.has_recipients else _begun
            marked = begun(marked, reasoning, answer)
        elif self.has_recipients and thinking is False and add_generation_prompt:
            marked, answer = marked + TO_USER, "begun"
        text, literals = _without_marks(marked)
        continued = "answer" if answer else "reasoning" if reasoning else ""
        images = tuple(part["image"] for turn in conversation for part in _image_parts(turn["content"]))
        if not boundaries or not conversation:
            return Rendered(text, [], None, literals, continued, images)

        def attempt(turns: list[Message]) -> str:
            try:
                return _without_marks(run(turns, False))[0]
            except TemplateFailed:
                return ""

        ends, last_user_end = self._turn_ends(text, literals, conversation, variables, attempt)
        return Rendered(text, ends, last_user_end, literals, continued, images)

    def _turn_ends(
        self,
        text: str,
        literals: list[tuple[int, int]],
        conversation: list[Message],
        variables: Mapping[str, Any],
        attempt: Callable[[list[Message]], str],
    ) -> tuple[list[int], int | None]:
        """Return the ends of the head (system message and tools) and of messages, and the last user's."""

        # Some templates refuse a system message alone, so the head is what any other opening has in common
        # with the text, back to the control token that begins the turn.
        leading = 1 if conversation[0]["role"] == "system" else 0
        opening = self._opening(
            [*conversation[:leading], {"role": "user", "content": "\x00"}], variables, attempt
        )
        shorter = range(min(len(text), len(opening)))
        common = bisect_left(shorter, True, key=lambda i: text[: i + 1] != opening[: i + 1])
        head = max((match.start() for match in self._controls.finditer(text, 0, common)), default=common)
        users = [count for count, turn in enumerate(conversation, 1) if turn["role"] == "user"]
        until_user = attempt(conversation[: users[-1]]) if users else ""
        last_user_end = len(until_user) if until_user and text.startswith(until_user) else None
        # The control tokens that begin the first turn and the one after the last user message begin all.
        openers = {self._control_at(text, at) for at in (head, last_user_end) if at is not None} - {None}
        spelled = {start for start, _ in literals}
        turns = [
            match.start()
            for match in self._controls.finditer(text, head)
            if match[0] in openers and match.start() not in spelled
        ]
        ends = {head, *turns[-BOUNDARY_TURNS:], *([last_user_end] if last_user_end else [])}
        return sorted(ends - {0}), last_user_end

    def _opening(
        self,
        turns: list[Message],
        variables: Mapping[str, Any],
        attempt: Callable[[list[Message]], str],
    ) -> str:
        """Return these turns rendered; agents send the same system message and tools again and again."""
        for known, used, text in self._openings:
            if known == turns and used == variables:
                return text
        text = attempt(turns)
        if len(text) <= MAX_REMEMBERED:
            self._openings = [(turns, variables, text), *self._openings][:REMEMBERED]
        return text

    def _control_at(self, text: str, offset: int) -> str | None:
        match = self._controls.match(text, offset)
        return None if match is None else match[0]

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        try:
            tree = environment.bounded(self.source)
            with within(Budget(0, MAX_CONSTANT)):
                return environment.from_string(tree, {"raise_exception": _refuse, "strftime_now": _now})
        except TemplateFailed:
            raise
        except Exception as error:  # the compiler may raise anything on text from a file
            line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise TemplateFailed(f"the chat template cannot be compiled: {error}{line}", RAW_HINT) from error

    def _run(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        written = 0
        template, budget = self._template, Budget(MAX_ITERATIONS, 2 * MAX_CHARACTERS)
        try:
            with within(budget):
                for piece in template.generate({**variables, BUDGET: budget}):
                    pieces.append(piece)
                    written += len(piece)
                    if written > MAX_CHARACTERS:
                        raise TemplateFailed(
                            f"the chat template writes over {MAX_CHARACTERS} characters", RAW_HINT
                        )
        except TemplateFailed:
            raise
        except Exception as error:  # the template is a program from the file and may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise TemplateFailed(f"the chat template failed: {reason}", RAW_HINT) from error
        return "".join(pieces)

    def _guard(self, value: Any, depth: int = 0) -> Any:
        """Return `value` with every control token in its strings enclosed in marks."""
        if depth > MAX_NESTING:
            raise UsageError(f"the conversation nests objects deeper than {MAX_NESTING} levels")
        if isinstance(value, str):
            plain = value.replace(OPEN, "").replace(CLOSE, "")
            return self._controls.sub(lambda match: f"{OPEN}{match[0]}{CLOSE}", plain)
        if isinstance(value, Mapping):
            return {self._guard(name): self._guard(item, depth + 1) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, depth + 1) for item in value]
        return value


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (the library declares it for instances)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _image_parts(content: Any) -> list[Any]:
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: object) -> NoReturn:
    raise TemplateFailed(f"the chat template refused the conversation: {message}")


def _checked_tools(tools: Any) -> list[Any] | None:
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise UsageError(
            f"tools is of type {type(tools).__name__}; needs a list of tool descriptions", param="tools"
        )
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise UsageError(
                f"tools[{i}] is of type {type(tool).__name__}; needs an object", param=f"tools[{i}]"
            )
    return list(tools)


def _final_text(message: Message) -> tuple[str, str]:
    """Return the reasoning and the text of a last message that is to be continued."""
    if message["role"] != "assistant" or "tool_calls" in message:
        seen = "has tool calls" if "tool_calls" in message else f"has the role {message['role']}"
        raise UsageError(
            f"continue_final_message is set, but the last message {seen}; needs the assistant's text",
            param="continue_final_message",
        )
    return message.get("reasoning_content", ""), message["content"]


def _begun(prompt: str, reasoning: str, answer: str) -> str:
    """Return the generation prompt with the beginning of the assistant's turn."""
    opened = prompt.rstrip().endswith(THINK)
    if reasoning:
        prompt = f"{prompt.rstrip()}\n" if opened else f"{prompt}{THINK}\n"
        prompt += reasoning.strip() if answer else reasoning
    if answer and (reasoning or opened):
        prompt += f"\n{END_THINK}\n\n"
    return prompt + answer


def _begun_message(prompt: str, reasoning: str, answer: str) -> str:
    """Return the same where answers are messages with recipients."""
    if reasoning:
        prompt += TO_ITSELF + reasoning + (f"{NEXT}{START}assistant" if answer else "")
    return f"{prompt}{TO_USER}{answer}" if answer else prompt


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without the marks, and the spans they enclosed."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length, start = 0, None
    for piece in re.split(f"([{OPEN}{CLOSE}])", marked):
        if piece == OPEN:
            start = length
        elif piece == CLOSE:
            if start is not None:
                spans.append((start, length))
            start = None
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans
