"""Attacks a server and measures what its other clients see.

    python -m workshop attack.bombs [--parts requests abandoned deaf templates] [--together 4]

requests: every request of `bodies.py`, some at a time. abandoned: clients that send slow grammars and leave.
deaf: connections that send and never read, with 256 descriptors, and with 100 and no key. templates: the chat
templates of `templates.py`, in this process. The server is `bough serve` with the embedded pair on 127.0.0.1.
"""

import contextlib
import json
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2

from bough.errors import TemplateFailed
from bough.text.template import ChatTemplate
from workshop.attack.bodies import CHAT, HELLO, attacks, encoded, grammars
from workshop.attack.clients import attacked, measured
from workshop.attack.templates import templates
from workshop.case import RESULTS, case
from workshop.report import Report


def send(url: str, path: str, content: bytes) -> tuple[int | str, float, int]:
    """Return the status of an attack, how long it took, and the size of the answer."""
    begin = time.monotonic()
    try:
        answer = httpx2.post(url + path, content=content, timeout=120)
    except httpx2.TransportError as error:
        return type(error).__name__, time.monotonic() - begin, 0
    return answer.status_code, time.monotonic() - begin, len(answer.content)


def requests(together: int = 4) -> dict[str, Any]:
    with attacked("--parallel", 4) as server, ThreadPoolExecutor(together) as threads:
        # Written before: that must not take time from the clients, which are measured in this process.
        pending = {name: (path, encoded(make())) for name, (path, make) in attacks().items()}
        outcomes, facts = measured(
            server, lambda: list(threads.map(lambda attack: send(server.url, *attack), pending.values()))
        )
    for name, (status, took, size) in zip(pending, outcomes, strict=True):
        print(f"{status:>8} {took:6.2f} s {size:8} B  {name}", flush=True)
    statuses = Counter(str(status) for status, _, _ in outcomes)
    largest = max(size for _, _, size in outcomes)
    slowest = round(max(took for _, took, _ in outcomes), 2)
    return facts | {"statuses": dict(statuses), "slowest_s": slowest, "largest_answer": largest}


def abandoned(count: int = 8) -> dict[str, Any]:
    """Let clients send what takes long to compile, and leave after 1.5 s."""
    heavy = ["3,900 rules side by side", "2^60 by doubling", "lark, 200 expressions that explode", "10 MB"]
    bodies = [
        json.dumps(HELLO | {"grammar": grammars()[name]() + f"\n# {i}"}) for i in range(2) for name in heavy
    ]

    def leave(url: str, body: str) -> None:
        with contextlib.suppress(httpx2.TimeoutException):
            httpx2.post(url + CHAT, content=body, timeout=1.5)

    with attacked("--parallel", 4) as server:

        def attack() -> None:
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(lambda body: leave(server.url, body), bodies))
            time.sleep(5)

        _, facts = measured(server, attack)
        begin = time.monotonic()
        httpx2.post(f"{server.url}/tokenize", json={"content": "x"}, timeout=60).raise_for_status()
        facts["tokenize_s"] = round(time.monotonic() - begin, 3)
        facts["checking_at_the_end"] = httpx2.get(f"{server.url}/health").json()["checking"]
    return facts


def deaf(
    *options: str, count: int = 250, descriptors: int = 256, path: str = "/v1/models", seconds: float = 45.0
) -> dict[str, Any]:
    """Open connections that send without end and never read, and ask for a path all the time."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    with attacked(*options, descriptors=descriptors) as server, contextlib.ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])

        def connected() -> socket.socket | None:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            try:
                client.connect(("127.0.0.1", port))
            except OSError:
                return None
            client.setblocking(False)
            return client

        clients = [client for _ in range(count) if (client := connected()) is not None]
        statuses: Counter[str] = Counter()
        worst, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            for client in clients:
                with contextlib.suppress(OSError):
                    client.send(request)
            begin = time.monotonic()
            try:
                answer = httpx2.get(server.url + path, headers={"x-api-key": "key"}, timeout=20)
                statuses[str(answer.status_code)] += 1
            except httpx2.TransportError as error:
                statuses[type(error).__name__] += 1
            worst = max(worst, time.monotonic() - begin)
            time.sleep(0.2)
    return {"connections": len(clients), "answers": dict(statuses), "worst_s": round(worst, 2)}


def rendered() -> dict[str, Any]:
    """Render every template in this process."""
    slowest, over, count = 0.0, [], 0
    for count, source in enumerate(templates(), 1):  # noqa: B007
        begin, outcome = time.process_time(), "rendered"
        try:
            ChatTemplate(source).render(HELLO["messages"])
        except TemplateFailed as error:
            outcome = error.message
        took = time.process_time() - begin
        slowest = max(slowest, took)
        if took > 1:
            over.append(f"{took:.1f} s: {source[:60]}: {outcome[:80]}")
            print(over[-1], flush=True)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"templates": count, "slowest_cpu_s": round(slowest, 2), "over_1_s": len(over), "peak_mb": most}


PARTS = {
    "requests": requests,
    "abandoned": abandoned,
    "deaf": partial(deaf, "--api-key", "key"),
    "deaf without keys": partial(deaf, count=40, descriptors=100, path="/health"),
    "templates": rendered,
}


@case(out=RESULTS / "server_attack.jsonl")
def main(report: Report, *, parts: Sequence[str] = tuple(PARTS), together: int = 4) -> None:
    """`together`: requests at a time."""
    functions = PARTS | {"requests": partial(requests, together)}
    for name in parts:
        report.line(what=name, load=round(os.getloadavg()[0], 1), **functions[name]())
