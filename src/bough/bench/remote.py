"""Benchmarking an OpenAI-compatible server, timed at the client with the same definitions.

A Bough server also reports its step statistics and supports plain decoding per request.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bough.bench.measure import BenchSettings, Measurement
from bough.bench.suites import SuitePrompt
from bough.session.events import Text
from bough.session.remote import OURS, RemoteEnd, RemoteSession


class RemoteEndpoint:
    def __init__(self, session: RemoteSession, settings: BenchSettings, cancelled: Callable[[], bool]):
        self._session, self._settings, self._cancelled = session, settings, cancelled

    def clear_cache(self) -> None:
        """Do nothing: a server's prefix cache cannot be cleared; its cached tokens are reported."""

    def generate(
        self,
        prompt: SuitePrompt,
        messages: Sequence[Mapping[str, Any]],
        *,
        budget: int | None,
        temperature: float,
    ) -> Measurement:
        settings, text, end = self._settings, "", RemoteEnd()
        body: dict[str, Any] = {
            "messages": list(messages),
            "max_tokens": settings.limit(prompt),
            "temperature": temperature,
            "seed": settings.seed,
        }
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        if settings.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
        if self._session.ours:
            body[OURS] = {"budget": budget}
        for event in self._session.generate(body, cancelled=self._cancelled):
            text += event.text if isinstance(event, Text) else ""
            end = event if isinstance(event, RemoteEnd) else end
        tokens = end.tokens or end.pieces  # without usage numbers, assume one token per delta
        return Measurement(
            text=text,
            finish="cancelled" if self._cancelled() else end.reason or "cut off",
            tokens=tokens,
            prompt_tokens=end.usage.get("prompt_tokens") or 0,
            cached_tokens=end.cached_tokens,
            ttft_s=end.ttft_s or 0.0,
            tok_s=end.tok_s(tokens),
            acceptance_length=end.stats.get("acceptance_length"),
            steps=end.stats.get("steps"),
            rows_per_step=end.stats.get("rows_per_step"),
        )
