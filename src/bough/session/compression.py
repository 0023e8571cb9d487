"""Compression of a session's prompts: what is wanted of a request, and its prompt after it."""

import gc
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from bough.compress.compressor import Compressed, Compressor, Measure, Report
from bough.compress.conversation import Message, Wanted
from bough.compress.scorer import Query, Scorer, never
from bough.compress.words import WordScorer
from bough.config import CompressConfig
from bough.errors import Cancelled, TemplateFailed, UsageError
from bough.session.prompts import Prompts
from bough.session.requests import Prompt, TextRequest
from bough.text.tokenizer import EncodeLimit, Tokenizer

log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 24  # of a prompt before compression


@dataclass(frozen=True, slots=True)
class Compression:
    """How a session compresses prompts."""

    config: CompressConfig = field(default_factory=CompressConfig)
    scorer: Scorer = field(default_factory=WordScorer)


class Elsewhere:
    """Stands for a scorer in the engine's process, which then encodes the prompts that it compresses."""

    name = "elsewhere"
    any_thread = False

    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        raise AssertionError("a prompt was compressed where its scorer is not")


class PromptCompression:
    def __init__(self, prompts: Prompts, tokenizer: Tokenizer, compression: Compression):
        self._prompts, self._config = prompts, compression.config
        self._compressor = Compressor(compression.scorer, tokenizer.count_all)
        self._lock = threading.Lock()  # the turns of conversations, and the scorer's state

    @property
    def _scores_long(self) -> bool:
        """Return whether a model scores on a CPU, for minutes, while other threads go on."""
        return self._config.scorer is not None and self._compressor.scorer.any_thread

    @property
    def by_default(self) -> bool:
        return self._config.mode != "off"

    def wanted(self, request: TextRequest) -> Wanted:
        """Return the request's own settings over the configured ones."""
        config, options = self._config, request.compress
        settings = Wanted(mode=config.mode, above=config.above, to=config.to)
        if options is not None:
            changes = {"mode": options.mode or "on", "above": options.above, "to": options.to}
            changes = {name: value for name, value in changes.items() if value is not None}
            settings = replace(settings, query=options.query, keep=options.keep, **changes)
        if not _long(request, settings.above):
            return replace(settings, mode="off")
        if settings.mode == "auto" and request.grammar is not None:
            return replace(settings, exact="the answer has a grammar")
        if settings.mode == "auto" and request.tool_choice not in ("auto", "none"):
            return replace(settings, exact="the answer has to call a tool")
        return settings

    def deferred(self, request: TextRequest) -> bool:
        """Return whether only the engine's thread may encode the request: its scorer uses the device."""
        return not self._compressor.scorer.any_thread and self.wanted(request).mode != "off"

    def scored_by_model(self, request: TextRequest) -> bool:
        """Return whether a model may read the prompt before it is encoded, in any thread."""
        return self._scores_long and self.wanted(request).mode != "off"

    def check_read_whole(self, request: TextRequest, tokens: int) -> None:
        """Raise if a request with a prompt of at least this length would be compressed."""
        settings = self.wanted(request)
        if settings.mode != "off" and tokens > settings.above:
            raise UsageError(
                f"the prompt has {tokens} tokens and would be compressed above {settings.above}:"
                " what is read ahead would not be used",
                "set `compress` to off in this request and the next",
                param="compress",
            )

    def encode(self, request: TextRequest, limit: EncodeLimit | None) -> Prompt:
        """Return the request's prompt, compressed if it is wanted."""
        settings = self.wanted(request)
        if settings.mode == "off":
            return self._prompts.encode(request, limit)
        encoded = _Encoded(self._prompts, request)
        result = self._compress(request, settings, encoded.measure)
        if result is None or not result.documents:
            prompt = encoded.within(_messages(request), limit)
        else:
            prompt = encoded.within(result.messages, limit)
        if result is None:
            return prompt
        tokens = len(prompt.ids)
        sent = result.report.sent_tokens if result.documents else tokens
        report = replace(result.report, sent_tokens=sent, kept_tokens=tokens)
        return replace(prompt, compressed=replace(result, report=report))

    def _compress(self, request: TextRequest, settings: Wanted, measure: Measure) -> Compressed | None:
        """Return the compressed conversation; whatever goes wrong, the prompt is read exactly."""
        messages = _messages(request)
        try:
            with self._lock, nullcontext() if self._scores_long else _no_collection():
                return self._compressor.compress(messages, settings, measure, request.cancelled)
        except (UsageError, TemplateFailed, Cancelled):
            raise  # the request is refused, or has no client, whatever is done to its prompt
        except Exception as error:
            reason = f"compression failed ({type(error).__name__})"
            log.warning("%s, the prompt is read exactly", reason)  # some errors hold all of the prompt
            return Compressed(messages, Report(0, 0, scorer=self._compressor.scorer.name, reason=reason), {})


@contextmanager
def _no_collection() -> Generator[None]:
    """Pause Python's collector of cycles: it would read all objects of a loaded model, in 0.1 to 0.3 s."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


class _Encoded:
    """The prompts of one request that were measured: none is tokenised twice."""

    def __init__(self, prompts: Prompts, request: TextRequest):
        self._prompts, self._request = prompts, request
        self._known: list[tuple[Sequence[Message], Prompt]] = []

    def measure(self, messages: Sequence[Message]) -> int:
        prompt = self._find(messages)
        if prompt is None:
            most = EncodeLimit(MAX_TOKENS, self._request.cancelled, stops_at_tokens=False)
            prompt = self._prompts.encode(_with(self._request, messages), most)
            self._known.append((messages, prompt))
        return len(prompt.ids)

    def within(self, messages: Sequence[Message], limit: EncodeLimit | None) -> Prompt:
        """Return the prompt; one that is too long is refused as it is without compression."""
        prompt = self._find(messages)
        if prompt is None or (limit is not None and len(prompt.ids) > limit.tokens):
            return self._prompts.encode(_with(self._request, messages), limit)
        if limit is not None:
            limit.count(len(prompt.ids), more=False)
        return prompt

    def _find(self, messages: Sequence[Message]) -> Prompt | None:
        return next((prompt for known, prompt in self._known if known == messages), None)


def _messages(request: TextRequest) -> Sequence[Message]:
    """Return the conversation; a raw prompt is one message, with its question at one of its ends."""
    if request.messages is not None:
        return request.messages
    return [{"role": "user", "content": request.prompt}]


def _with(request: TextRequest, messages: Sequence[Message]) -> TextRequest:
    if request.messages is not None:
        return replace(request, messages=messages)
    return replace(request, prompt=messages[0]["content"])


def _long(request: TextRequest, above: int) -> bool:
    """Return whether the prompt can have more than `above` tokens: none is shorter than a byte."""
    if request.infill is not None:
        return False  # what is near the gap is what matters, and the editor chose the rest
    if request.messages is None:
        return isinstance(request.prompt, str) and len(request.prompt.encode(errors="replace")) > above
    if sum(_text_lengths(request.messages)) > above:
        return True  # without a copy of it all
    text = f"{request.messages}{request.tools or ''}"
    return (len(text) if text.isascii() else len(text.encode(errors="replace"))) > above


def _text_lengths(messages: Sequence[Any]) -> Iterator[int]:
    """Yield the characters of each text in messages that nobody has checked yet."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield len(text)
