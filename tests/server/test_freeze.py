"""Requests that cost much to refuse, clients that leave, and sockets that send nothing."""

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest

from bough.config import ServerConfig
from bough.server import guard
from bough.server.bodies import MAX_VALUES, too_many_values
from bough.server.connections import Connections, accepts_at_once, most_connections
from bough.server.schemas import MAX_LENGTHS, MAX_UNKNOWN
from tests.server.live import Live, scripted
from workshop.attack.bodies import encoded, large
from workshop.attack.clients import Client

SCALE = 0.5
STATUS = {"15M integers in an unknown field": 413, "28 MiB of escaped pairs": 400}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.mark.parametrize("name", list(large(0)))
def test_no_body_freezes_the_server(pair_server: Live, name: str):
    path, make = large(SCALE)[name]
    body, health = encoded(make()), Client(pair_server.url, None, 0.005)
    health.start()
    answer = httpx2.post(pair_server.url + path, content=body, timeout=120)
    time.sleep(0.1)
    health.stop()
    assert answer.status_code == STATUS.get(name, 400)
    assert answer.elapsed.total_seconds() < 10
    # 0.5 s on a quiet machine: python -m workshop attack.bombs
    assert not health.errors and max(seconds for _, seconds in health.took) < 1.5


def test_a_prompt_that_cannot_fit_is_refused_by_its_bytes(pair_server: Live):
    session = pair_server.session
    size = session.max_ctx * session.tokenizer.longest_token
    for path, body in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a" * size}]},
        "/v1/completions": {"prompt": "a" * (size + 1)},
        "/v1/messages": {"messages": [{"role": "user", "content": "a" * size}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a" * size}]},
        "/tokenize": {"content": "a" * (size + 1)},
    }.items():
        answer = httpx2.post(pair_server.url + path, json=body, timeout=30)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "the prompt has at least 10" in message and "the context holds 1024" in message
    fits = httpx2.post(f"{pair_server.url}/tokenize", json={"content": "a" * size}, timeout=60)
    assert fits.status_code == 200


def test_a_long_prompt_is_tokenised_only_until_it_is_too_long(
    pair_server: Live, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bough.text.tokenizer.PIECE", 1000)
    tokenizer = pair_server.session.tokenizer
    text = "x y " * (pair_server.session.max_ctx * tokenizer.longest_token // 5)
    answer = httpx2.post(f"{pair_server.url}/v1/completions", json={"prompt": text}, timeout=30)
    assert "the prompt has at least" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("field", "value"), [("messages", [{}]), ("tools", [{}]), ("stop", ["x"])])
def test_arrays_have_a_limit(echo_server: Live, field: str, value: list):
    body = CHAT | {field: value * (MAX_LENGTHS[field] + 1)}
    answer = httpx2.post(f"{echo_server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert f"needs at most {MAX_LENGTHS[field]}" in answer.json()["error"]["message"]


def test_values_are_counted_outside_strings():
    assert not too_many_values(b'["' + b"," * (2 * MAX_VALUES) + b'"]')
    assert not too_many_values(b'["' + rb"\"," * (2 * MAX_VALUES) + b'"]')
    assert too_many_values(b"[" + b"1," * (MAX_VALUES + 1) + b"1]")


def test_large_unknown_fields_are_not_walked(echo_server: Live):
    for count, status in ((MAX_UNKNOWN - 1, 400), (MAX_UNKNOWN + 1, 200)):
        body = f'{{"messages":[{{"role":"user","content":"x"}}],"x":[{"1," * count}NaN]}}'
        assert httpx2.post(f"{echo_server.url}/v1/chat/completions", content=body).status_code == status


def test_a_client_that_leaves_stops_the_tokenising():
    with scripted() as server:
        began, stopped = threading.Event(), threading.Event()

        def encode(request):
            began.set()
            while not request.cancelled():
                time.sleep(0.005)
            stopped.set()
            return []

        server.session.encode = encode
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(
                f"{server.url}/v1/messages/count_tokens",
                json=CHAT,
                timeout=httpx2.Timeout(5, read=0.3),
            )
        assert began.is_set() and stopped.wait(5)


def opened(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(data)
    return connection


def test_unfinished_requests_are_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "PIECE_S", 0.5)
    made = Connections.__init__
    monkeypatch.setattr(Connections, "__init__", lambda self, limit, share: made(self, limit, head_s=0.5))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    with scripted() as server, contextlib.ExitStack() as stack:
        silent = stack.enter_context(opened(server.port))
        headless = stack.enter_context(opened(server.port, head))
        bodiless = stack.enter_context(opened(server.port, head + b"Content-Length: 10\r\n\r\n{"))
        chunked = stack.enter_context(
            opened(server.port, head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        )
        for idle in (silent, headless):
            with contextlib.suppress(ConnectionResetError):
                assert idle.recv(100) == b""
        for unfinished in (bodiless, chunked):
            assert b"408" in unfinished.recv(1000)


def test_the_longest_waiting_connection_makes_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bough.server.run.most_connections", lambda *_: 10)
    with scripted(config=ServerConfig(api_keys=("key",))) as server, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(opened(server.port)) for _ in range(30)]
        answer = httpx2.post(
            f"{server.url}/v1/chat/completions", json=CHAT, headers={"x-api-key": "key"}, timeout=10
        )
        assert answer.status_code == 200
        with contextlib.suppress(ConnectionResetError):
            assert waiting[0].recv(10) == b""
        waiting[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            waiting[-1].recv(10)


@pytest.mark.parametrize("descriptors", [64, 128, 512, 1024, 65536])
def test_connections_leave_descriptors_for_everything_else(descriptors: int):
    found = most_connections(descriptors, 20)
    assert 8 <= found <= max(8, descriptors - 20 - 3 * accepts_at_once(descriptors))


SERVER = """
import resource, sys, time, logging
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
logging.basicConfig(stream=sys.stderr)
from tests.server.live import scripted
from bough.config import ServerConfig
with scripted(config=ServerConfig(api_keys=("key",))) as server:
    held = []
    try:
        while "exhaust" in sys.argv:
            held.append(open("/dev/null"))
    except OSError:
        pass
    print(server.port, flush=True)
    if held:
        time.sleep(3)
        for each in held:
            each.close()
        print("free", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def limited(*arguments: str):
    """Run a server with 512 descriptors; yield its process and port."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


@pytest.fixture
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this process may open {hard} descriptors, needed 2048")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_thousand_idle_sockets_with_512_descriptors():
    with limited() as (process, port), contextlib.ExitStack() as stack:
        for count in range(1000):
            stack.enter_context(opened(port))
            if count % 100 == 99:
                answer = httpx2.post(
                    f"http://127.0.0.1:{port}/v1/chat/completions",
                    json=CHAT,
                    headers={"x-api-key": "key"},
                    timeout=10,
                )
                assert answer.status_code == 200
        _, errors = process.communicate("", timeout=30)
        assert "connections are open" in errors and len(errors) < 5000


def test_running_out_of_descriptors_is_logged_once_and_survived():
    with limited("exhaust") as (process, port), contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(opened(port))
        assert process.stdout is not None and process.stdout.readline() == "free\n"
        health = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=10)
        assert health.status_code == 200
        _, errors = process.communicate("", timeout=30)
        assert errors.count("no connection can be accepted") == 1 and len(errors) < 5000


def test_pieces_of_a_stream_are_sent_at_once(monkeypatch: pytest.MonkeyPatch):
    """Otherwise a piece may wait 40 ms for the acknowledgement of the one before."""
    found, add = [], Connections.add

    def noted(self: Connections, protocol) -> None:
        connection = protocol.transport.get_extra_info("socket")
        found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        add(self, protocol)

    monkeypatch.setattr(Connections, "add", noted)
    with scripted() as server:
        assert httpx2.get(f"{server.url}/health").status_code == 200
    assert found and all(found)
