"""Middleware that checks key, origin, host and body size before any route."""

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import re
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.config import ServerConfig
from bough.server.bodies import LARGE, MAX_VALUES, repaired, too_many_values
from bough.server.connections import TRUST
from bough.server.failures import Failure
from bough.server.listen import is_loopback

OPEN = ("/health",)  # needs no key
PIECE_S = 20.0  # longest pause in a body
BODY_S = 300.0  # for a whole body: 32 MiB at 1 Mbit/s
_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}|\[?[0-9a-f]*:[0-9a-f:.]*\]?")


class Guard:
    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, path = Headers(scope=scope), scope["path"]
        origin = headers.get("origin")
        allowed = origin is None or self._allows(origin, headers.get("host", ""))
        added = _cors(origin) if origin and allowed else {}

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_raw(added)]
            await send(message)

        if "transfer-encoding" in headers and "content-length" in headers:
            # Where the body ends depends on who reads it: the rest must not count as another request.
            failure = Failure(400, "the request has Content-Length and Transfer-Encoding; needs one of them")
            return await _refuse(reply, failure, path, {"connection": "close"})
        failure = self._refusal(scope, headers, allowed)
        if failure is not None:
            return await _refuse(reply, failure, path, _ask_for_password(scope, headers, failure))
        if scope["method"] == "OPTIONS" and origin:
            if headers.get("access-control-request-private-network") == "true":
                added |= {"access-control-allow-private-network": "true"}
            await send({"type": "http.response.start", "status": 204, "headers": _raw(added | _PREFLIGHT)})
            return await send({"type": "http.response.body", "body": b""})
        if scope["method"] == "POST":
            body = await self._read(receive, headers)
            if isinstance(body, Failure):
                return await _refuse(reply, body, path, {"connection": "close"})
            if body is None:
                return None
            scope = _as_json(scope)
            receive = _replay(body, receive)
        await self._app(scope, receive, reply)

    def _refusal(self, scope: Scope, headers: Headers, allowed: bool) -> Failure | None:
        if not allowed:
            return Failure(
                403, f"pages of {headers['origin']} may not use this server; cors_origin allows them"
            )
        if not self._config.api_keys:
            # DNS rebinding: a foreign name that resolves to this machine would give its page access.
            host = _host(headers.get("host", ""))
            if host and not is_loopback(host) and not _ADDRESS.fullmatch(host):
                return Failure(403, f"the host {host} is not allowed; use localhost, or set a key")
            return None
        if scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return None
        keys = _keys(headers)
        if not keys:
            return Failure(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        # A list, so that the time does not tell which pair was equal.
        pairs = [(key.encode(), right.encode()) for key in keys for right in self._config.api_keys]
        if not any([hmac.compare_digest(*pair) for pair in pairs]):
            return Failure(401, "the key is wrong", code="invalid_api_key")
        scope.get("state", {}).get(TRUST, lambda: None)()
        return None

    def _allows(self, origin: str, host: str) -> bool:
        if "*" in self._config.cors_origins or origin in self._config.cors_origins:
            return True
        place = origin.partition("://")[2]
        return bool(place) and (place == host or is_loopback(_host(place)))

    async def _read(self, receive: Receive, headers: Headers) -> bytes | Failure | None:
        """Return the whole body; None if the client disconnected while sending it."""
        limit = self._config.max_body
        too_large = Failure(413, f"the body is larger than {limit} bytes", code="request_too_large")
        if headers.get("content-length", "0").isdigit() and int(headers.get("content-length", "0")) > limit:
            return too_large
        pieces: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        end = loop.time() + BODY_S
        while True:
            try:
                async with asyncio.timeout_at(min(end, loop.time() + PIECE_S)):
                    message = await receive()
            except TimeoutError:
                return Failure(
                    408,
                    f"the body is unfinished: {size} bytes, then none for {PIECE_S:.0f} s, or"
                    f" {BODY_S:.0f} s in all",
                )
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > limit:
                return too_large
            if not message.get("more_body"):
                body = b"".join(pieces)
                return _prepared(body) if size < LARGE else await asyncio.to_thread(_prepared, body)


_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "*, authorization, content-type, x-api-key, anthropic-version, "
    "anthropic-beta",
    "access-control-max-age": "600",
}


def _cors(origin: str) -> dict[str, str]:
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": "x-request-id, retry-after",
        "vary": "origin",
    }


def _host(value: str) -> str:
    return value.rpartition(":")[0] if re.search(r":\d+$", value) else value


def _keys(headers: Headers) -> list[str]:
    """Return the keys from both headers that clients use; browsers send the key as a password."""
    keys = headers.getlist("x-api-key")
    scheme, _, value = headers.get("authorization", "").replace("\t", " ").partition(" ")
    if scheme.lower() == "bearer":
        keys.append(value.strip())
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, ValueError):
            keys.append(base64.b64decode(value, validate=True).decode().partition(":")[2])
    return keys


def _ask_for_password(scope: Scope, headers: Headers, failure: Failure) -> dict[str, str]:
    """Make browsers prompt for the key on navigation; scripts get only the error."""
    navigates = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
    if failure.status == 401 and navigates:
        return {"www-authenticate": 'Basic realm="Bough: any name, the key as password"'}
    return {}


async def _refuse(send: Send, failure: Failure, path: str, headers: Mapping[str, str]) -> None:
    body = json.dumps(failure.body(path)).encode()
    lines = {"content-type": "application/json", "content-length": str(len(body))} | failure.headers
    await send(
        {"type": "http.response.start", "status": failure.status, "headers": _raw({**lines, **headers})}
    )
    await send({"type": "http.response.body", "body": body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _as_json(scope: Scope) -> Scope:
    """Set the content type to JSON, the only one that is read, whatever the client sent."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def _prepared(body: bytes) -> bytes | Failure:
    if too_many_values(body):
        return Failure(
            413,
            f"the body has more than {MAX_VALUES} values; send long text as one string",
            code="request_too_large",
        )
    return repaired(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed
