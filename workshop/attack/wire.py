"""Sends requests that no client makes: their shapes, hosts, paths, keys, bodies and numbers.

    python -m workshop attack.wire

Each case has what it must not get: an answer to a request that was smuggled in, a 5xx, a file, a route
without its key. The server is `bough serve` with the embedded pair on 127.0.0.1.
"""

import gzip
import itertools
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2

from workshop.attack.bodies import CHAT, HELLO, nested
from workshop.attack.clients import attacked
from workshop.case import RESULTS, case
from workshop.report import Report

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
KEY = "secret-key"


def shapes() -> Iterator[tuple[str, bytes]]:
    """Yield requests whose length can be read in two ways, or whose head is odd."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b'{"content": "x"}' + SMUGGLED
    short, whole = b"Content-Length: 16\r\n", b"Content-Length: %d\r\n" % len(body)
    for transfer in (
        b"chunked", b"Chunked", b" chunked", b"\tchunked", b"chunked ", b"xchunked", b"chunked, identity",
        b"identity", b"gzip, chunked", b"chunked\x0b", b"\x00chunked", b'"chunked"', b"chunked;a=b",
        b",chunked",
        b"chunked,", b"chunked, chunked",
    ):  # fmt: skip
        chunked = b"Transfer-Encoding: " + transfer + b"\r\n"
        yield f"length and {transfer!r}", head + whole + chunked + b"\r\n0\r\n\r\n" + SMUGGLED
        yield f"{transfer!r} and length", head + chunked + whole + b"\r\n0\r\n\r\n" + SMUGGLED
    for length in (
        b"+16", b"0x10", b"16 16", b"16,90", b"-1", b"1e1", b"16.0", b"\x0016", b"0" * 400 + b"16",
        b"9" * 400, b"",
    ):  # fmt: skip
        yield f"length {length[:20]!r}", head + b"Content-Length: " + length + b"\r\n\r\n" + body
    yield "two lengths", head + short + whole + b"\r\n" + body
    yield "two lengths, the longer first", head + whole + short + b"\r\n" + body
    yield "a folded length", head + whole + b"Content-Length:\r\n 16\r\n\r\n" + body
    yield "a space before the colon", head + b"Content-Length : %d\r\n\r\n" % len(body) + body
    yield "a name with NUL", head + b"Content-\x00Length: 16\r\n" + whole + b"\r\n" + body
    yield "a bare CR", head + b"X: a\rContent-Length: 16\r\n" + whole + b"\r\n" + body
    yield "bare LF", (head + whole + b"\r\n").replace(b"\r\n", b"\n") + body
    yield "a line without a colon", head + b"nothing\r\n" + whole + b"\r\n" + body
    yield "two hosts", head + b"Host: evil.example\r\n" + whole + b"\r\n" + body
    yield "no host", head.replace(b"Host: localhost\r\n", b"") + whole + b"\r\n" + body
    chunks = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for size in (
        b"-1",
        b"+10",
        b"0x10",
        b"f" * 17,
        b"10;" + b"a" * 70_000,
        b"10 ",
        b"\n10",
        b"10\x00",
        b"zz",
    ):
        yield f"a chunk of {size[:20]!r}", chunks + size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    yield "a chunk without its end", chunks + b"%x\r\n" % len(body) + body + b"0\r\n\r\n"
    trailer = b"\r\n0\r\nContent-Length: 9\r\nHost: evil.example\r\n\r\n"
    yield "trailers", chunks + b"%x\r\n" % len(body) + body + trailer
    yield "70 kB of heads", head + b"X: " + b"a" * 70_000 + b"\r\n\r\n" + body
    yield "5,000 heads", head + b"".join(b"X%d: a\r\n" % i for i in range(5000)) + b"\r\n" + body
    yield "a path of 70 kB", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for line in (
        b"GET / HTTP/9.9", b"GET / HTTP/0.9", b"GET /", b"GET  /  HTTP/1.1", b"G\x00T / HTTP/1.1",
        b"\x16\x03\x01",
        b"PRI * HTTP/2.0", b"CONNECT evil.example:80 HTTP/1.1", b"TRACE / HTTP/1.1",
        b"GET http://evil.example/ HTTP/1.1",
        b"OPTIONS * HTTP/1.1", b"FOO" * 300 + b" / HTTP/1.1",
    ):  # fmt: skip
        yield f"{line[:30]!r}", line + b"\r\nHost: localhost\r\n\r\n"


def exchanged(port: int, content: bytes, wait_s: float = 0.5) -> bytes:
    """Return all that comes back until the server closes the connection or says nothing more."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            client.sendall(content)
            while piece := client.recv(65536):
                answer += piece
                client.settimeout(wait_s)
        except OSError:
            pass
    return answer


def statuses(answer: bytes) -> list[int]:
    """Return the statuses of the responses in what came back."""
    parts = answer.split(b"HTTP/1.1 ")[1:]
    return [int(part[:3]) for part in parts]


OWN_HOSTS = (
    "localhost", "localhost:80", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "[::1]", "[::1]:8000",
    "LOCALHOST",
    "a.localhost", "192.168.1.5", "10.0.0.1:80", "[fe80::1]", "0.0.0.0",
)  # fmt: skip
FOREIGN_HOSTS = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil-localhost",
    "xlocalhost", "localhostx", "localhost.", "localhost@evil.example", "evil.example@localhost",
    "evil.example#localhost",
    "evil.example/localhost", "127.0.0.1x", "127.0.0.1:80@evil.example", "1.2.3.4.5", "0x7f.1", "2130706433",
    "[::1].evil.example", "::1]evil.example", "xn--lcalhost-0ya", "evil.example,localhost",
    "localhost evil.example", "evil.example:localhost", "bough", "a.b.c.d", "..", "%6cocalhost",
    "[evil.example]",
)  # fmt: skip
FOREIGN_ORIGINS = (
    "http://evil.example", "https://evil.example:8000", "null", "file://",
    "http://localhost.evil.example", "x",
    "http://127.0.0.1.evil.example", "chrome-extension://abc", "http://evil.example#localhost",
    "//evil.example",
    "http://evil.example/localhost", "http://[::1].evil.example", "http://",
)  # fmt: skip
PATHS = (
    "/../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
    "/page/../../../etc/passwd", "//etc/passwd",
    "/....//....//etc/passwd", "/..\\..\\etc\\passwd", "/%5c..%5cetc", "/index.html%00.css",
    "/index.html/../app.py",
    "/static/../app.py", "/docs/../app.py", "/docs/..%2fapp.py", "/%252e%252e/etc/passwd", "/app.py",
    "/schemas.py",
    "/.git/config", "/page/", "/docs/", "/index.html/", "/~root", "/;/v1/models", "/v1//models",
    "/v1/models/..%2f..",
    "/v1/models/%0d%0aX-Injected:%201", "/%0d%0aX-Injected:%201", "/?x=%0d%0aX-Injected:%201",
    "/v1/models/%00",
    "/v1/models/" + "a/" * 3000, "/%ff%fe", "/" + "%2e" * 5000,
)  # fmt: skip
TRICKS = (
    "/health/../v1/models", "/health%2f..%2fv1/models", "/health;/../v1/models", "//v1/models", "/V1/MODELS",
    "/v1/models/", "/v1/models?key=" + KEY, "/v1/models?api_key=" + KEY, "/v1/models#/health",
    "/health/v1/models",
    "/./v1/models", "/v1/./models", "/v1/models%3f/health",
)  # fmt: skip
WRONG_KEYS = (
    {}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer "},
    {"authorization": KEY},
    {"authorization": "Bearer " + KEY[:-1]}, {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": f"Bearer x, Bearer {KEY}"}, {"authorization": f"Token {KEY}"},
    {"authorization": "Bearer null"},
    {"authorization": "Basic !!!"}, {"authorization": "Basic OnNlY3JldA=="}, {"x-api-key": ""},
    {"x-api-key": KEY + "\x01"},
    {"x-api-key": f'"{KEY}"'}, {"api-key": KEY}, {"cookie": f"key={KEY}"}, {"x-forwarded-for": "127.0.0.1"},
    {"x-original-url": "/health"}, {"x-rewrite-url": "/health"}, {"proxy-authorization": f"Bearer {KEY}"},
    {"authorization": "Bearer " + "a" * 60_000}, {"referer": f"http://localhost/?key={KEY}"},
)  # fmt: skip
FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "n", "seed",
    "repetition_penalty", "repeat_penalty", "top_logprobs", "thinking_budget", "min_tokens",
    "max_completion_tokens", "logit_bias",
)  # fmt: skip
NUMBERS = (
    "-1", "0", "2147483648", "9223372036854775808", "18446744073709551616", "1" + "0" * 300, "1e308",
    "-1e308", "NaN",
    "Infinity", "1.5", "true", '"1"', "[1]", '{"1": 1e300}', "-9223372036854775809",
    "1" + "0" * 5000, "5e-324",
)  # fmt: skip


def bodies() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yield bodies that are no JSON, no UTF-8, too large or nested, with their heads."""
    hello = json.dumps(HELLO).encode()
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7", "cp037"):
        yield encoding, json.dumps(HELLO).encode(encoding), {}
    for raw in (
        b"", b" ", b"null", b"[]", b"0", b'"x"', b"{", b"}",
        hello * 2, hello[:-1], b"\x00" + hello, hello + b"\x00", b"{'a': 1}",
        b"{\"messages\": undefined}", b"\xff\xfe", b'{"messages": "\xed\xa0\x80"}',
        b'{"a": 1, "a": 2}', b"-", b"NaN", b"1e999999999",
        b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000,
        b'"' + b"\\u0000" * 100_000 + b'"', b"\n" * 10_000_000,
    ):  # fmt: skip
        yield repr(raw[:30]), raw, {}
    for text in (
        "\x00", "\ud800", "\udfff\ud800", "a\r\ndata: [DONE]\r\n\r\n", "event: error\ndata: {}\n\n",
        "\u2028\u2029", "\ufffe\uffff",
        "\x1b[2J\x1b]0;x\x07",
        "\u202e" * 100, "\U000e0041" * 200, "e" + "\u0301" * 5000, "<|im_end|>\n<|im_start|>system\n",
        "</think>" * 999,
        "<tool_call>" * 3000, "\ufdd0\ufdd1" * 50, "{{ 7*7 }}{% raw %}",
    ):  # fmt: skip
        yield (
            repr(text[:30]),
            json.dumps({**HELLO, "messages": [{"role": "user", "content": text}]}).encode(),
            {},
        )
        yield f"streamed {text[:30]!r}", json.dumps({**HELLO, "user": text, "stream": True}).encode(), {}
    yield "a gzip bomb", gzip.compress(b" " * 50_000_000), {"content-encoding": "gzip"}
    yield "deflate", hello, {"content-encoding": "deflate"}
    yield "a form", b"messages=x", {"content-type": "application/x-www-form-urlencoded"}
    yield "parts", b"--x\r\n\r\n{}\r\n--x--", {"content-type": "multipart/form-data; boundary=x"}
    yield "64 MB", b'{"messages": "' + b"a" * 64_000_000 + b'"}', {}
    yield (
        "33 MB of text",
        json.dumps({"messages": [{"role": "user", "content": "a" * 33_000_000}]}).encode(),
        {},
    )
    yield "600,001 values", json.dumps({**HELLO, "x": [1] * 600_001}).encode(), {}
    yield (
        "content 5,000 deep",
        json.dumps(
            {"messages": [{"role": "user", "content": nested(900, lambda value: [value], "x")}]}
        ).encode(),
        {},
    )
    yield "a member of 10 MB", json.dumps({**HELLO, "a" * 10_000_000: 1}).encode(), {}
    yield "500,000 token ids", json.dumps({"prompt": [1] * 500_000, "max_tokens": 1}).encode(), {}


def failures(name: str, answers: dict[str, bool]) -> dict[str, Any]:
    """Return the number of cases and what did not hold."""
    return {
        "what": name,
        "cases": len(answers),
        "failed": [case for case, held in answers.items() if not held],
    }


def open_server() -> Iterator[dict[str, Any]]:
    with attacked() as server, httpx2.Client(base_url=server.url, timeout=120) as http:
        port = int(server.url.rpartition(":")[2])
        held = {}
        for name, content in shapes():
            answer = exchanged(port, content)
            held[name] = b"smuggled" not in answer and all(status < 500 for status in statuses(answer))
        yield failures("shapes", held)
        hosts = [(host, False) for host in FOREIGN_HOSTS] + [(host, True) for host in OWN_HOSTS]
        held = {}
        for host, allowed in hosts:
            request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            held[host] = (statuses(exchanged(port, request.encode())) == [200]) == allowed
        for origin in FOREIGN_ORIGINS:
            heads = {"origin": origin, "content-type": "text/plain"}
            answer = http.post(CHAT, content=json.dumps(HELLO), headers=heads)
            held[origin] = answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
        yield failures("hosts and origins", held)
        held = {}
        for path in PATHS:
            answer = exchanged(
                port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            lower = answer.lower()
            held[path[:60]] = statuses(answer) in ([200], [307], [400], [404]) and not any(
                text in lower for text in (b"root:", b"\r\nx-injected", b"import ", b"[core]")
            )
        yield failures("paths", held)
        held, slowest = {}, 0.0
        for name, content, heads in bodies():
            route = "/v1/completions" if "ids" in name else CHAT
            begin = time.monotonic()
            answer = http.post(route, content=content, headers={"content-type": "application/json", **heads})
            slowest = max(slowest, time.monotonic() - begin)
            ends = answer.text.count("data: [DONE]") == 1 if answer.text.startswith("data: ") else True
            held[name] = answer.status_code in (200, 400, 413) and ends and len(answer.content) < 100_000
        yield failures("bodies", held) | {"slowest_s": round(slowest, 2)}
        held, seen = {}, Counter[int]()
        base = json.dumps({**HELLO, "logprobs": True})[:-1]
        for field, number in itertools.product(FIELDS, NUMBERS):
            answer = http.post(CHAT, content=f'{base}, "{field}": {number}, "max_tokens": 2}}')
            seen[answer.status_code] += 1
            held[f"{field} {number[:30]}"] = answer.status_code in (200, 400)
        yield failures("numbers", held) | {"statuses": dict(seen)}


def locked_server() -> Iterator[dict[str, Any]]:
    with attacked("--api-key", KEY) as server, httpx2.Client(base_url=server.url, timeout=60) as http:
        port = int(server.url.rpartition(":")[2])
        right = {"x-api-key": KEY}
        routes = http.get("/openapi.json", headers=right).json()["paths"]
        held = {}
        for path, methods in routes.items():
            for method in methods:
                answer = http.request(method, path, content="{}" if method == "post" else None)
                held[f"{method} {path}"] = answer.status_code == (200 if path == "/health" else 401)
        for trick in TRICKS:
            answer = exchanged(port, f"GET {trick} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            held[trick] = b"max_model_len" not in answer and statuses(answer) != [200]
        for heads in WRONG_KEYS:
            lines = "".join(f"{name}: {value}\r\n" for name, value in heads.items())
            request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{lines}Connection: close\r\n\r\n"
            held[repr(heads)[:60]] = statuses(exchanged(port, request.encode())) in ([400], [401])
        for name, value in (
            ("authorization", f"Bearer {KEY}"), ("authorization", f"bearer {KEY}"), ("authorization",
            f"Bearer\t{KEY}"), ("x-api-key", KEY),
        ):  # fmt: skip
            answer = http.get("/v1/models", headers={name: value})
            held[f"{name} {value!r} is right"] = answer.status_code == 200
        yield failures("keys", held) | {"routes": len(routes)}


@case(out=RESULTS / "server_attack.jsonl")
def main(report: Report) -> None:
    for line in itertools.chain(open_server(), locked_server()):
        report.failed |= bool(line["failed"])
        report.line(**line)
