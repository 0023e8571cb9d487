"""A chat backend that talks to an OpenAI-compatible server. Imports no torch."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from bough.cli.chat.backend import Event, ReplyEnd
from bough.cli.chat.conversation import ChatSettings
from bough.errors import UsageError
from bough.images.parts import with_data_urls
from bough.session.remote import OURS, RemoteEnd, RemoteSession, ServerFailed


class RemoteBackend:
    breakable = True

    def __init__(self, session: RemoteSession):
        self.name, self._session = session.name, session

    @property
    def about(self) -> str:
        context = self._session.context
        return f"{f'context {context:,} tokens · ' if context else ''}{self._session.url}"

    @property
    def sees(self) -> bool:
        return self._session.sees is not False

    def check(self, settings: ChatSettings) -> None:
        if settings.draft_budget is not None and not self._session.ours:
            raise UsageError("/draft needs a Bough server; this one decides by itself")

    def defaults(self, settings: ChatSettings) -> Mapping[str, float]:
        return {}

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: ChatSettings,
        *,
        seed: int,
        cancelled: Callable[[], bool],
    ) -> Generator[Event]:
        body = self._body(messages, settings, seed)
        for event in self._session.generate(body, cancelled=cancelled):
            if not isinstance(event, RemoteEnd):
                yield event
                continue
            if not event.reason and not cancelled():
                host = urlsplit(self._session.url).netloc
                raise ServerFailed(f"{host} ended the reply without saying why")
            yield _ended(event, self.name)

    def _body(
        self, messages: Sequence[Mapping[str, Any]], settings: ChatSettings, seed: int
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": with_data_urls(messages), **settings.values}
        if self._session.ours:
            body |= {"seed": seed, OURS: {"budget": settings.draft_budget}}
        if settings.stop:
            body["stop"] = settings.stop
        if settings.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
        if settings.thinking_budget is not None:
            body["thinking_budget"] = settings.thinking_budget
        if settings.effort is not None:
            body["reasoning_effort"] = settings.effort
        return body


def _ended(end: RemoteEnd, model: str) -> ReplyEnd:
    reason, tokens, prompt = end.reason or "cancelled", end.tokens, end.usage.get("prompt_tokens")
    speed = end.stats.get("tok_s") or end.tok_s(tokens)
    accepted = end.stats.get("acceptance_length")
    parts = [
        f"{tokens:,} tok" if tokens is not None else "",
        f"{speed:.1f} tok/s" if speed else "",
        f"TTFT {end.ttft_s:.2f} s" if end.ttft_s is not None else "",
        f"prompt {prompt:,}" + (f" ({end.cached_tokens:,} cached)" if end.cached_tokens else "")
        if prompt
        else "",
        f"accept {accepted:.2f}/step" if accepted else "",
        {"length": "length limit", "cancelled": "interrupted"}.get(reason, ""),
    ]
    details = {"model": model, "finish_reason": reason, "ttft_s": end.ttft_s, "tok_s": speed}
    return ReplyEnd(" · ".join(filter(None, parts)), details | dict(end.usage) | dict(end.stats), speed)
