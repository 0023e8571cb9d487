"""The request handling that all protocols share: queue, stream, cancel."""

import asyncio
import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

import bough
from bough.config import ServerConfig
from bough.engine.sampler import SamplingParams
from bough.images.parts import has_images, remote_urls, with_images
from bough.server import sse
from bough.server.checks import Checks
from bough.server.failures import Failure, failure_of
from bough.server.image_urls import ImageUrls
from bough.server.options import Thinking
from bough.server.schemas import ModelBody
from bough.server.sse import KEEP_ALIVE_S, EventStream, unless_gone
from bough.session.collected import GeneratedOutput
from bough.session.events import Finished, Progress, SessionEvent
from bough.session.reader import RequestReader
from bough.session.requests import TextRequest
from bough.session.worker import IndexedEvent, Job, Worker, stopping

log = logging.getLogger(__name__)

Facts = Callable[[Any], Mapping[str, Any]]  # further properties of a loaded session, for /props
B = TypeVar("B", bound=ModelBody)
SESSION_HEADERS = ("x-session-id", "session-id", "session_id")


@dataclass(slots=True)
class Writer(ABC, Generic[B]):
    """Writes the output of one request in a protocol's format; what most have in common is here."""

    service: "Service"
    body: B
    id: str = ""
    output: GeneratedOutput = field(default_factory=GeneratedOutput)

    media_type: ClassVar[str | None] = None  # of a stream that is not SSE

    @property
    def model(self) -> str:
        return self.body.model or self.service.model_name

    @abstractmethod
    def write(self, index: int, piece: SessionEvent) -> bytes:
        """Return the next bytes of the stream; called for every event, streaming or not."""

    def end(self) -> bytes:
        return b""

    def keep_alive(self, job: Job) -> bytes:
        return sse.comment(job)

    def failure(self, failure: Failure) -> bytes:
        return sse.event(failure.openai())

    @abstractmethod
    def result(self) -> dict[str, Any] | bytes:
        """Return the whole response of a request that does not stream; bytes are JSON."""


@dataclass(frozen=True, slots=True)
class Service:
    worker: Worker
    config: ServerConfig
    model_name: str
    facts_of: Facts = lambda session: {}
    checks: Checks = field(default_factory=Checks)
    image_urls: ImageUrls = field(default_factory=ImageUrls)

    @property
    def session(self) -> RequestReader:
        return self.worker.session

    def facts(self) -> Mapping[str, Any]:
        return self.facts_of(self.session)

    @property
    def thinking(self) -> Thinking:
        return Thinking(self.config.thinking, self.config.thinking_budget)

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: equal values mean equal software and model."""
        return f"bough-{bough.__version__}-{self.model_name}"

    def defaults(self, thinking: bool | None, *, raw: bool = False) -> SamplingParams:
        return self.session.sampling_for(thinking, raw=raw).changed(self.config.sampling)

    def sampling_facts(self) -> dict[str, Any]:
        values = self.defaults(self.config.thinking)
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty")
        return {name: getattr(values, name) for name in names}

    async def encode(self, request: Request, prompt: TextRequest) -> list[int]:
        with _until_gone() as gone:
            prompt = replace(prompt, cancelled=gone.is_set)
            return await unless_gone(request, self._encode_in_thread(prompt))

    async def _encode_in_thread(self, prompt: TextRequest) -> list[int]:
        [prompt] = await self._with_images([prompt])
        return await self.checks.run("plain", self.session.encode, prompt)

    async def _with_images(self, requests: list[TextRequest]) -> list[TextRequest]:
        """Return the requests, choices of one prompt, with their images read, in a thread."""
        messages, limits = requests[0].messages if requests else None, self.session.images
        if messages is None or not has_images(messages):
            return requests
        fetched: Mapping[str, bytes] = {}
        if self.config.image_urls and limits is not None:
            fetched = await self.image_urls.fetch(remote_urls(messages), limits)
        messages = await self.checks.run("images", with_images, messages, limits, fetched)
        return [replace(each, messages=messages) for each in requests]

    async def _checked(
        self, request: Request, requests: list[TextRequest], *, streamed: bool
    ) -> list[TextRequest]:
        """Return the requests with their prompts encoded, in a thread."""
        with _until_gone() as gone:
            limit, headers = self.config.max_tokens, request.headers
            affinity = next((headers[name] for name in SESSION_HEADERS if name in headers), "")
            requests = [
                replace(
                    each,
                    cancelled=gone.is_set,
                    max_tokens=each.max_tokens or limit,
                    affinity=affinity,
                    streamed=streamed,
                )
                for each in requests
            ]
            return await unless_gone(request, self._check_in_thread(requests))

    async def _check_in_thread(self, requests: list[TextRequest]) -> list[TextRequest]:
        """Return the checked requests; a grammar or a model that scores keeps none of the others waiting."""
        session = self.session
        requests = await self._with_images(requests)
        if await self.checks.run("plain", lambda: any(session.scores(each) for each in requests)):
            return await self.checks.run("scored", _checked_requests, session, requests)
        kind = "constrained" if any(each.constrained for each in requests) else "plain"
        if requests and has_images(requests[0].messages):
            kind = "images"
        return await self.checks.run(kind, _checked_requests, session, requests)

    async def respond(
        self,
        request: Request,
        requests: list[TextRequest],
        writer: Writer,
        *,
        stream: bool | None,
    ) -> Response:
        request_id = f"req_{secrets.token_hex(8)}"
        headers = {"x-request-id": request_id, "request-id": request_id}
        self.worker.check_room()
        # Invalid requests are refused before they queue: a queued stream has already sent its status.
        checked = await self._checked(request, requests, streamed=bool(stream))
        job = self.worker.submit(*checked, label=f"{request_id} {request.url.path}")
        if not stream:
            try:
                await unless_gone(request, _collect(job, writer))
            finally:
                job.cancel()
            whole = writer.result()
            if isinstance(whole, bytes):
                return Response(whole, headers=headers, media_type="application/json")
            return JSONResponse(whole, headers=headers)
        batches = job.batches(KEEP_ALIVE_S)
        try:
            first = await unless_gone(request, anext(batches))
        except BaseException:
            job.cancel()
            raise
        if writer.media_type is not None:
            headers["content-type"] = writer.media_type
        return EventStream(
            _stream(job, first, batches, writer),
            job.cancel,
            headers,
            lambda: writer.failure(failure_of(stopping())),
        )

    async def prefill(
        self, request: Request, prefill_request: TextRequest, lifetime_s: float
    ) -> dict[str, Any]:
        """Process the beginning of a request for a later one; return how far that came in its lifetime."""
        self.worker.check_room(prefill_only=True)
        prefill_request = replace(prefill_request, prefill_for_s=lifetime_s, max_tokens=None)
        checked = await self._checked(request, [prefill_request], streamed=False)
        job = self.worker.submit(*checked, label=f"req_{secrets.token_hex(8)} {request.url.path}")
        complete = False
        try:
            async with asyncio.timeout(lifetime_s):
                await unless_gone(request, _drained(job))
                complete = True
        except TimeoutError:
            pass  # what was read until now is kept
        finally:
            job.cancel()
        done = job.progress or Progress(0, 0)
        return {
            "object": "prefill",
            "model": self.model_name,
            "complete": complete,
            "prompt_tokens": done.total,
            "cached_tokens": done.cached,
            "ready_tokens": done.whole,
            "lifetime": lifetime_s,
        }


@contextmanager
def _until_gone() -> Generator[threading.Event]:
    """Set the event at the end, so that a thread for a client that has disconnected stops."""
    gone = threading.Event()
    try:
        yield gone
    finally:
        gone.set()


def _checked_requests(session: RequestReader, requests: list[TextRequest]) -> list[TextRequest]:
    """Return the requests with their prompts encoded, once for the choices of one prompt."""
    checked: list[TextRequest] = []
    for request in requests:
        last = checked[-1] if checked else None
        if last is not None and request.messages is last.messages and request.prompt is last.prompt:
            checked.append(replace(request, encoded=last.encoded))
        else:
            checked.append(session.check(request))
    return checked


async def _collect(job: Job, writer: Writer) -> None:
    async for batch in job.batches():
        for index, event in batch:
            writer.write(index, _checked(event))


async def _drained(job: Job) -> None:
    async for batch in job.batches():
        for _, event in batch:
            _checked(event)


async def _stream(
    job: Job, first: list[IndexedEvent], rest: AsyncIterator[list[IndexedEvent]], writer: Writer
) -> AsyncIterator[bytes]:
    try:
        yield _piece(job, first, writer)
        async for batch in rest:
            if piece := _piece(job, batch, writer):
                yield piece
        yield writer.end()
    except Exception as error:
        yield writer.failure(failure_of(error))


def _piece(job: Job, batch: list[IndexedEvent], writer: Writer) -> bytes:
    if not batch:
        return writer.keep_alive(job)
    return b"".join(writer.write(index, _checked(event)) for index, event in batch)


def _checked(event: SessionEvent) -> SessionEvent:
    """Raise for a cancelled request: one that still has a client is cancelled only by shutdown."""
    if isinstance(event, Finished) and event.reason == "cancelled":
        raise stopping()
    return event
