"""Middleware that logs refused requests, one line each, limited so that a flood cannot fill a disk."""

import json
import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

LOGGED = "the server's log has this error"  # a note on errors of requests that have a log line already
BURST = 20  # lines at once
PER_SECOND = 1.0
MAX_PATH, MAX_MESSAGE = 100, 200  # characters; both quote the request


class RefusalLog:
    """Logs every response with a 4xx status, unless the request sets `state.logged`."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic):
        self._app, self._limit = app, RateLimit(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        status = 200

        async def logged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif _refused(status) and not state.get("logged"):
                state["logged"] = True
                self._write(scope, status, message.get("body", b""))
            await send(message)

        await self._app(scope, receive, logged)

    def _write(self, scope: Scope, status: int, body: bytes) -> None:
        dropped = self._limit.take()
        if dropped is None:
            return
        if dropped:
            log.warning("%d more refused requests were not logged", dropped)
        path, message = printable(scope["path"], MAX_PATH), printable(_message(body), MAX_MESSAGE)
        log.warning("%s %s · %d · %s", printable(scope["method"], 20), path, status, message)


class RateLimit:
    """A token bucket that counts what it refuses."""

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._left, self._at = clock, float(BURST), clock()
        self._dropped = 0

    def take(self) -> int | None:
        """Return how many were refused since the last success; None: this one is refused."""
        now = self._clock()
        self._left = min(float(BURST), self._left + PER_SECOND * (now - self._at))
        self._at = now
        if self._left < 1:
            self._dropped += 1
            return None
        self._left -= 1
        dropped, self._dropped = self._dropped, 0
        return dropped


def printable(text: str, limit: int) -> str:
    """Return at most `limit` characters without line breaks and terminal escapes."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def _refused(status: int) -> bool:
    return 400 <= status < 500 and status != 499  # 499: the client disconnected


def _message(body: bytes) -> str:
    """Return the message of a protocol's error object."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)  # Ollama's is a text
    except (ValueError, KeyError, TypeError):
        return ""
