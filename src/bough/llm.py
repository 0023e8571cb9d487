"""LLM: a model for Python programs, loaded with its draft; shaped like vLLM's class of this name.

A worker thread owns the session. Requests are submitted to it as the server submits them, so that those of
one `generate` run together where the worker can run several.
"""

import asyncio
import json
import logging
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypedDict, Unpack, cast, overload

import numpy as np
from PIL.Image import Image

from bough.config import EFFORTS, DraftConfig, EngineConfig, SpecConfig, environment
from bough.engine import sampler
from bough.engine.stats import RequestStats
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.hub.catalog import EMBEDDED, ModelCard
from bough.hub.drafts import fetch_draft
from bough.hub.resolve import meaning, resolve, resolve_draft
from bough.images.opening import image_file
from bough.images.parts import has_images
from bough.session.collected import GeneratedOutput
from bough.session.events import Text, Vector
from bough.session.folders import costs_file
from bough.session.loading import load_session
from bough.session.pairing import AUTO, NONE, NamedDraft, card_of, plan_draft
from bough.session.requests import TextRequest, VectorOptions
from bough.session.session import Session
from bough.session.vector_prompts import shortened
from bough.session.worker import EngineWorker
from bough.text.grammar import Grammar
from bough.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ImageSource = str | Path | bytes | Image
Messages = str | Sequence[Mapping[str, Any]]  # of one user, or in OpenAI's form
Prompt = str | Sequence[int]  # text or token ids, as they are
Schema = Mapping[str, Any] | type  # JSON schema, or a pydantic model
_MANY = 1 << 30  # requests that may wait


@dataclass(frozen=True, slots=True)
class SamplingParams(sampler.SamplingParams):
    """How tokens are sampled, and where the text ends. Values that are not given mean: greedy, no limit."""

    max_tokens: int | None = None  # None: as many as fit in the context
    stop: Sequence[str] = ()  # texts that end the answer, and are not part of it


class ChatOptions(TypedDict, total=False):
    """Options of `chat`, `achat` and `astream`."""

    max_tokens: int | None
    stop: str | Sequence[str]
    system: str | None  # instructions before the messages
    images: Sequence[ImageSource]  # paths, bytes or PIL images, which come before the last message's text
    thinking: bool | None  # reason first; None: as the model's template decides
    effort: str | None  # of reasoning: minimal, low, medium, high, xhigh or max; None: as recommended
    break_loops: bool  # end reasoning and answers that repeat themselves, which is the default
    tools: Sequence[Mapping[str, Any]] | None  # in OpenAI's form
    tool_choice: str  # auto, none, required or the name of a tool
    schema: Schema | None  # the answer is JSON of this schema
    regex: str | None  # the answer matches this expression


class Call(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: Mapping[str, Any]


class Logprob(NamedTuple):
    """A token of an answer, its log probability, and those of the likeliest tokens there."""

    id: int
    text: str
    logprob: float
    top: Mapping[str, float]


class Answer(str):
    """The text of an answer; what else is known about it are its attributes."""

    prompt: Prompt | Messages
    reasoning: str
    tool_calls: list[Call]
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled"]
    tokens: list[int]
    logprobs: list[Logprob] | None  # one for each token, if `SamplingParams.logprobs` asked for them
    stats: RequestStats

    @property
    def text(self) -> str:
        return str(self)

    @property
    def outputs(self) -> "list[Answer]":
        """Return the answer in a list, where vLLM has its outputs."""
        return [self]

    def json(self) -> Any:
        """Return the value of an answer that is JSON."""
        return json.loads(self)


class LLM:
    """A loaded model. Close it, or use `with`, to free its memory.

    model: a .gguf file, a folder, a short name or USER/REPO[:QUANT]; None: BOUGH_MODEL, else the small
    model inside the package. draft: as of the command line; auto: the one that belongs to the model.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        draft: str | Path | None = AUTO,
        budget: int | None = None,
        max_ctx: int | None = None,
        kv: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        vram_limit: int | None = None,
        prefill: Literal["exact", "int8"] = "exact",
        prefix_cache_dir: str | Path | None = None,
        mmproj: str | Path | None = None,
        offline: bool = False,
        progress: bool = True,
    ):
        offline = offline or environment().offline
        target, card, fetched = find_model(model, offline=offline)
        speculation, draft_config = find_draft(target, card, draft, fetch=fetched and not offline)
        if speculation is not None and budget is not None:
            speculation = replace(speculation, budget=budget)
        config = EngineConfig(
            device=device,
            max_ctx=max_ctx,
            kv_k=kv,
            kv_v=kv,
            threads=threads,
            vram_limit=vram_limit,
            prefill=prefill,
            speculation=speculation,
            draft=draft_config,
            costs=costs_file(),
            prefix_cache_dir=None if prefix_cache_dir is None else Path(prefix_cache_dir),
            mmproj=None if mmproj is None else Path(mmproj),
        )
        self.path, self.draft = target, draft_config.path if draft_config else None
        self.name = card.name if card else target.stem
        self._show, self._closed = progress, False
        counter = _Counter(f"Loading {target.name}", shown=progress)
        self._worker = EngineWorker(
            lambda read: load_session(target, config, progress=counter.update), max_queue=_MANY
        )
        self._worker.start()
        self._worker.ready.wait()
        counter.end()
        if self._worker.failure is not None:
            raise self._worker.failure
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="llm", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        draft = f", draft={self.draft.name!r}" if self.draft is not None else ""
        return f"<LLM {self.name}{draft}{', closed' if self._closed else ''}>"

    def close(self) -> None:
        """End running requests and free the model's memory."""
        self._closed = True
        self._worker.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def session(self) -> Session:
        if self._closed:
            raise UsageError(f"the LLM {self.name} is closed", "make another one")
        return self._worker.session

    @property
    def max_ctx(self) -> int:
        return self.session.max_ctx

    @property
    def tokenizer(self) -> Tokenizer:
        return self.session.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        progress: bool | None = None,
    ) -> list[Answer]:
        """Continue each prompt as it is, without the chat template; return the answers in their order.

        sampling: one for all prompts or one for each; None: as recommended for the model.
        """
        inputs = _prompts(prompts)
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(inputs)
        if len(params) != len(inputs):
            raise UsageError(f"sampling has {len(params)} entries, needed {len(inputs)}", param="sampling")
        runs = [
            self._run(
                self._request(each, prompt=prompt, max_tokens=max_tokens, stop=stop), prompt, whole=True
            )
            for prompt, each in zip(inputs, params, strict=True)
        ]
        shown = len(runs) > 1 if progress is None else progress
        counter = _Counter("Prompts", shown=shown and self._show)
        try:
            answers = []
            for run in runs:
                answers.append(run.answer())
                counter.update(len(answers), len(runs))
            return answers
        finally:
            counter.end()
            for run in runs:
                run.close()

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Answer: ...

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> "Stream": ...

    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> "Answer | Stream":
        """Answer a conversation, or a text of the user; with `stream` as it is generated.

        options: see ChatOptions.
        """
        run = self._run(self._chat_request(messages, sampling, options), messages, whole=not stream)
        return run if stream else run.answer()

    def embed(self, texts: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> np.ndarray:
        """Return the vectors [n, width] of texts, or [width] of one text, as float32 of length 1.

        The model is an embedding model. dimensions: keep this many values, normalised again.
        """
        options = VectorOptions(dimensions=dimensions)
        one = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
        vectors = self._vectors([_vector_request(each, options) for each in _prompts(texts)])
        rows = [shortened(values, dimensions) for values in vectors]
        return rows[0] if one else np.array(rows, np.float32)

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return for each document how probable it is that it answers the query; the model is a reranker."""
        options = VectorOptions(query=query)
        return [values[0] for values in self._vectors([_vector_request(each, options) for each in documents])]

    def _vectors(self, requests: Sequence[TextRequest]) -> list[Sequence[float]]:
        async def collected() -> dict[int, Sequence[float]]:
            job = self._worker.submit(*requests)
            try:
                batches = [batch async for batch in job.batches(whole=True)]
            finally:
                job.cancel()
            events = [pair for batch in batches for pair in batch]
            return {index: event.values for index, event in events if isinstance(event, Vector)}

        if not requests:
            return []
        vectors = asyncio.run_coroutine_threadsafe(collected(), self._loop).result()
        return [vectors[index] for index in range(len(requests))]

    async def achat(
        self, messages: Messages, sampling: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Answer:
        """Answer a conversation as `chat` does, without blocking the event loop."""
        output = GeneratedOutput()
        async for _ in self._events(self._chat_request(messages, sampling, options), output, whole=True):
            pass
        return _answer(output, messages, self.tokenizer)

    async def astream(
        self, messages: Messages, sampling: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncIterator[str]:
        """Yield the answer in pieces, as they are generated."""
        request = self._chat_request(messages, sampling, options)
        async for piece in self._events(request, GeneratedOutput()):
            yield piece

    async def _events(
        self, request: TextRequest, output: GeneratedOutput, *, whole: bool = False
    ) -> AsyncIterator[str]:
        if has_images(request.messages):
            # Decoding takes long: not in the loop, and not in the worker's thread.
            request = await asyncio.to_thread(self.session.check, request)
        job = self._worker.submit(request)
        try:
            async for batch in job.batches(whole=whole):
                for _, event in batch:
                    output.add(event)
                    if isinstance(event, Text):
                        yield event.text
        finally:
            job.cancel()

    def _run(self, request: TextRequest, prompt: Prompt | Messages, *, whole: bool = False) -> "Stream":
        output = GeneratedOutput()
        finish = partial(_answer, output, prompt, self.tokenizer)
        return Stream(self._events(request, output, whole=whole), self._loop, output, finish)

    def _chat_request(
        self, messages: Messages, sampling: SamplingParams | None, options: ChatOptions
    ) -> TextRequest:
        if unknown := options.keys() - ChatOptions.__annotations__.keys():
            known = ", ".join(ChatOptions.__annotations__)
            raise UsageError(f"there is no option {', '.join(sorted(unknown))}; there are {known}")
        turns = _with_images(_turns(messages), options.get("images", ()))
        system = options.get("system")
        before = [] if system is None else [{"role": "system", "content": system}]
        request = self._request(
            sampling,
            thinking=options.get("thinking"),
            max_tokens=options.get("max_tokens"),
            stop=options.get("stop", ()),
        )
        return replace(
            request,
            messages=[*before, *turns],
            effort=_effort(options.get("effort")),
            break_loops=options.get("break_loops", True),
            tools=options.get("tools"),
            tool_choice=options.get("tool_choice", "auto"),
            grammar=_grammar(options.get("schema"), options.get("regex")),
        )

    def _request(
        self,
        sampling: SamplingParams | None,
        *,
        prompt: Prompt | None = None,
        thinking: bool | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> TextRequest:
        params = sampling or self.session.sampling_for(thinking, raw=prompt is not None)
        ends = [stop] if isinstance(stop, str) else list(stop)
        if isinstance(sampling, SamplingParams):
            max_tokens = sampling.max_tokens if max_tokens is None else max_tokens
            ends = ends or ([sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop))
        return TextRequest(
            prompt=prompt if prompt is None or isinstance(prompt, str) else list(prompt),
            sampling=params,
            thinking=thinking,
            max_tokens=max_tokens,
            stop=ends,
        )


def _turns(messages: Messages) -> list[Mapping[str, Any]]:
    """Return messages in OpenAI's form."""
    if isinstance(messages, str):
        if not messages.strip():
            raise UsageError("the message is empty", param="messages")
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not all(isinstance(each, Mapping) for each in messages):
        raise UsageError(
            f"messages is {messages!r}, needed a text, or a list of objects with role and content",
            param="messages",
        )
    return list(messages)


def _with_images(turns: list[Mapping[str, Any]], images: Sequence[ImageSource]) -> list[Mapping[str, Any]]:
    """Return the messages with `images` in the last one, and every path or opened image read."""
    if isinstance(images, str | bytes | Path | Image):
        raise UsageError("images is one image, needed a list of images", param="images")
    files = [
        {"type": "image", "image": image_file(Path(each) if isinstance(each, str) else each, f"images[{at}]")}
        for at, each in enumerate(images)
    ]
    turns = [{**turn, "content": _read_parts(turn.get("content"))} for turn in turns]
    if files:
        text = turns[-1]["content"]
        parts = text if isinstance(text, list) else [{"type": "text", "text": text or ""}]
        turns[-1] = {**turns[-1], "content": [*files, *parts]}
    return turns


def _read_parts(content: Any) -> Any:
    """Return a content whose images are read; a text is never a path, as it may come from elsewhere."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "image": image_file(part["image"])}
        if isinstance(part, Mapping) and isinstance(part.get("image"), Path | bytes | Image)
        else part
        for part in content
    ]


def _effort(word: str | None) -> str | None:
    if word is not None and word not in EFFORTS:
        raise UsageError(f"effort is {word!r}, needed one of {', '.join(EFFORTS)}", param="effort")
    return word


class Stream(Iterator[str]):
    """An answer while it is generated: iterating yields its text in pieces, `answer()` returns all of it.

    Closing it, or leaving a `with`, ends the generation.
    """

    def __init__(
        self,
        pieces: AsyncIterator[str],
        loop: asyncio.AbstractEventLoop,
        output: GeneratedOutput,
        finish: Callable[[], Answer],
    ):
        """pieces: of the text, as they arrive in `output`, too; they are read in `loop`."""
        self._output, self._finish = output, finish
        self._arrived: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        self._over = False
        self._running = asyncio.run_coroutine_threadsafe(self._read(pieces), loop)

    async def _read(self, pieces: AsyncIterator[str]) -> None:
        try:
            async for piece in pieces:
                self._arrived.put(piece)
        except Exception as error:
            self._arrived.put(error)
        else:
            self._arrived.put(None)

    def __next__(self) -> str:
        if self._over:
            raise StopIteration
        arrived = self._arrived.get()
        if isinstance(arrived, str):
            return arrived
        self._over = True
        if arrived is not None:
            raise arrived
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def reasoning(self) -> str:
        return self._output.reasoning

    def answer(self) -> Answer:
        """Return the whole answer, after its end."""
        try:
            for _ in self:
                pass
        except BaseException:
            self.close()
            raise
        return self._finish()

    def close(self) -> None:
        """End the generation."""
        if not self._over:
            self._over = True
            self._running.cancel()


def _answer(output: GeneratedOutput, prompt: Prompt | Messages, tokenizer: Tokenizer) -> Answer:
    """Return a finished output as users of this module get it."""
    finished = output.finished
    assert finished is not None, "the request has not ended"

    def text(id: int) -> str:
        return tokenizer.token_bytes(id).decode(errors="replace")

    answer = Answer(output.text)
    answer.prompt, answer.reasoning = prompt, output.reasoning
    answer.tool_calls = [Call(call.id, call.name, _arguments(call.text)) for call in output.calls]
    answer.finish_reason, answer.tokens, answer.stats = finished.reason, finished.tokens, finished.stats
    answer.logprobs = None
    if finished.logprobs is not None:
        answer.logprobs = [
            Logprob(item.token, text(item.token), item.logprob, {text(id): value for id, value in item.top})
            for item in finished.logprobs
        ]
    return answer


def _vector_request(text: Prompt, options: VectorOptions) -> TextRequest:
    return TextRequest(prompt=text if isinstance(text, str) else list(text), vector=options)


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _grammar(schema: Schema | None, regex: str | None) -> Grammar | None:
    if schema is not None and regex is not None:
        raise UsageError("schema and regex are both given, needed one of them", param="regex")
    if regex is not None:
        return Grammar("regex", regex, "regex")
    if schema is None:
        return None
    rules = schema if isinstance(schema, Mapping) else getattr(schema, "model_json_schema", lambda: None)()
    if not isinstance(rules, Mapping):
        raise UsageError(f"schema is {schema!r}, needed a JSON schema or a pydantic model", param="schema")
    return Grammar("json_schema", rules, "schema")


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a text or a list of token ids alone is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(each, int) for each in prompts):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def find_model(model: str | Path | None, *, offline: bool) -> tuple[Path, ModelCard | None, bool]:
    """Return the model's file, its card, and whether it came from the hub by a name."""
    name = str(model) if model is not None else environment().target or EMBEDDED
    meant = meaning(name)
    path = resolve(meant, offline=offline)
    with GGUFFile.open(path) as file:
        card = meant.card or card_of(file, meant.repo.repo if meant.repo else None)
    return path, card, meant.repo is not None


def find_draft(
    target: Path, card: ModelCard | None, draft: str | Path | None, *, fetch: bool
) -> tuple[SpecConfig | None, DraftConfig | None]:
    """Return how tokens are proposed, and the draft; fetch: one that is listed and not here."""
    name = NONE if draft is None else str(draft)
    named = NamedDraft.read(environment().draft or AUTO if name == AUTO else name)
    plan = plan_draft(named, target, card, resolve=partial(resolve_draft, offline=not fetch))
    path = plan.path
    if card is not None and plan.missing is not None:
        if fetch:
            path = fetch_draft(plan.missing)
        else:
            log.warning("the draft of %s is not on this machine: bough pull %s", card.title, card.name)
    return plan.config, None if path is None else DraftConfig(path)


class _Counter:
    """A line on standard error, if that is a terminal, that says how far something is."""

    def __init__(self, label: str, *, shown: bool):
        self._label = label
        self._shown = shown and sys.stderr is not None and sys.stderr.isatty()
        self._percent = -1

    def update(self, done: int, total: int) -> None:
        percent = 100 * done // total if total else 0
        if self._shown and percent != self._percent:
            self._percent = percent
            sys.stderr.write(f"\r{self._label} {percent}%\x1b[K")
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown and self._percent >= 0:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
