"""Bounds on open connections: their number, the time without a whole request head, and without being read.

A connection counts before its key is checked, so idle ones must not use up the process's descriptors: when
all are in use, the connection that has waited longest without a request is closed for the new one, or the one
whose answers have not been read for longest.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

READ_S = 20.0  # in which a peer takes some of what waits to be sent to it
SHARE = 0.5  # of all connections, for clients that have not shown a key
TRUST = "trust"  # of a request's state: what to call once its key is right
HEAD_S = 15.0  # from the connection, or the end of the last response, to the end of the next head
_SWEEP_S = 1.0
_QUIET_S = 60.0  # between two warnings of one kind
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def accepts_at_once(descriptors: int) -> int:
    """Return how many connections the event loop may accept in one iteration."""
    return max(4, min(64, descriptors // 16))


def most_connections(descriptors: int, used: int) -> int:
    """Return how many connections may be open; `used`: descriptors in use before the first one."""
    # Those accepted in the iterations before a closed one gives back its descriptor, and some for files.
    return max(8, descriptors - used - 4 * accepts_at_once(descriptors) - 32)


def descriptor_limit() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)


def descriptors_used() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 64


def send_at_once(connection: socket.socket | None) -> None:
    """Have small pieces sent without waiting until the reader has acknowledged the ones before, up to 40 ms.

    asyncio does so only for sockets that were made with the number of the protocol.
    """
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Connections:
    """All open connections of a server, in the order in which they began to wait, or ceased to read.

    share: of the limit, for clients that have not shown a key; 1 where none is needed.
    """

    def __init__(self, limit: int, *, head_s: float = HEAD_S, read_s: float = READ_S, share: float = 1.0):
        self.limit, self._head_s, self._read_s = limit, head_s, read_s
        self._strangers = max(4, int(share * limit))
        self._open: set[_Protocol] = set()
        self._waiting: dict[_Protocol, float] = {}  # without a whole request head, since when
        self._stuck: dict[_Protocol, float] = {}  # whose answers are not read, since when
        self._trusted: set[_Protocol] = set()  # that have shown a key
        self._sweeping = False
        self._warned: dict[str, float] = {}

    def protocol(self) -> type[asyncio.Protocol]:
        """Return the protocol class of this server."""
        return type("Protocol", (_Protocol,), {"registry": self})

    def add(self, new: "_Protocol") -> None:
        many = len(self._open) - len(self._trusted) >= self._strangers
        if many or len(self._open) >= self.limit:
            kind = "without a key" if many and self._strangers < self.limit else "that the descriptors allow"
            self.warn(f"{len(self._open)} connections are open, the most {kind}")
            oldest = self._oldest(strangers=many)
            if oldest is None:
                new.transport.write(_BUSY)
                return new.transport.close()
            self._abort(oldest)
        self._open.add(new)
        self.waits(new)

    def _oldest(self, *, strangers: bool) -> "_Protocol | None":
        """Return what makes room: those without a key before those with one.

        Of each, those that wait, then those that do not read, then those that send more than they wait for.
        """
        idle = [*self._waiting, *self._stuck, *(one for one in self._open if one.is_ahead)]
        unknown = [one for one in idle if one not in self._trusted]
        return next(iter(unknown if strangers else unknown + idle), None)

    def remove(self, one: "_Protocol") -> None:
        self._open.discard(one)
        self._trusted.discard(one)
        self._waiting.pop(one, None)
        self._stuck.pop(one, None)

    def trust(self, one: "_Protocol") -> None:
        """Note that a request with a right key came on a connection."""
        if one in self._open:
            self._trusted.add(one)

    def waits(self, one: "_Protocol") -> None:
        """Start the time for the next request's head."""
        self._begin(self._waiting, one)

    def runs(self, one: "_Protocol") -> None:
        self._waiting.pop(one, None)

    def sticks(self, one: "_Protocol") -> None:
        """Start the time in which the peer has to read."""
        self._begin(self._stuck, one)

    def reads(self, one: "_Protocol") -> None:
        self._stuck.pop(one, None)

    def _begin(self, times: dict["_Protocol", float], one: "_Protocol") -> None:
        if one in self._open:
            times.pop(one, None)
            times[one] = time.monotonic()
            if not self._sweeping:
                self._sweeping = True
                asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        now = time.monotonic()
        for times, limit_s in ((self._waiting, self._head_s), (self._stuck, self._read_s)):
            for one in [one for one, since in times.items() if since < now - limit_s]:
                self._abort(one)
        self._sweeping = bool(self._waiting or self._stuck)
        if self._sweeping:
            asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _abort(self, one: "_Protocol") -> None:
        self.remove(one)
        one.transport.abort()

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle the loop's errors; asyncio reports running out of descriptors once per accept."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS:
            return self.warn(f"no connection can be accepted: {error.strerror}")
        loop.default_exception_handler(context)

    def warn(self, text: str) -> None:
        kind, now = text.lstrip("0123456789"), time.monotonic()
        if now - self._warned.get(kind, -_QUIET_S) >= _QUIET_S:
            self._warned[kind] = now
            log.warning("%s", text)


class _Protocol(H11Protocol):
    registry: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        send_at_once(transport.get_extra_info("socket"))
        self.registry.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.registry.remove(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        if self.flow.write_paused:
            # A client that sends requests and reads no answers: the next one waits, unread.
            return self.flow.pause_reading()
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            # The request's task has not begun yet.
            self.cycle.scope["state"][TRUST] = lambda: self.registry.trust(self)
        if self.cycle is not None and not self.cycle.response_complete:
            self.registry.runs(self)

    @property
    def is_ahead(self) -> bool:
        """Return whether the client has sent further requests without waiting for an answer."""
        return bool(self.conn.trailing_data[0])

    def pause_writing(self) -> None:
        self.registry.sticks(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self.registry.reads(self)
        super().resume_writing()
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.flow.resume_reading()
            self.handle_events()

    def on_response_complete(self) -> None:
        self.registry.waits(self)
        super().on_response_complete()
