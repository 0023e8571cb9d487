"""Benchmarking an OpenAI-compatible server, timed at the client with the same definitions.

A Bough server also reports its step statistics and supports plain decoding per request.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx2 as httpx

from bough.bench.measure import Measurement, Settings
from bough.bench.suites import Prompt
from bough.errors import BoughError


class RemoteEndpoint:
    def __init__(
        self,
        http: httpx.Client,
        url: str,
        *,
        model: str,
        ours: bool,
        settings: Settings,
        cancelled: Callable[[], bool],
    ):
        """Use the server at `url`, the address without /chat/completions."""
        self._http, self._url, self._model, self._ours = http, url, model, ours
        self._settings, self._cancelled = settings, cancelled

    def clear_cache(self) -> None:
        """Do nothing: a server's prefix cache cannot be cleared; its cached tokens are reported."""

    def generate(
        self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], *, budget: int | None, temperature: float
    ) -> Measurement:
        start = time.perf_counter()
        tally = _Tally(start)
        body = self._body(prompt, messages, budget, temperature)
        try:
            with self._http.stream("POST", f"{self._url}/chat/completions", json=body) as response:
                if not response.is_success:
                    response.read()
                    raise BoughError(f"{self._url} returned {response.status_code}: {response.text[:300]}")
                for chunk in _chunks(response):
                    tally.add(chunk, time.perf_counter())
                    if self._cancelled():
                        break
        except httpx.HTTPError as error:
            raise BoughError(f"the connection to {self._url} was lost: {error}") from error
        return tally.measurement(cancelled=self._cancelled())

    def _body(
        self,
        prompt: Prompt,
        messages: Sequence[Mapping[str, Any]],
        budget: int | None,
        temperature: float,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": self._settings.limit(prompt),
            "temperature": temperature,
            "seed": self._settings.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        if self._settings.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._settings.thinking}
        if self._ours:
            body["bough"] = {"budget": budget}
        return body


class _Tally:
    def __init__(self, start: float):
        self._start, self._first, self._last = start, 0.0, start
        self._text, self._pieces = "", 0
        self._finish = ""
        self._usage: Mapping[str, Any] = {}
        self._stats: Mapping[str, Any] = {}

    def add(self, chunk: Mapping[str, Any], now: float) -> None:
        if error := chunk.get("error"):
            raise BoughError(f"the server aborted the stream: {error}")
        self._usage = chunk.get("usage") or self._usage
        self._stats = (chunk.get("bough") or {}).get("stats") or self._stats
        for choice in chunk.get("choices") or ():
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            content = delta.get("content")
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if content or reasoning or delta.get("tool_calls"):
                self._text += content or ""
                self._pieces += 1
                self._last = now
                self._first = self._first or now

    def measurement(self, *, cancelled: bool) -> Measurement:
        # Without usage numbers, assume one token per delta.
        tokens = self._usage.get("completion_tokens") or self._pieces
        seconds = self._last - self._first if self._first else 0.0
        details = self._usage.get("prompt_tokens_details") or {}
        return Measurement(
            text=self._text,
            finish="cancelled" if cancelled else self._finish or "cut off",
            tokens=tokens,
            prompt_tokens=self._usage.get("prompt_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
            ttft_s=self._first - self._start if self._first else 0.0,
            tok_s=(tokens - 1) / seconds if seconds > 0 else 0.0,
            acceptance_length=self._stats.get("acceptance_length"),
            steps=self._stats.get("steps"),
            rows_per_step=self._stats.get("rows_per_step"),
        )


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            yield json.loads(data)
        except ValueError as error:
            raise BoughError(f"the server sent an event that is not JSON: {data[:80]!r}") from error
