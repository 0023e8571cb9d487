"""64 clients with twelve kinds of requests, a third of which leave: are all other texts those of one client?

    python -m workshop attack.crowd [--duration 300] [--clients 64]

Every request is sent alone first. Then each client sends one after the other, in random order; a text that
comes to its end is compared. At the end the server has the descriptors, threads, slots and pages of the
beginning. The server is `bough serve` with the embedded pair on 127.0.0.1.
"""

import contextlib
import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from workshop.attack.clients import FORMAT, Client, Memory, attacked
from workshop.case import RESULTS, case
from workshop.report import Report
from workshop.serving import Served

CHAT = "/v1/chat/completions"
POOLS = 21  # threads that check requests; they stay
WORDS = ("adds", "sorts a list", "counts words", "reverses a text", "finds primes", "writes a file")
TOOL = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
_VOLATILE = """
id created created_at usage timings system_fingerprint completed_at item_id call_id bough total_duration
load_duration prompt_eval_duration eval_duration prompt_eval_count obfuscation response sequence_number
"""
VOLATILE = set(_VOLATILE.split())


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of six requests of each kind."""
    pairs = []
    for index, word in enumerate(WORDS):
        text = f"Write a function that {word}." + " It is short." * (index % 4)
        turn = [{"role": "user", "content": text}]
        short, warm = {"max_tokens": 8 + 7 * index}, {"temperature": 0.9, "seed": index}
        chat = {"messages": turn, **short}
        tools = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
        long = [{"role": "user", "content": "Some text to be read first. " * 60 + text}]
        pairs += [
            (CHAT, chat | {"temperature": 0, "stream": True}),
            (CHAT, chat | warm | {"stream": True}),
            (CHAT, chat | warm | {"n": 2}),
            (CHAT, chat | warm | FORMAT),
            (CHAT, chat | warm | {"tools": tools, "tool_choice": "required", "stream": True}),
            (CHAT, chat | warm | {"guided_regex": "(yes|no)( [a-z]{1,8}){1,9}"}),
            (CHAT, chat | {"temperature": 0, "logprobs": True, "top_logprobs": 2}),
            (CHAT, chat | warm | {"repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 9}),
            ("/v1/completions", {"prompt": f"def {word.split()[0]}(", **short, **warm}),
            ("/v1/responses", {"input": text, "max_output_tokens": 40, "temperature": 0, "stream": True}),
            ("/v1/messages", {"messages": turn, **short, "temperature": 0, "stream": True}),
            ("/api/chat", {"messages": long, "options": {"num_predict": 30, **warm}, "stream": True}),
        ]
    return pairs


def cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: cleaned(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [cleaned(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def pieces(value: Any, name: str = "") -> str:
    """Return all strings of an event's text."""
    if isinstance(value, dict):
        return "".join(pieces(inner, key) for key, inner in value.items())
    if isinstance(value, list):
        return "".join(pieces(inner, name) for inner in value)
    is_text = name in (
        "content",
        "delta",
        "text",
        "partial_json",
        "arguments",
        "reasoning_content",
        "thinking",
    )
    return value if isinstance(value, str) and is_text else ""


def text_of(body: dict[str, Any], answer: httpx2.Response) -> str:
    """Return what an answer says; an error where it does not come to its end."""
    if not body.get("stream"):
        return json.dumps(cleaned(answer.json()))
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    if not any(
        end in answer.text
        for end in ("[DONE]", "message_stop", '"done":true', "response.completed", "response.incomplete")
    ):
        raise ValueError(f"no end: {answer.text[-200:]}")
    return "".join(
        pieces(event) for event in events if not str(event.get("type", "")).endswith((".done", "completed"))
    )


class Crowd:
    def __init__(self, server: Served, seed: int = 1):
        self._server, self._pairs, self._seed = server, requests(), seed
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        with httpx2.Client(base_url=server.url, timeout=300) as http:
            self._alone = [self._sent(http, index) for index in range(len(self._pairs))]

    def _sent(self, http: httpx2.Client, index: int) -> str:
        path, body = self._pairs[index]
        answer = http.post(path, json=body)
        answer.raise_for_status()
        return text_of(body, answer)

    def run(self, clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(clients) as threads:
            list(threads.map(lambda client: self._client(client, end), range(clients)))

    def _client(self, number: int, end: float) -> None:
        choose = random.Random(f"{self._seed} {number}")
        with httpx2.Client(base_url=self._server.url, timeout=300) as http:
            while time.monotonic() < end:
                index, leaves = choose.randrange(len(self._pairs)), choose.random() < 1 / 3
                try:
                    if leaves:
                        self._leave(http, index, choose.random())
                    else:
                        equal = self._sent(http, index) == self._alone[index]
                        self.counts["equal" if equal else "different"] += 1
                        if not equal:
                            self.wrong.append(f"{self._pairs[index][0]} {index}")
                except (httpx2.HTTPError, ValueError) as error:
                    self.counts[f"{type(error).__name__}"] += 1
                    self.wrong.append(f"{index}: {error}"[:200])

    def _leave(self, http: httpx2.Client, index: int, part: float) -> None:
        """Close the connection before the answer, or in it."""
        path, body = self._pairs[index]
        self.counts["left"] += 1
        stream = http.stream("POST", path, json=body, timeout=0.2 + 3 * part)
        with contextlib.suppress(httpx2.TimeoutException), stream as answer:
            for _, _ in zip(answer.iter_lines(), range(int(9 * part)), strict=False):
                pass


def holdings(server: Served) -> dict[str, Any]:
    """Return what the server holds."""
    process = Path("/proc", str(server.process.pid))
    health, props = (httpx2.get(server.url + path).json() for path in ("/health", "/props"))
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        **{name: health[name] for name in ("running", "waiting", "checking")},
        **props["free"],
    }


@case(out=RESULTS / "server_attack.jsonl")
def main(report: Report, *, duration: float = 300.0, clients: int = 64, prefix_cache: str = "256m") -> None:
    with attacked("--parallel", 8, "--max-queue", 200, "--prefix-cache", prefix_cache) as server:
        crowd = Crowd(server)
        crowd.run(clients, 10.0)  # all threads are there then
        time.sleep(5)
        before = holdings(server)
        crowd.counts.clear()
        health, memory = Client(server.url, None, 0.2), Memory(server.process.pid)
        health.start(), memory.start()
        begin = time.monotonic()
        crowd.run(clients, duration)
        end = time.monotonic()
        health.stop()
        time.sleep(20)  # idle connections are closed by then
        after = holdings(server)
    same = all(after[name] == before[name] for name in before if name not in ("threads", "pages", "of_pages"))
    back = after["pages"] == after["of_pages"] if prefix_cache == "0" else after["pages"] >= before["pages"]
    good = not crowd.wrong and same and back and after["threads"] <= before["threads"] + POOLS
    report.failed |= not good
    facts = {"counts": dict(crowd.counts), "wrong": crowd.wrong[:20], "before": before, "after": after}
    times = health.summary(begin, end)["attacked"]
    report.line(
        what="crowd",
        seconds=round(end - begin),
        clients=clients,
        **facts,
        health=times,
        memory_mb=memory.stop(),
    )
