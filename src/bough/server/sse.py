"""Server-sent event streams that cancel their request when the client disconnects."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from bough.session.worker import Job

KEEP_ALIVE_S = 5.0  # clients and proxies time out after 30 s or more of silence
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


class ClientGone(Exception):
    """The client disconnected before the response was sent."""


def event(value: Any, name: str | None = None) -> bytes:
    # ASCII escapes, so that lone surrogates in echoed text can be encoded.
    data = json.dumps(value, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode() if name else f"data: {data}\n\n".encode()


def comment(job: Job) -> bytes:
    """Return a keep-alive comment with the position in the queue or the prefill progress."""
    if job.progress is None:
        return f": queued behind {job.ahead}\n\n".encode()
    return f": prompt {job.progress.done}/{job.progress.total}\n\n".encode()


class EventStream(Response):
    """Sends what `chunks` yields and always calls `gone` at the end; `cut` ends it if the server stops."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        gone: Callable[[], None],
        headers: dict[str, str],
        cut: Callable[[], bytes],
    ):
        super().__init__(headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._gone, self._cut = chunks, gone, cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        listening = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({writing, listening}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        except asyncio.CancelledError:
            # Without waiting for anything: the event loop ends now.
            writing.cancel()
            await self._end(send, self._cut())
            raise
        finally:
            self._gone()
            for task in (writing, listening):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._end(send)

    @staticmethod
    async def _end(send: Send, last: bytes = b"") -> None:
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it and raise ClientGone if the client disconnects first."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, listening):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
