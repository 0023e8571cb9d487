"""Attacks a server and measures what its other clients see.

    python -m benchmarks.server_attack [--parts requests abandoned deaf templates] [--out FILE]

requests: every request of `attacks.py`, four at a time. abandoned: clients that send slow grammars
and leave. deaf: connections that send and never read, with 256 descriptors. templates: the chat templates of
`attacks.py`. The server is `bough serve` with the embedded pair on 127.0.0.1; one JSON line at the end.
"""

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
from benchmarks.server_freeze import wait

from benchmarks.attacks import CHAT, HELLO, Attack, attacks, grammars, templates
from bough.errors import TemplateFailed
from bough.text.template import ChatTemplate

PLAIN = {
    "messages": [{"role": "user", "content": "Write a function that adds."}],
    "max_tokens": 8,
    "temperature": 0,
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
CALM_S = 15.0


@contextlib.contextmanager
def serving(*arguments: str, descriptors: int = 0) -> Generator[tuple[str, int]]:
    """Yield address and process id of a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def limit() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    command = [sys.executable, "-m", "bough.cli.main", "serve", "--port", str(port), *arguments]
    server = subprocess.Popen(command, preexec_fn=limit, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait(url)
        yield url, server.pid
        if server.poll() is not None:
            raise SystemExit(f"the server has died with {server.returncode}")
    finally:
        server.terminate()
        server.wait(60)


class Client(threading.Thread):
    """Sends one request after the other until it is stopped; keeps how long each took."""

    def __init__(self, url: str, body: dict[str, Any] | None, pause_s: float):
        super().__init__(daemon=True)
        self._url, self._body, self._pause_s = url, body, pause_s
        self._end = threading.Event()
        self.took: list[tuple[float, float]] = []  # when it began, seconds
        self.errors: Counter[str] = Counter()

    def run(self) -> None:
        with httpx2.Client(base_url=self._url, timeout=120) as http:
            while not self._end.wait(self._pause_s):
                begin = time.monotonic()
                try:
                    answer = http.get("/health") if self._body is None else http.post(CHAT, json=self._body)
                    if answer.status_code != 200:
                        self.errors[str(answer.status_code)] += 1
                except httpx2.TransportError as error:
                    self.errors[type(error).__name__] += 1
                self.took.append((begin, time.monotonic() - begin))

    def stop(self) -> None:
        self._end.set()
        self.join()

    def summary(self, begin: float, end: float) -> dict[str, float]:
        took = sorted(seconds for at, seconds in self.took if begin <= at < end)
        if not took:
            return {"count": 0}
        median, p95 = statistics.median(took), took[int(0.95 * (len(took) - 1))]
        return {
            "count": len(took),
            "median": round(median, 3),
            "p95": round(p95, 3),
            "worst": round(took[-1], 3),
        }


class Memory(threading.Thread):
    """Watches the memory of a process and of its children."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self._pid, self._end = pid, threading.Event()
        self.first = resident(pid)
        self.own = self.children = 0

    def run(self) -> None:
        while not self._end.wait(0.1):
            self.own = max(self.own, resident(self._pid))
            self.children = max(self.children, sum(map(resident, children(self._pid))))

    def stop(self) -> dict[str, int]:
        self._end.set()
        self.join()
        return {"first": self.first, "most": self.own, "last": resident(self._pid), "children": self.children}


def resident(pid: int) -> int:
    """Return the megabytes of memory of a process."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20
    return 0


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def send(url: str, attack: Attack) -> tuple[int | str, float, int]:
    """Return the status of an attack, how long it took, and the size of the answer."""
    path, make = attack
    content = json.dumps(make()).encode()
    begin = time.monotonic()
    try:
        answer = httpx2.post(url + path, content=content, timeout=120)
    except httpx2.TransportError as error:
        return type(error).__name__, time.monotonic() - begin, 0
    return answer.status_code, time.monotonic() - begin, len(answer.content)


def measured(url: str, pid: int, attack: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return what `attack` returns, and what other clients saw before and meanwhile."""
    clients = {
        "chat": Client(url, PLAIN, 0.2),
        "schema": Client(url, PLAIN | FORMAT, 0.5),
        "health": Client(url, None, 0.05),
    }
    for client in clients.values():
        client.start()
    begin = time.monotonic()
    time.sleep(CALM_S)
    calm, memory = time.monotonic(), Memory(pid)
    memory.start()
    result = attack()
    end = time.monotonic()
    for client in clients.values():
        client.stop()
    seen: dict[str, Any] = {"seconds": round(end - calm, 1), "memory_mb": memory.stop()}
    for name, client in clients.items():
        during = client.summary(calm, end)
        seen[name] = {"calm": client.summary(begin, calm), "attacked": during, "errors": dict(client.errors)}
    return result, seen


def requests() -> dict[str, Any]:
    with serving("--parallel", "4") as (url, pid):
        pending = attacks()

        def attack() -> list[tuple[int | str, float, int]]:
            with ThreadPoolExecutor(4) as threads:
                return list(threads.map(lambda each: send(url, each), pending.values()))

        found, seen = measured(url, pid, attack)
    for name, (status, took, size) in zip(pending, found, strict=True):
        print(f"{status:>8} {took:6.2f} s {size:8} B  {name}", flush=True)
    statuses = Counter(str(status) for status, _, _ in found)
    return seen | {"statuses": dict(statuses), "slowest_s": round(max(took for _, took, _ in found), 2)}


def abandoned(count: int = 8) -> dict[str, Any]:
    """Let clients send what takes long to compile, and leave after 1.5 s."""
    heavy = ["3,900 rules side by side", "2^60 by doubling", "lark, 200 expressions that explode", "10 MB"]
    bodies = [
        json.dumps(HELLO | {"grammar": grammars()[name]() + f"\n# {i}"}) for i in range(2) for name in heavy
    ]

    def leave(url: str, body: str) -> None:
        with contextlib.suppress(httpx2.TimeoutException):
            httpx2.post(url + CHAT, content=body, timeout=1.5)

    with serving("--parallel", "4") as (url, pid):

        def attack() -> None:
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(lambda body: leave(url, body), bodies))
            time.sleep(5)

        _, seen = measured(url, pid, attack)
        begin = time.monotonic()
        httpx2.post(f"{url}/tokenize", json={"content": "x"}, timeout=60).raise_for_status()
        seen["tokenize_s"] = round(time.monotonic() - begin, 3)
        seen["checking_at_the_end"] = httpx2.get(f"{url}/health").json()["checking"]
    return seen


def deaf(count: int = 250, seconds: float = 45.0) -> dict[str, Any]:
    """Open connections that send without end and never read, and ask for /health all the time."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    with serving("--api-key", "key", descriptors=256) as (url, _), contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])

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
                answer = httpx2.get(f"{url}/v1/models", headers={"x-api-key": "key"}, timeout=20)
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


PARTS = {"requests": requests, "abandoned": abandoned, "deaf": deaf, "templates": rendered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    line = {"load": os.getloadavg()[0], **{name: PARTS[name]() for name in options.parts}}
    print(json.dumps(line))
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
