"""Clients that send and do not read, and clients without a key that take connections."""

import contextlib
import socket
import time
from pathlib import Path

import httpx2
import pytest

import bough.server
from bough.config import ServerConfig
from bough.server.connections import Connections
from tests.server.live import Live, scripted
from workshop.attack.wire import exchanged, shapes, statuses

PAGE = max((Path(bough.server.__file__).parent / "page").glob("*.js"), key=lambda path: path.stat().st_size)
LIMIT = 12


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers have few connections, and close one that is not read after a second."""
    made = Connections.__init__
    monkeypatch.setattr("bough.server.run.most_connections", lambda *_: LIMIT)
    monkeypatch.setattr(
        Connections, "__init__", lambda self, limit, share: made(self, limit, read_s=1.0, share=share)
    )


def deaf(server: Live, stack: contextlib.ExitStack) -> socket.socket:
    """Ask for a large page many times and read nothing."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", server.port))
    client.settimeout(0.5)
    request = f"GET /{PAGE.name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with contextlib.suppress(OSError):  # the server does not read what it cannot answer
        client.sendall(request * 200)
    return client


def closed(client: socket.socket, seconds: float) -> bool:
    """Return whether the server ends a connection, whose answers are read from here on."""
    client.settimeout(seconds)
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.usefixtures("limited")
def test_connections_that_are_not_read_are_closed():
    with scripted() as server, contextlib.ExitStack() as stack:
        clients = [deaf(server, stack) for _ in range(LIMIT + 4)]
        health = httpx2.get(f"{server.url}/health", timeout=10)
        assert health.status_code == 200
        end = time.monotonic() + 20
        pending = set(clients)
        while pending and time.monotonic() < end:
            # A peer that has been cut off cannot send; that is seen without reading.
            for client in list(pending):
                with contextlib.suppress(BlockingIOError):
                    try:
                        client.setblocking(False)
                        client.send(b"\r\n")
                    except ConnectionError:
                        pending.discard(client)
            time.sleep(0.05)
        assert not pending


@pytest.mark.usefixtures("limited")
def test_a_slow_reader_gets_all_it_asked_for():
    with scripted() as server, contextlib.ExitStack() as stack:
        client = deaf(server, stack)
        expected = PAGE.read_bytes()
        received = b""
        end = time.monotonic() + 3
        while len(received) < 3 * len(expected) and time.monotonic() < end:
            received += client.recv(1 << 16)
            time.sleep(0.002)
        assert received.count(expected[-200:]) >= 2
        assert httpx2.get(f"{server.url}/health").status_code == 200


@pytest.mark.usefixtures("limited")
def test_clients_without_a_key_get_a_share():
    with scripted(config=ServerConfig(api_keys=("key",))) as server, contextlib.ExitStack() as stack:
        trusted = stack.enter_context(httpx2.Client(base_url=server.url, headers={"x-api-key": "key"}))
        assert trusted.get("/v1/models").status_code == 200
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(2 * LIMIT)
        ]
        time.sleep(0.2)
        held = [client for client in strangers if not closed(client, 0.01)]
        assert len(held) == LIMIT // 2 and held == strangers[-LIMIT // 2 :]
        for _ in range(3):  # on the connection that has been there all the time, and on new ones
            assert trusted.get("/v1/models").status_code == 200
            assert httpx2.get(f"{server.url}/v1/models", headers={"x-api-key": "key"}).status_code == 200


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed():
    with scripted() as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
        body = b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /props HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client.sendall(head + body)
        client.settimeout(5)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
        assert b"needs one of them" in answer


def test_no_part_of_a_body_is_another_request():
    """Requests whose length can be read in two ways, odd heads and chunks: the rest is never answered."""
    odd = dict(shapes())
    assert len(odd) > 70
    with scripted() as server:
        for name, content in odd.items():
            answer = exchanged(server.port, content, 0.05)
            assert b"smuggled" not in answer, name
            assert all(status < 500 for status in statuses(answer)), name
        assert httpx2.get(f"{server.url}/health").status_code == 200
