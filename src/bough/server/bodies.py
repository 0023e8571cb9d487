"""Request bodies: bounds on what is parsed, and parsing off the event loop."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

# Below this many bytes everything takes some milliseconds and stays on the event loop.
LARGE = 1 << 16
# Array items, object members and their names. Parsing and validating this many takes 0.3 s.
MAX_VALUES = 600_000
# Matches every JSON escape in order, so that an escaped backslash does not start another escape.
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a complete surrogate pair
_ESCAPE = re.compile(rb"%b|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\." % _PAIR, re.DOTALL)
# Up to 1 MiB that ends between escapes.
_SLICE = re.compile(rb"(?:[^\\]{1,64}+|%b|\\u[0-9a-fA-F]{4}|\\.){1,16384}+" % _PAIR, re.DOTALL)
_STRINGS_AND_SEPARATORS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,:\[{]', re.DOTALL)


def too_many_values(body: bytes) -> bool:
    """Return whether the JSON text has more than MAX_VALUES values and names."""
    if sum(body.count(each) for each in (b",", b":", b"[", b"{")) <= MAX_VALUES:
        return False
    count = 0
    for match in _STRINGS_AND_SEPARATORS.finditer(body):
        count += match.end() - match.start() == 1
        if count > MAX_VALUES:
            return True
    return False


def repaired(body: bytes) -> bytes:
    """Replace lone surrogates, left by clients that truncate text, with U+FFFD."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    # In slices: one substitution would hold the GIL for seconds.
    pieces: list[bytes] = []
    start = 0
    while match := _SLICE.match(body, start):
        pieces.append(_ESCAPE.sub(_replaced, match[0]))
        start = match.end()
    return b"".join([*pieces, body[start:]])


def _replaced(match: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if match["half"] else match[0]


class _Body(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            # The parser holds the GIL, for 0.1 s at most: see MAX_VALUES.
            self._json = json.loads(body) if len(body) < LARGE else await asyncio.to_thread(json.loads, body)
        return self._json


class BodyRoute(APIRoute):
    """A route that parses large bodies in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_Body(request.scope, request.receive))

        return handler
