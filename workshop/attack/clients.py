"""What the other clients of a server see while it is attacked, and the memory that it takes."""

import contextlib
import resource
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2

from workshop.attack.bodies import CHAT
from workshop.serving import Served, serving

PLAIN = {
    "messages": [{"role": "user", "content": "Write a function that adds."}],
    "max_tokens": 8,
    "temperature": 0,
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
CALM_S = 15.0  # before and after an attack


@contextlib.contextmanager
def attacked(*arguments: object, descriptors: int = 0, **process: Any) -> Iterator[Served]:
    def limit() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    options = {"preexec_fn": limit, "stderr": subprocess.DEVNULL, **process}
    with serving(*arguments, **options) as server:
        yield server


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

    def summary(self, begin: float, end: float) -> dict[str, Any]:
        """Return the times of an attack's requests, those without it, and all errors."""
        during = [seconds for at, seconds in self.took if begin <= at < end]
        calm = [seconds for at, seconds in self.took if not begin <= at < end]
        return {"calm": _times(calm), "attacked": _times(during), "errors": dict(self.errors)}


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


def _times(took: list[float]) -> dict[str, float]:
    if not took:
        return {"count": 0}
    took = sorted(took)
    figures = {"median": statistics.median(took), "p95": took[int(0.95 * (len(took) - 1))], "worst": took[-1]}
    return {"count": len(took), **{name: round(seconds, 3) for name, seconds in figures.items()}}


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


def measured(server: Served, attack: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return what `attack` returns, and what other clients saw without it and meanwhile."""
    clients = {
        "chat": Client(server.url, PLAIN, 0.2),
        "schema": Client(server.url, PLAIN | FORMAT, 0.5),
        "health": Client(server.url, None, 0.05),
    }
    for client in clients.values():
        client.start()
    time.sleep(CALM_S)
    begin, memory = time.monotonic(), Memory(server.process.pid)
    memory.start()
    result = attack()
    end = time.monotonic()
    facts: dict[str, Any] = {"seconds": round(end - begin, 1), "memory_mb": memory.stop()}
    time.sleep(CALM_S)
    for name, client in clients.items():
        client.stop()
        facts[name] = client.summary(begin, end)
    return result, facts
