"""Many clients at once through the real server: all answered, the right text, nothing left behind."""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import pytest

from bough.config import ServerConfig
from bough.memory.planner import MemoryPlan, plan_memory
from bough.session import loading
from bough.session.session import Session
from tests.server.live import Live, live
from tests.session.test_many import nothing_left, session

CLIENTS = 64
HOLDS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Return a server whose pool holds six of the requests below."""

    def small(*args) -> MemoryPlan:
        return replace(plan_memory(*args), kv_tokens=HOLDS * 128, max_ctx=HOLDS * 128)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "plan_memory", small)
        made = session(16, prefix_cache=1 << 28)
    with live(lambda _progress: made, ServerConfig(max_queue=CLIENTS)) as running:
        yield running


def body(index: int, *, stream: bool) -> dict:
    sampled = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
    text = f"Add {index} and {index * 7}. " + "Say it again. " * (index % 5)
    limits = {"max_tokens": 4 + index % 13, "n": 1 + index % 3 // 2}
    return {"messages": [{"role": "user", "content": text}], "stream": stream, **sampled, **limits}


def texts_of(response: httpx2.Response, *, stream: bool) -> list[str]:
    assert response.status_code == 200, response.text
    if not stream:
        return [choice["message"]["content"] or "" for choice in response.json()["choices"]]
    assert response.text.rstrip().endswith("data: [DONE]")
    found: dict[int, str] = {}
    for line in re.findall(r"^data: (\{.*)$", response.text, re.MULTILINE):
        for choice in json.loads(line)["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return [found[index] for index in sorted(found)]


def test_64_clients_on_a_pool_that_holds_6(server: Live) -> None:
    made = server.session
    assert isinstance(made, Session)
    with httpx2.Client(base_url=server.url, timeout=120) as http:
        path = "/v1/chat/completions"

        def answer(index: int) -> list[str]:
            stream = bool(index % 3)
            return texts_of(http.post(path, json=body(index, stream=stream)), stream=stream)

        alone = [answer(index) for index in range(CLIENTS)]
        made.engine.prefixes.clear()
        order = random.Random(1).sample(range(CLIENTS), CLIENTS)
        with ThreadPoolExecutor(CLIENTS) as threads:
            found = dict(zip(order, threads.map(answer, order), strict=True))
        assert [found[index] for index in range(CLIENTS)] == alone
        server.settle()
        health = http.get("/health").json()
        assert (health["running"], health["waiting"], health["parallel"]) == (0, 0, 16)
        metrics = http.get("/metrics").text
        assert "bough:num_requests_running 0.0" in metrics
        assert "bough:num_requests_waiting 0.0" in metrics
    made.engine.prefixes.clear()
    assert nothing_left(made.engine)


def test_clients_that_leave_free_their_pages(server: Live) -> None:
    made = server.session
    assert isinstance(made, Session)
    with httpx2.Client(base_url=server.url, timeout=60) as http:

        def leave(index: int) -> None:
            request = body(index, stream=True) | {"max_tokens": 300}
            with http.stream("POST", "/v1/chat/completions", json=request) as response:
                next(response.iter_lines())

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(leave, range(16)))
    server.settle(20)
    made.engine.prefixes.clear()
    assert nothing_left(made.engine)


def test_the_stream_ends_before_snapshots_are_taken(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    made = server.session
    assert isinstance(made, Session)
    insert, saved = made.engine.prefixes.insert, threading.Event()

    def slow(slot: int, tokens: list[int], kind: str, *args, **options) -> None:
        if kind == "answer":
            time.sleep(0.5)
            saved.set()
        insert(slot, tokens, kind, *args, **options)  # ty: ignore[invalid-argument-type]

    monkeypatch.setattr(made.engine.prefixes, "insert", slow)
    request = body(3, stream=True)
    with (
        httpx2.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=request) as response,
    ):
        arrivals = [(line, time.monotonic()) for line in response.iter_lines() if line]
        assert not saved.is_set()
    assert arrivals[-1][0] == "data: [DONE]"
    last = max(at for line, at in arrivals if '"content":' in line)
    assert arrivals[-1][1] - last < 0.3
    assert saved.wait(5)
    server.settle()
