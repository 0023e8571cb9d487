"""Sends six bodies that take long to refuse and prints the worst latency of /health meanwhile.

    python -m workshop server_freeze

One server with the embedded pair, one request at a time, 127.0.0.1 only.
"""

import json
import threading
import time
from collections.abc import Callable

import httpx2

from workshop.case import case
from workshop.report import Report
from workshop.serving import serving

LIMIT_S = 0.5


def message(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def bodies(scale: float) -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Return path and body of each request; `scale` 1: all of them below 32 MiB."""

    def count(number: int) -> int:
        return max(1, int(number * scale))

    def encoded(value: dict) -> Callable[[], bytes]:
        return lambda: json.dumps(value, separators=(",", ":")).encode()

    text = "The quick brown fox, and so on. " * count(10_000_000 // 32)
    chat, hello = "/v1/chat/completions", message("Hello")
    biases = {str(i): 1.0 for i in range(count(500_000))}
    pairs = rb"\ud83d\ude00" * count(28 * 2**20 // 12)
    return {
        "15M integers in an unknown field": (chat, encoded(hello | {"x": [1] * count(15_000_000)})),
        "10 MB of text": (chat, encoded(message(text))),
        "10 MB of text, count_tokens": ("/v1/messages/count_tokens", encoded(message(text))),
        "a word of 5 MB, /tokenize": ("/tokenize", encoded({"content": "a" * count(5_000_000)})),
        "28 MiB of escaped pairs": (chat, lambda: encoded(message("@"))().replace(b"@", pairs)),
        "500k biases": (chat, encoded(hello | {"logit_bias": biases})),
        "200k messages": (chat, encoded({"messages": hello["messages"] * count(200_000)})),
    }


class Probe:
    """Asks for /health in a thread, over one connection after the other, and keeps the worst latency."""

    def __init__(self, url: str):
        self._url, self._end, self.worst_s = url, threading.Event(), 0.0
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        with httpx2.Client(base_url=self._url, timeout=120) as client:
            while not self._end.is_set():
                begin = time.perf_counter()
                client.get("/health").raise_for_status()
                self.worst_s = max(self.worst_s, time.perf_counter() - begin)
                time.sleep(0.005)

    def __enter__(self) -> "Probe":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()


def measure(url: str, path: str, body: bytes) -> tuple[int, float, float]:
    """Return the status, the seconds it took and the worst latency of /health in s."""
    with Probe(url) as probe, httpx2.Client(timeout=120) as client:
        begin = time.perf_counter()
        answer = client.post(url + path, content=body)
        took = time.perf_counter() - begin
        time.sleep(0.1)
    return answer.status_code, took, probe.worst_s


@case()
def main(report: Report, *, scale: float = 1.0) -> None:
    worst = 0.0
    with serving() as server:
        for name, (path, body) in bodies(scale).items():
            status, took, latency = measure(server.url, path, body())
            worst = max(worst, latency)
            print(f"{name:36} {status}  answered in {took:5.2f} s, worst /health {latency:.3f} s", flush=True)
    report.line(worst_health_s=round(worst, 3), limit_s=LIMIT_S)
