"""The texts of a conversation: which may be shortened, and what is asked of them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bough.compress.scorer import Query
from bough.images.parts import has_images
from bough.text.messages import ROLES, TEXT_PARTS

Message = Mapping[str, Any]
Place = tuple[int, int | None]  # the message, and the part of its content; None: the content is a string

CHARACTERS = 4  # of a token, where a rough number is enough
MIN_TOKENS = 256  # a shorter message is not worth its gaps
QUESTION = 64 * CHARACTERS  # characters of a question that stands beside its document
ANSWER_WEIGHT = 0.5  # of the last assistant message as a query
FEW_WORDS = 3  # "continue", "and then?": the question is an earlier one

# What needs the whole text, by the words in which people ask for it.
WHOLE = re.compile(
    r"\b(?:summar(?:y|i[sz]e)|tl;?dr|translate|proofread|paraphrase|rewrite|reformat|count|how many"
    r"|(?:list|find|show|name|give|extract) (?:me )?(?:all|every|each)|all (?:of )?the|every|each of|in total"
    r"|overview|outline|is there any|are there any|most (?:common|frequent))\b",
    re.IGNORECASE,
)
_ORDERS = (
    "please|you must|you should|you are|do not|don't|never|always|only|answer|reply|respond|return|write|use"
    "|explain|tell|say|give|note|important|warning"
)
INSTRUCTION = re.compile(rf"\s*(?:{_ORDERS})\b", re.IGNORECASE)
ASKING = re.compile(
    rf"\?\W*$|^(?:{_ORDERS}|what|which|who|whose|when|where|why|how|is|are|does|can)\b", re.IGNORECASE
)
BLANK_LINE = re.compile(r"\n[ \t]*+\n\s*+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a request is to be compressed."""

    mode: Literal["off", "auto", "on"] = "auto"  # on: also where the request seems to need the whole text
    above: int = 32 << 10  # tokens; shorter prompts are read as they are
    to: float = 0.15  # up to 1: the share of the prompt that is kept; above: its tokens
    query: str = ""  # what is asked; empty: the conversation says it
    keep: tuple[str | int, ...] = ()  # text whose units are kept, and numbers of messages that stay whole
    exact: str = ""  # why the request cannot be compressed, if it cannot

    def budget(self, sent: int) -> int:
        """Return the most tokens of the compressed prompt."""
        return int(self.to * sent) if self.to <= 1 else int(self.to)

    def asked(self) -> tuple[str, ...]:
        """Return what decides, beside the messages, whether a request is the same again."""
        return self.mode, self.query, self.exact

    def identity(self) -> tuple[Any, ...]:
        """Return what of it decides how a message is shortened, beside the question."""
        return self.above, self.to, self.keep


@dataclass(frozen=True, slots=True)
class TextBody:
    """One text of a message."""

    place: Place
    role: str
    text: str

    @property
    def message(self) -> int:
        return self.place[0]


def bodies(messages: Sequence[Message]) -> list[TextBody]:
    """Return the texts of all messages."""
    return [body for index, message in enumerate(messages) for body in _bodies(index, message)]


def _bodies(index: int, message: Message) -> Iterator[TextBody]:
    role = ROLES.get(str(message.get("role")), "")
    content = message.get("content")
    if isinstance(content, str):
        yield TextBody((index, None), role, content)
    for at, part in enumerate(content if isinstance(content, list | tuple) else ()):
        if isinstance(part, str):
            yield TextBody((index, at), role, part)
        elif (
            isinstance(part, Mapping) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)
        ):
            yield TextBody((index, at), role, part["text"])


def with_texts(messages: Sequence[Message], texts: Mapping[Place, str]) -> list[Message]:
    """Return the conversation with some of its texts replaced; all else is the same objects."""
    out = list(messages)
    for (index, at), text in texts.items():
        if at is None:
            out[index] = {**out[index], "content": text}
            continue
        parts = list(out[index]["content"])
        parts[at] = text if isinstance(parts[at], str) else {**parts[at], "text": text}
        out[index] = {**out[index], "content": parts}
    return out


def with_note(messages: Sequence[Message], index: int, note: str) -> list[Message]:
    """Return the conversation with a note in front of a message's text."""
    first = next(_bodies(index, messages[index]))
    return with_texts(messages, {first.place: f"{note}\n\n{first.text}"})


def candidates(messages: Sequence[Message], settings: Wanted, *, since: int = 0) -> list[TextBody]:
    """Return the texts that may be shortened, of the messages from `since` on.

    Documents in user messages and results of tools. Of the last two messages, and of the last user message,
    only user messages that are themselves long.
    """
    texts = bodies(messages)
    last = _last_user(texts)
    lengths: Counter[int] = Counter()
    for body in texts:
        lengths[body.message] += len(body.text)
    long = {index for index, length in lengths.items() if length > settings.above // 2 * CHARACTERS}
    return [
        body
        for body in texts
        if body.message >= since
        and body.role in ("user", "tool")
        and body.message not in settings.keep
        and not has_images([messages[body.message]])  # what is said beside an image stays whole
        and len(body.text) >= MIN_TOKENS * CHARACTERS
        and (
            body.message in long
            if body.role == "user" and (body.message == last or body.message >= len(messages) - 2)
            else body.message < len(messages) - 2
        )
    ]


def edged(messages: Sequence[Message]) -> int | None:
    """Return the message that may hold a document and the question about it in one text."""
    turns = bodies(messages)
    last = _last_user(turns)
    texts = [body.text for body in turns if body.message == last and body.text.strip()]
    return None if any(len(text) < MIN_TOKENS * CHARACTERS for text in texts) else last


def queries(messages: Sequence[Message], settings: Wanted, shortened: Sequence[TextBody]) -> list[Query]:
    """Return what is asked: the request's own query, or the last user message and the last answer."""
    if settings.query.strip():
        return [Query(settings.query)]
    turns = bodies(messages)
    documents = {body.place for body in shortened}
    users = sorted({body.message for body in turns if body.role == "user"})
    asked: list[Query] = []
    for index in reversed(users):
        texts = [body for body in turns if body.message == index]
        short = "\n".join(each.text for each in texts if each.place not in documents).strip()
        text = short or "\n".join(question_in(each.text) for each in texts)
        if text:
            asked.append(Query(text[-4 * QUESTION :]))
        if len(re.findall(r"\w+", text)) >= FEW_WORDS:
            break
    answers = [body.text for body in turns if body.role == "assistant" and body.text.strip()]
    calls = [str(message["tool_calls"]) for message in messages if message.get("tool_calls")]
    said = "\n".join([*answers[-1:], *calls[-1:]]).strip()
    return asked + ([Query(said[-QUESTION:], ANSWER_WEIGHT)] if said else [])


def question_in(text: str) -> str:
    """Return the question that stands before or after a document in one text."""
    return "\n".join(text[start:end] for start, end in question_spans(text))


def question_spans(text: str) -> list[tuple[int, int]]:
    """Return where the first and the last paragraph are; only one of them if only that one asks."""
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    if start >= end:
        return []
    blank = BLANK_LINE.search(text, start, min(end, start + QUESTION))
    last = max(start, end - QUESTION)
    for match in BLANK_LINE.finditer(text, last, end):
        last = match.end()
    ends = [(start, blank.start() if blank else min(end, start + QUESTION)), (last, end)]
    return [span for span in ends if ASKING.search(text[slice(*span)].strip())] or ends


def needs_whole(asked: Sequence[Query]) -> str:
    """Return the words by which a question needs the whole text, if it does."""
    for query in asked:
        if query.weight == 1.0 and (match := WHOLE.search(query.text)):
            return match[0]
    return ""


def _last_user(texts: Sequence[TextBody]) -> int:
    return max((body.message for body in texts if body.role == "user"), default=-1)
