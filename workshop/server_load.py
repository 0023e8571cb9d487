"""Several users at once before the real server: tokens a second in all, first tokens, gaps, ends of streams.

    python -m workshop server_load --data DIR --out FILE [--users 1 2 4 8 16] [--seconds 8] -- ARGUMENTS

Starts `bough serve` with the arguments after `--`, in the environment of this program. Every user asks
one prompt after the other, code and maths in turns (or `--suites mtbench`), and reads the stream; what is
counted lies in a window of --seconds after a short start. `--long N`: four readers while a prompt of about N
tokens arrives. `--least N` leaves out prompts with short answers, which measure the reading of prompts as
much as decoding. One JSON line for each number of users.
"""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx2

from bough.bench.suites import load
from workshop.case import case
from workshop.report import Report
from workshop.serving import serving

START_S = 1.5  # before a window: every user has a text
SHORT = "Write a function that returns the {} of a list of numbers."
WORDS = ("sum", "mean", "median", "maximum", "minimum", "range", "product", "mode", "length", "reverse")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Options:
    data: Annotated[Path, "folder of the suites"]
    suites: Sequence[str] = ("humaneval", "gsm8k", "mbpp", "math500")
    users: Sequence[int] = (1, 2, 4, 8, 16)
    seconds: Annotated[float, "seconds that are counted"] = 8.0
    idle: Annotated[float, "seconds before; a GPU's steps are captured then"] = 0.0
    max_tokens: int = 256
    least: Annotated[int, "only prompts whose answers have so many tokens"] = 0
    short: Annotated[bool, "first tokens of short prompts, too"] = False
    chat: Annotated[Sequence[int], "users with mtbench, too"] = ()
    long: Annotated[int, "tokens of a long prompt"] = 0
    label: str = ""


@dataclass(slots=True)
class Stream:
    """One answer as its reader saw it; times of perf_counter."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # of pieces of text
    end: float = 0.0
    tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def last_gap_s(self) -> float:
        return self.end - self.arrivals[-1]

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the gaps between pieces of text that end within a time."""
        pairs = itertools.pairwise(self.arrivals)
        return [later - earlier for earlier, later in pairs if begin <= later <= end]

    def tokens_within(self, begin: float, end: float) -> float:
        """Return its share of tokens in a window, as if they came evenly."""
        if not self.arrivals or self.arrivals[-1] <= self.arrivals[0]:
            return self.tokens * float(begin <= self.end <= end)
        first, last = self.arrivals[0], self.arrivals[-1]
        return self.tokens * max(0.0, min(end, last) - max(begin, first)) / (last - first)


async def ask(client: httpx2.AsyncClient, text: str, max_tokens: int) -> Stream:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = Stream(time.perf_counter())
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                stream.tokens = event["usage"]["completion_tokens"]
            delta = event["choices"][0]["delta"] if event.get("choices") else {}
            if delta.get("content") or delta.get("reasoning_content"):
                stream.arrivals.append(time.perf_counter())
    stream.end = time.perf_counter()
    return stream


async def user(
    client: httpx2.AsyncClient,
    prompts: Iterator[str],
    goes_on: Callable[[], bool],
    streams: list[Stream],
    max_tokens: int,
) -> None:
    while goes_on():
        streams.append(await ask(client, next(prompts), max_tokens))


async def window(
    client: httpx2.AsyncClient, prompts: Iterator[str], users: int, seconds: float, max_tokens: int
) -> dict[str, Any]:
    """Return what `users` users get in a window of `seconds`."""
    begin = time.perf_counter() + START_S
    end, streams = begin + seconds, []

    def goes_on() -> bool:
        return time.perf_counter() < end

    await asyncio.gather(*(user(client, prompts, goes_on, streams, max_tokens) for _ in range(users)))
    tokens = sum(stream.tokens_within(begin, end) for stream in streams)
    gaps = sorted(gap for stream in streams for gap in stream.gaps(begin, end))
    firsts = [stream.first_s for stream in streams if stream.arrivals]
    return {
        "users": users,
        "tok_s": round(tokens / seconds, 1),
        "requests": len(streams),
        "first_token_ms": _summary(firsts),
        "gap_ms": _summary(gaps),
    }


async def short_prompts(client: httpx2.AsyncClient, max_tokens: int) -> dict[str, Any]:
    """Return first-token times of short prompts on an idle server, and from the last token to the end."""
    streams = [await ask(client, SHORT.format(word), max_tokens) for word in (*WORDS, *WORDS[:2])][2:]
    streams = [stream for stream in streams if stream.arrivals]
    return {
        "first_token_ms": _summary([stream.first_s for stream in streams]),
        "last_token_to_end_ms": _summary([stream.last_gap_s for stream in streams]),
    }


async def beside_a_long_prompt(
    client: httpx2.AsyncClient, prompts: Iterator[str], text: str, max_tokens: int
) -> dict[str, Any]:
    """Return the gaps of four readers before and while a long prompt is read."""
    streams, is_read = [], asyncio.Event()
    readers = [
        asyncio.create_task(user(client, prompts, lambda: not is_read.is_set(), streams, max_tokens))
        for _ in range(4)
    ]
    await asyncio.sleep(3)
    sent = time.perf_counter()
    long = await ask(client, text, 4)
    read = sent + long.first_s
    is_read.set()
    await asyncio.gather(*readers)
    before = [gap for stream in streams for gap in stream.gaps(sent - 2, sent)]
    during = [gap for stream in streams for gap in stream.gaps(sent, read)]
    tokens = {
        name: sum(stream.tokens_within(*span) for stream in streams) / (span[1] - span[0])
        for name, span in (("before", (sent - 2, sent)), ("during", (sent, read)))
    }
    return {
        "first_token_s": round(long.first_s, 3),
        "gap_before_ms": _summary(before),
        "gap_during_ms": _summary(during),
        "tok_s_before": round(tokens["before"], 1),
        "tok_s_during": round(tokens["during"], 1),
    }


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = {"median": statistics.median(seconds), "max": max(seconds), "min": min(seconds)}
    return {name: round(1000 * value, 2) for name, value in found.items()}


def prompts_of(data: Path, suites: Sequence[str]) -> list[str]:
    mixed = zip(*(load(suite, 60, data=data, offline=True) for suite in suites), strict=False)
    return [str(prompt.messages[-1]["content"]) for group in mixed for prompt in group]


async def with_long_answers(
    client: httpx2.AsyncClient, texts: Sequence[str], least: int, max_tokens: int
) -> list[str]:
    """Return the texts whose answers have at least `least` tokens."""
    room = asyncio.Semaphore(16)

    async def tokens(text: str) -> int:
        async with room:
            return (await ask(client, text, max_tokens)).tokens

    found = await asyncio.gather(*map(tokens, texts))
    return [text for text, count in zip(texts, found, strict=True) if count >= least]


async def measure(report: Report, url: str, options: Options, facts: dict[str, Any]) -> None:
    texts = prompts_of(options.data, options.suites)
    limits = httpx2.Limits(max_connections=256)
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        await ask(client, texts[0], 32)
        if options.least:
            texts = await with_long_answers(client, texts, options.least, options.max_tokens)
            facts |= {"answers_of": f"{options.least} to {options.max_tokens} tokens", "prompts": len(texts)}
            if not texts:
                raise SystemExit(f"no answer has {options.least} tokens")
        prompts = itertools.cycle(texts)
        if options.short:
            report.line(**facts | {"what": "short prompts", **await short_prompts(client, 24)})
        for users in options.users:
            # Whatever is captured or compiled for this number of users happens now.
            await window(client, prompts, users, 1.0, options.max_tokens)
            found = await window(client, prompts, users, options.seconds, options.max_tokens)
            report.line(**facts | {"what": "users", **found})
        for users in options.chat:
            talk = itertools.cycle(prompts_of(options.data, ["mtbench"]))
            await window(client, talk, users, 1.0, options.max_tokens)
            found = await window(client, talk, users, options.seconds, options.max_tokens)
            report.line(**facts | {"what": "chatting users", **found, "suites": ["mtbench"]})
        if options.long:
            filler = " ".join(texts)
            text = (filler * (4 * options.long // len(filler) + 1))[
                : 3 * options.long
            ] + "\nIn one word: what?"
            found = await beside_a_long_prompt(
                client, prompts, f"{text}\nIn one word: what?", options.max_tokens
            )
            report.line(**facts | {"what": "beside a long prompt", **found})


@case()
def main(
    report: Report, serve: Annotated[Sequence[str], "arguments of bough serve, after --"], options: Options
) -> None:
    with serving(*serve) as server:
        facts = {"label": options.label, "suites": options.suites, "ready_s": round(server.ready_s, 1)}
        time.sleep(options.idle)
        asyncio.run(measure(report, server.url, options, facts))
