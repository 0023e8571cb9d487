"""Replicas on Ray: throughput against one, overhead against the plain server, cancellation, a killed replica.

    python -m workshop scale_out --out FILE [--clients 8] [--seconds 10] [--only overhead] -- ARGUMENTS

Starts `bough serve` with the arguments after `--`, plain and with replicas, each on its own port.
throughput: clients that ask one short prompt after the other, on two replicas, on one, on two, on one.
overhead: time to the first token and time per event of one stream, plain server and one replica in turns.
faults: seconds until a cancelled request is gone from its replica, 200 clients that vanish, and kill -9 of a
replica under load. One JSON line for each. Replicas have one CPU thread each, and so has the plain server.
"""

import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import httpx2
import ray
import torch

from workshop.case import case
from workshop.report import Report
from workshop.server_load import Stream, ask
from workshop.serving import Served, serving

TOKENS = 96
PROMPT = "Write a Python function that returns the {} of a list of numbers, number {}."
WORDS = ("sum", "mean", "median", "maximum", "minimum", "range", "product", "mode", "length", "reverse")
ENDLESS = {"ignore_eos": True, "bough": {"budget": 0}, "max_tokens": 1500, "temperature": 0}


def replicated(arguments: Sequence[str], replicas: int) -> contextlib.AbstractContextManager[Served]:
    """Run a server; replicas: 0 is the plain one."""
    number = ["--replicas", replicas] if replicas else []
    return serving(
        *("--threads", 1, *number, *arguments),
        ready=lambda health: len(health.get("replicas", ())) == replicas,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


async def throughput(url: str, clients: int, seconds: float) -> float:
    """Return the tokens a second of all clients in a window."""
    streams: list[Stream] = []
    begin = time.perf_counter() + 1.0
    end = begin + seconds

    async def one(number: int) -> None:
        asked = 0
        while time.perf_counter() < end:
            text = PROMPT.format(WORDS[(number + asked) % len(WORDS)], 100 * number + asked)
            streams.append(await ask(client, text, TOKENS))
            asked += 1

    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(one(number) for number in range(clients)))
    return sum(stream.tokens_within(begin, end) for stream in streams) / seconds


async def one_stream(url: str, number: int) -> tuple[float, float]:
    """Return the seconds to the first token, and those from it to the last for each event."""
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        body = {"messages": [{"role": "user", "content": PROMPT.format("sum", number)}], "stream": True}
        arrivals: list[float] = []
        sent = time.perf_counter()
        async with client.stream(
            "POST", "/v1/chat/completions", json=body | ENDLESS | {"max_tokens": 128}
        ) as answer:
            async for line in answer.aiter_lines():
                if '"content":"' in line:
                    arrivals.append(time.perf_counter())
    return arrivals[0] - sent, (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)


def overhead(plain: str, replicated: str, rounds: int) -> dict[str, Any]:
    """Return both servers' times, asked in turns, and the differences of their medians."""
    found: dict[str, list[tuple[float, float]]] = {plain: [], replicated: []}
    for number in range(-2, rounds):
        for url, times in found.items():
            measured = asyncio.run(one_stream(url, number))
            if number >= 0:
                times.append(measured)
    first, token = ({url: [each[i] for each in times] for url, times in found.items()} for i in (0, 1))
    median = statistics.median
    return {
        "rounds": rounds,
        "tokens": 128,
        "first_token_ms": {"plain": _ms(first[plain]), "replica": _ms(first[replicated])},
        "event_ms": {"plain": _ms(token[plain]), "replica": _ms(token[replicated])},
        "overhead_first_token_ms": round(1000 * (median(first[replicated]) - median(first[plain])), 2),
        "overhead_event_ms": round(1000 * (median(token[replicated]) - median(token[plain])), 3),
        "fastest_overhead_event_ms": round(1000 * (min(token[replicated]) - min(token[plain])), 3),
    }


def _ms(values: list[float]) -> dict[str, float]:
    return {
        name: round(1000 * of(values), 3)
        for name, of in (("median", statistics.median), ("min", min), ("max", max))
    }


async def cancellation(url: str, times: int) -> dict[str, Any]:
    """Return the seconds from a client's end to that of its request on the replica."""
    found = []
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        for number in range(times):
            body = _endless(number) | {"stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                while '"content":"' not in await anext(lines):
                    pass
            begin = time.perf_counter()
            while await _busy(client):
                pass
            found.append(time.perf_counter() - begin)
    return {"cancelled": times, "gone_ms": _ms(found)}


async def vanishing(url: str, clients: int) -> dict[str, Any]:
    """Return what is left of clients that leave within two seconds of their request."""

    async def one(number: int) -> object:
        async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
            try:
                async with asyncio.timeout(0.05 + number % 20 / 10):
                    body = _endless(number) | {"stream": bool(number % 3)}
                    return (await client.post("/v1/chat/completions", json=body)).status_code
            except TimeoutError:
                return "left"

    ends = Counter(await asyncio.gather(*(one(number) for number in range(clients))))
    begin = time.perf_counter()
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        while (busy := await _busy(client)) and time.perf_counter() - begin < 30:
            await asyncio.sleep(0.05)
    return {
        "clients": clients,
        "ends": {str(name): count for name, count in ends.items()},
        "requests_left": busy,
        "settled_ms": round(1000 * (time.perf_counter() - begin)),
    }


def _endless(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": PROMPT.format("story", number)}], **ENDLESS}


async def _busy(client: httpx2.AsyncClient) -> int:
    state = (await client.get("/health")).json()
    return sum(each["running"] + each["waiting"] for each in [state, *state["replicas"]])


async def killed(url: str, clients: int) -> dict[str, Any]:
    """Return how requests end when a replica is killed, and the seconds to the next one."""

    async def one(number: int) -> str:
        body = _endless(number) | {"stream": number % 4 != 3, "max_tokens": 400}
        if not body["stream"]:
            return f"whole answer, {(await client.post('/v1/chat/completions', json=body)).status_code}"
        last, begun = {}, False
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line[6:])
                    begun = begun or '"content":"' in line
        if "error" in last:
            return f"error {last['error']['code']} {'in the text' if begun else 'before the text'}"
        return f"stream, {last['choices'][0]['finish_reason']}"

    async with httpx2.AsyncClient(base_url=url, timeout=300) as client:
        tasks = [asyncio.create_task(one(number)) for number in range(clients)]
        running: list[dict[str, Any]] = []
        while not running:
            await asyncio.sleep(0.5)
            state = (await client.get("/health")).json()
            running = [each for each in state["replicas"] if each["running"] and each["waiting"]]
        os.kill(running[0]["pid"], signal.SIGKILL)
        begin = time.perf_counter()
        pids = {each["pid"] for each in state["replicas"]}
        while True:
            state = (await client.get("/health")).json()
            if any(each["pid"] not in pids for each in state["replicas"]):
                break
            await asyncio.sleep(0.1)
        replaced = time.perf_counter() - begin
        ends = Counter(await asyncio.gather(*tasks))
    return {"clients": clients, "ends": dict(ends), "new_replica_s": round(replaced, 1)}


def measure(
    serve: Sequence[str], only: str | None, clients: int, seconds: float, rounds: int
) -> Iterator[dict[str, Any]]:
    if only in (None, "throughput"):
        rates: dict[int, list[float]] = {1: [], 2: []}
        for replicas in (2, 1, 2, 1):
            with replicated(serve, replicas) as server:
                rates[replicas].append(asyncio.run(throughput(server.url, clients, seconds)))
        best = {replicas: max(values) for replicas, values in rates.items()}
        yield {
            "what": "throughput",
            "clients": clients,
            "tok_s": {str(count): [round(rate, 1) for rate in values] for count, values in rates.items()},
            "ratio": round(best[2] / best[1], 2),
        }
    if only in (None, "overhead"):
        with replicated(serve, 0) as plain, replicated(serve, 1) as one:
            yield {"what": "overhead"} | overhead(plain.url, one.url, rounds)
    if only in (None, "faults"):
        with replicated(serve, 2) as server:
            yield {"what": "cancellation"} | asyncio.run(cancellation(server.url, 10))
            yield {"what": "vanishing clients"} | asyncio.run(vanishing(server.url, 200))
            yield {"what": "kill -9"} | asyncio.run(killed(server.url, 12))


@case()
def main(
    report: Report,
    serve: Annotated[Sequence[str], "arguments of bough serve, after --"],
    *,
    clients: int = 8,
    seconds: Annotated[float, "of a window"] = 10,
    rounds: int = 12,
    only: Literal["throughput", "overhead", "faults"] | None = None,
    note: Annotated[str, "what else the machine did"] = "",
) -> None:
    about = report.head("date", "commit", "command") | {
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ray": ray.__version__,
        "note": note,
    }
    for line in measure(serve, only, clients, seconds, rounds):
        report.line(**about, **line)
