"""Keys, origins, hosts, sizes, and the routes around the protocols."""

import base64
import os
import socket
import threading
import time

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.config import ServerConfig
from bough.errors import UsageError
from bough.server.bodies import repaired as _repaired
from bough.server.failures import failure_of
from bough.server.listen import bind, check
from bough.server.refusals import BURST, LOGGED, RateLimit
from tests.server.live import Live, live, scripted
from tests.server.scripted import ScriptedSession, echo

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
ROUTES = ["/", "/docs", "/openapi.json", "/props", "/metrics", "/v1/models", "/app.js"]


@pytest.fixture(scope="module")
def locked():
    with scripted(config=ServerConfig(api_keys=("first", "second"))) as server:
        yield server


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_needs_the_key(locked: Live, route: str):
    refused = httpx2.get(locked.url + route)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert "www-authenticate" not in refused.headers
    for key in ("first", "second"):
        assert httpx2.get(locked.url + route, headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert httpx2.get(locked.url + route, headers={"x-api-key": "first"}).status_code == 200
    assert httpx2.get(locked.url + route, headers={"x-api-key": "third"}).status_code == 401


def test_any_right_key_grants_access(locked: Live):
    bearer = {"authorization": "Bearer first", "x-api-key": "wrong"}
    assert httpx2.get(f"{locked.url}/props", headers=bearer).status_code == 200
    header = {"authorization": "Bearer wrong", "x-api-key": "second"}
    assert httpx2.get(f"{locked.url}/props", headers=header).status_code == 200
    neither = {"authorization": "Bearer wrong", "x-api-key": "wrong"}
    assert httpx2.get(f"{locked.url}/props", headers=neither).status_code == 401


def test_health_needs_no_key(locked: Live):
    answer = httpx2.get(f"{locked.url}/health")
    assert answer.status_code == 200 and answer.json()["status"] == "ok"


def test_generation_needs_the_key(locked: Live):
    for route in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        answer = httpx2.post(locked.url + route, json=CHAT)
        assert answer.status_code == 401
        assert ("type" in answer.json()) == (route == "/v1/messages")


def test_browsers_send_the_key_as_a_password(locked: Live):
    asked = httpx2.get(locked.url, headers={"accept": "text/html"})
    assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith("Basic ")
    word = base64.b64encode(b"me:second").decode()
    assert httpx2.get(locked.url, headers={"authorization": f"Basic {word}"}).status_code == 200
    for wrong in (
        "Basic !!!",
        "Basic " + base64.b64encode(b"me:no").decode(),
        "Digest x",
        "Bearer",
        "Bearer é",
    ):
        headers = {"authorization": wrong.encode()}
        assert httpx2.get(locked.url, headers=headers).status_code == 401


def test_other_hosts_than_loopback_need_a_key():
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(UsageError, match="no key"):
            check(ServerConfig(host=host))
        check(ServerConfig(host=host, api_keys=("k",)))
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        check(ServerConfig(host=host))
    with pytest.raises(UsageError, match="a header cannot carry"):
        check(ServerConfig(api_keys=("käse",)))


def test_http_errors_show_settings_without_backquotes():
    failure = failure_of(UsageError("`max_ctx` is 5, needed 8", "raise `max_ctx`", param="max_ctx"))
    assert failure.message == "max_ctx is 5, needed 8; raise max_ctx" and failure.param == "max_ctx"
    assert failure_of(UsageError("messages[0] is `a b`")).message == "messages[0] is `a b`"


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is in use"):
            bind(ServerConfig(port=port))
    with pytest.raises(UsageError, match="cannot listen"):
        bind(ServerConfig(host="203.0.113.7"))


ODD = ("http://[::1].evil.example", "http://evil.example#a.localhost", "http://", "http://[::1")


def test_only_local_origins_are_allowed(http: httpx2.Client):
    for origin in ("http://localhost:3000", "http://127.0.0.1:9", "http://[::1]:5", "https://app.localhost"):
        answer = http.get("/v1/models", headers={"origin": origin})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "http://[", *ODD):
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    asked = {"origin": "http://localhost:1", "access-control-request-method": "POST"}
    flight = http.options("/v1/chat/completions", headers=asked)
    assert flight.status_code == 204 and "POST" in flight.headers["access-control-allow-methods"]
    private = "access-control-allow-private-network"
    assert private not in flight.headers
    flight = http.options("/props", headers=asked | {"access-control-request-private-network": "true"})
    assert flight.headers[private] == "true"


def test_allowed_origins():
    config = ServerConfig(cors_origins=("https://a.example",), api_keys=("k",))
    with scripted(config=config) as server:
        headers = {"origin": "https://a.example", "x-api-key": "k"}
        assert httpx2.get(f"{server.url}/props", headers=headers).status_code == 200
        flight = httpx2.options(f"{server.url}/props", headers={"origin": "https://a.example"})
        assert flight.status_code == 204
        wrong = httpx2.get(f"{server.url}/props", headers={"origin": "https://a.example"})
        assert wrong.status_code == 401 and wrong.headers["access-control-allow-origin"]
    with scripted(config=ServerConfig(cors_origins=("*",))) as server:
        headers = {"origin": "https://b.example"}
        assert httpx2.get(f"{server.url}/props", headers=headers).status_code == 200


def test_a_foreign_host_name_is_rejected(http: httpx2.Client):
    assert http.get("/props", headers={"host": "rebound.example"}).status_code == 403
    assert http.get("/props", headers={"host": "rebound.example:8000"}).status_code == 403
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000", "10.0.0.3:80"):
        assert http.get("/props", headers={"host": host}).status_code == 200


def test_a_body_over_the_limit():
    with scripted(config=ServerConfig(max_body=2000)) as server:
        big = {"messages": [{"role": "user", "content": "x" * 3000}]}
        for path in ("/v1/chat/completions", "/v1/messages"):
            assert httpx2.post(server.url + path, json=big).status_code == 413

        def pieces():
            for _ in range(100):
                yield b"x" * 100

        assert httpx2.post(f"{server.url}/tokenize", content=pieces()).status_code == 413
        assert httpx2.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body is []; needs an object"),
        ({"messages": []}, "messages is []; needs 1 or more items"),
        (CHAT | {"n": 0}, "n is 0; needs at least 1"),
        (CHAT | {"n": 1000}, "n is 1000; needs at most 128"),
    ],
)
def test_what_a_field_needs(http: httpx2.Client, body: object, message: str):
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == message


def test_malformed_bodies(http: httpx2.Client):
    for content in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": NaN}',
        b"[" * 100_000,
        b"9" * 9999,
    ):
        answer = http.post("/v1/chat/completions", content=content)
        assert answer.status_code == 400, content[:20]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        answer = http.post(
            "/v1/chat/completions",
            content=b'{"messages":[{"role":"user","content":"Hi"}]}',
            headers={"content-type": kind},
        )
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("/v1/responses", '"input":"x"'),
        ("/v1/chat/completions", '"messages":[{"role":"user","content":"x"}]'),
        ("/v1/messages", '"messages":[{"role":"user","content":"x"}]'),
    ],
)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_values_that_json_cannot_represent_are_rejected(
    http: httpx2.Client, path: str, needed: str, stream: str
):
    deep = '{"a":' * 150 + "1" + "}" * 150
    for value in ('{"a":NaN}', '{"a":[1,-Infinity]}', '{"a":{"b":1e999}}', deep):
        body = f'{{{needed},"stream":{stream},"metadata":{value}}}'
        answer = http.post(path, content=body.encode())
        assert answer.status_code == 400, value[:20]
        assert answer.json()["error"]["message"].startswith("metadata has ")
    # A schema just below the limit is accepted.
    sound = f'{{{needed},"stream":{stream},"metadata":{deep[5 * 70 : -70]}}}'
    assert http.post(path, content=sound.encode()).status_code == 200


def test_other_methods_and_paths(http: httpx2.Client):
    assert http.get("/v1/chat/completions").status_code == 405
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/..%2fapp.py").status_code == 404
    assert http.get("/app.py").status_code == 404
    assert http.head("/").status_code == 200


def test_the_pages(http: httpx2.Client):
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "Bough" in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert http.get("/app.js").headers["content-type"].startswith("text/javascript")
    assert http.get("/style.css").headers["content-type"].startswith("text/css")
    docs = http.get("/docs").text
    for name in ("docs.js", "docs.css"):
        assert name in docs and http.get(f"/{name}").status_code == 200
    for text in (page.text, docs):
        assert "http://" not in text and "https://" not in text
    assert "/v1/responses" in http.get("/openapi.json").json()["paths"]


def test_requests_while_loading():
    gate = threading.Event()

    def load(progress):
        progress(1, 4)
        gate.wait(10)
        return ScriptedSession(echo)

    with live(load, wait=False) as server, httpx2.Client(base_url=server.url) as http:
        health = http.get("/health")
        assert health.status_code == 503 and health.headers["retry-after"]
        assert health.json()["status"] == "loading"
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = http.post(path, json=CHAT)
            assert answer.status_code == 503 and answer.headers["retry-after"]
        assert http.get("/").status_code == 200
        gate.set()
        assert server.worker.ready.wait(5)
        assert http.get("/health").json() == {
            "status": "ok",
            "progress": 1.0,
            "waiting": 0,
            "running": 0,
            "parallel": 1,
            "max_queue": 64,
            "models": 1,
            "models_max": 1,
            "checking": 0,
            "pid": os.getpid(),
        }
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_text_routes(http: httpx2.Client):
    tokens = http.post("/tokenize", json={"content": "héllo"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == "héllo"
    prompt = http.post("/apply-template", json=CHAT).json()["prompt"]
    assert prompt.startswith("<|im_start|>user\nHello<|im_end|>")
    quick = CHAT | {"chat_template_kwargs": {"enable_thinking": False}}
    assert http.post("/apply-template", json=quick).json()["prompt"].endswith("</think>\n\n")
    counted = http.post("/tokenize", json=CHAT).json()["tokens"]
    assert len(counted) == len(prompt)
    assert http.post("/tokenize", json={}).status_code == 400


def test_metrics_count(http: httpx2.Client):
    def value(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"bough:{name}"))

    names = ["drafts_total", "draft_tokens_total", "accepted_tokens_total", "accepted_tokens_per_pos_total"]
    before = [value(f"spec_decode_num_{name}") for name in names]
    written = value("generation_tokens_total")
    http.post("/v1/chat/completions", json=CHAT).raise_for_status()
    assert all(value(f"spec_decode_num_{name}") > old for name, old in zip(names, before, strict=True))
    assert value("generation_tokens_total") == written + len("You said: Hello ")


def test_lone_surrogates_are_replaced(http: httpx2.Client):
    body = b'{"messages":[{"role":"user","content":"a\\ud83db \\ud83d\\ude00 \\\\ud83d \\udc00"}]}'
    answer = http.post("/v1/chat/completions", content=body).json()
    assert answer["choices"][0]["message"]["content"] == "You said: a\ufffdb 😀 \\ud83d \ufffd "


@given(st.text(st.characters(exclude_categories=[]), max_size=30))
def test_repair_changes_only_lone_surrogates(text: str):
    import json

    def whole(character: str) -> str:
        return "\ufffd" if "\ud800" <= character <= "\udfff" else character

    # An escaped surrogate pair is one character.
    expected = "".join(map(whole, json.loads(json.dumps(text))))
    assert json.loads(_repaired(json.dumps(text).encode())) == expected


@pytest.fixture
def fresh_http():
    """A server that has logged nothing yet."""
    with scripted() as server, httpx2.Client(base_url=server.url, timeout=30) as client:
        yield client


def test_refused_requests_are_logged(fresh_http: httpx2.Client, caplog: pytest.LogCaptureFixture):
    http = fresh_http

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name.endswith("refusals")]
        caplog.clear()
        return found

    http.post("/v1/chat/completions", json=CHAT | {"stop": 5})
    assert lines() == [
        "POST /v1/chat/completions · 400 · stop is 5; input should be a valid string or input should be a "
        "valid list"
    ]
    http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 0})
    assert lines() == ["POST /v1/chat/completions · 400 · max_tokens is 0; needs at least 1"]
    with scripted(config=ServerConfig(api_keys=("right",))) as locked:
        httpx2.get(f"{locked.url}/props?key=secret", headers={"x-api-key": "secret"})
    assert lines() == ["GET /props · 401 · the key is wrong"]
    http.get("/props", headers={"host": "rebound.example"})
    assert lines() == [
        "GET /props · 403 · the host rebound.example is not allowed; use localhost, or set a key"
    ]
    http.post("/a%0A%1b[31m")
    shown = "/a\ufffd\ufffd[31m"
    assert lines() == [f"POST {shown} · 404 · there is no route {shown}; /docs lists all routes"]
    http.get("/v1/chat/completions")
    assert lines() == ["GET /v1/chat/completions · 405 · /v1/chat/completions does not take GET"]
    http.post("/v1/chat/completions", json=CHAT).raise_for_status()
    assert lines() == []


def test_a_flood_of_refused_requests_is_logged_in_part(
    fresh_http: httpx2.Client, caplog: pytest.LogCaptureFixture
):
    start = time.monotonic()
    for _ in range(200):
        fresh_http.get("/nothing")
    # Every second one more line, and one with the number of those left out.
    assert BURST <= len(caplog.records) <= BURST + 2 * (time.monotonic() - start + 1)


def test_the_limit_counts_what_was_not_logged():
    now = 0.0
    limit = RateLimit(lambda: now)
    assert [limit.take() for _ in range(BURST)] == [0] * BURST
    assert [limit.take() for _ in range(7)] == [None] * 7
    now = 1.5
    assert limit.take() == 7 and limit.take() is None


def test_an_error_that_has_a_log_line_gets_no_second_one(caplog: pytest.LogCaptureFixture):
    def fail(_request):
        error = UsageError("the engine refuses it")
        error.add_note(LOGGED)
        yield error

    with scripted(fail) as server:
        assert httpx2.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 400
    assert not [record for record in caplog.records if record.name.endswith("refusals")]
