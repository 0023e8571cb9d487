"""An OpenAI-compatible server as what is benchmarked: timed from outside, by the same definitions.

Knows no suites. A server of ours also says what its steps were like, and decodes plainly when asked to.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx2 as httpx

from treeflash.bench.measure import Answer, Settings
from treeflash.bench.suites import Prompt
from treeflash.errors import TreeFlashError


class RemoteAnswerer:
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
        """`url` is the part before /chat/completions."""
        self._http, self._url, self._model, self._ours = http, url, model, ours
        self._settings, self._cancelled = settings, cancelled

    def forget(self) -> None:
        """What a server remembers is its own affair; the tokens that it says it remembered are reported."""

    def answer(
        self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], *, budget: int | None, temperature: float
    ) -> Answer:
        start = time.perf_counter()
        tally = _Tally(start)
        body = self._body(prompt, messages, budget, temperature)
        try:
            with self._http.stream("POST", f"{self._url}/chat/completions", json=body) as answer:
                if not answer.is_success:
                    answer.read()
                    raise TreeFlashError(f"{self._url} says {answer.status_code}: {answer.text[:300]}")
                for chunk in _chunks(answer):
                    tally.add(chunk, time.perf_counter())
                    if self._cancelled():
                        break
        except httpx.HTTPError as error:
            raise TreeFlashError(f"the connection to {self._url} broke off: {error}") from error
        return tally.answer(cancelled=self._cancelled())

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
            "max_tokens": self._settings.n_gen,
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
            body["treeflash"] = {"budget": budget}
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
            raise TreeFlashError(f"the server broke off: {error}")
        self._usage = chunk.get("usage") or self._usage
        self._stats = (chunk.get("treeflash") or {}).get("stats") or self._stats
        for choice in chunk.get("choices") or ():
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            spoken = delta.get("content")
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if spoken or thought or delta.get("tool_calls"):
                self._text += spoken or ""
                self._pieces += 1
                self._last = now
                self._first = self._first or now

    def answer(self, *, cancelled: bool) -> Answer:
        # A server that counts nothing is taken to send a token in each piece.
        tokens = self._usage.get("completion_tokens") or self._pieces
        seconds = self._last - self._first if self._first else 0.0
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
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


def _chunks(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in answer.iter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            yield json.loads(data)
        except ValueError as error:
            raise TreeFlashError(f"the server sent a piece that is not JSON: {data[:80]!r}") from error
