"""A chat backend that talks to an OpenAI-compatible server. Imports no torch."""

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from bough.cli.chat.backend import Event, ReasoningDelta, ReplyEnd, TextDelta
from bough.cli.chat.conversation import Settings
from bough.errors import BoughError, UsageError

CONNECT_S = 5.0
SILENCE_S = 600.0  # servers that send no comments are silent while they prefill a long prompt
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OURS = "bough"


class ServerFailed(BoughError):
    """The server cannot be reached, is not compatible, or refuses the request."""


class Unreachable(ServerFailed):
    """No server listens at the address."""


def address(url: str) -> str:
    """Return the URL up to /chat/completions; a bare host gets /v1."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment:
        raise UsageError(f"--url is {url!r}; needs an address like http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def client(url: str, key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
    # A server on this machine needs no proxy.
    trusted = urlsplit(url).hostname not in LOOPBACK
    return httpx.Client(headers=headers, timeout=timeout, trust_env=trusted)


@contextlib.contextmanager
def failures(url: str) -> Generator[None]:
    """Raise ServerFailed for errors of the connection."""
    host = urlsplit(url).netloc
    try:
        yield
    except httpx.ConnectError as error:
        hint = "bough serve starts one; --url says where it is"
        raise Unreachable(f"there is no server at {host}: {error}", hint) from error
    except httpx.TimeoutException as error:
        raise ServerFailed(f"{host} does not answer: {type(error).__name__}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerFailed(f"the connection to {host} broke off: {error}") from error


class RemoteBackend:
    breakable = True

    def __init__(
        self, http: httpx.Client, url: str, *, name: str, ours: bool = False, context: int | None = None
    ):
        self.name = name
        self.ours = ours  # a Bough server, with extensions of the protocol
        self.context = context  # tokens, where the server says how many
        self._http = http
        self._url = url

    @property
    def about(self) -> str:
        held = f"context {self.context:,} tokens · " if self.context else ""
        return f"{held}{self._url}"

    @classmethod
    def connect(cls, url: str, *, key: str | None, model: str | None) -> "RemoteBackend":
        """Connect and list the models, which checks that the server is compatible."""
        base = address(url)
        http = client(base, key)
        with failures(base):
            answer = http.get(f"{base}/models", timeout=CONNECT_S)
        if answer.status_code == 404 and model is not None:
            return cls(http, base, name=model)
        raise_for_status(answer, base)
        models = _models(answer, base)
        if not models and model is None:
            raise ServerFailed(f"{base}/models lists no model", "name one: bough chat NAME --url URL")
        ours = any(each.get("owned_by") == OURS for each in models)
        name = model or models[0]["id"]
        context = next((each.get("max_model_len") for each in models if each["id"] == name), None)
        context = context if isinstance(context, int) else None
        return cls(http, base, name=name, ours=ours, context=context)

    def check(self, settings: Settings) -> None:
        if settings.draft_budget is not None and not self.ours:
            raise UsageError("/draft needs a Bough server; this one decides by itself")

    def defaults(self, settings: Settings) -> Mapping[str, float]:
        return {}

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Settings,
        *,
        seed: int,
        cancelled: Callable[[], bool],
    ) -> Generator[Event]:
        body = self._body(messages, settings, seed)
        tally = _Tally()
        with (
            failures(self._url),
            self._http.stream("POST", f"{self._url}/chat/completions", json=body) as answer,
        ):
            if not answer.is_success:
                answer.read()
                raise_for_status(answer, self._url)
            for chunk in _chunks(answer, self._url):
                tally.add(chunk)
                for delta in (choice.get("delta") or {} for choice in chunk.get("choices") or []):
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        tally.received()
                        yield ReasoningDelta(thought)
                    if text := delta.get("content"):
                        tally.received()
                        yield TextDelta(text)
                if cancelled():
                    break
        if not tally.over and not cancelled():
            raise ServerFailed(f"{urlsplit(self._url).netloc} ended the reply without saying why")
        yield tally.ended(self.name)

    def _body(self, messages: Sequence[Mapping[str, Any]], settings: Settings, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings.values,
        }
        if self.ours:
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


class _Tally:
    """Statistics of a reply: measured at the client, and as the server reports them."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._usage: Mapping[str, Any] = {}
        self._stats: Mapping[str, Any] = {}
        self._reason = ""

    @property
    def over(self) -> bool:
        """Return whether the server has sent a finish reason."""
        return bool(self._reason)

    def received(self) -> None:
        self._last = time.perf_counter()
        self._first = self._last if self._first is None else self._first

    def add(self, chunk: Mapping[str, Any]) -> None:
        self._usage = chunk.get("usage") or self._usage
        self._stats = (chunk.get(OURS) or {}).get("stats") or self._stats
        for choice in chunk.get("choices") or []:
            self._reason = choice.get("finish_reason") or self._reason

    def ended(self, model: str) -> ReplyEnd:
        reason = self._reason or "cancelled"
        tokens = self._usage.get("completion_tokens")
        prompt = self._usage.get("prompt_tokens")
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        ttft = None if self._first is None else self._first - self._start
        seconds = 0.0 if self._first is None else self._last - self._first
        measured = (tokens - 1) / seconds if isinstance(tokens, int) and seconds > 0 else 0.0
        speed = self._stats.get("tok_s") or measured
        accepted = self._stats.get("acceptance_length")
        parts = [
            f"{tokens:,} tok" if isinstance(tokens, int) else "",
            f"{speed:.1f} tok/s" if speed else "",
            f"TTFT {ttft:.2f} s" if ttft is not None else "",
            f"prompt {prompt:,}" + (f" ({cached:,} cached)" if cached else "") if prompt else "",
            f"accept {accepted:.2f}/step" if accepted else "",
            {"length": "length limit", "cancelled": "interrupted"}.get(reason, ""),
        ]
        details = {"model": model, "finish_reason": reason, "ttft_s": ttft, "tok_s": speed}
        return ReplyEnd(
            " · ".join(filter(None, parts)), details | dict(self._usage) | dict(self._stats), speed
        )


def _chunks(answer: httpx.Response, url: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    for line in _lines(answer):
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            raise ServerFailed(f"{url} sent a piece that is not JSON: {data[:80]!r}")
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise ServerFailed(f"the server broke off: {message}")
        yield chunk


def _lines(answer: httpx.Response) -> Iterator[str]:
    """Yield lines that end in a newline; str.splitlines would split at more characters."""
    held = b""
    for piece in answer.iter_bytes():
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode(errors="replace")
    yield held.decode(errors="replace")


def _models(answer: httpx.Response, url: str) -> list[dict[str, Any]]:
    try:
        models = answer.json()["data"]
        return [each for each in models if isinstance(each["id"], str)]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerFailed(
            f"{url}/models is not what an OpenAI-compatible server answers",
            "the address of most of them ends in /v1",
        ) from error


def raise_for_status(answer: httpx.Response, url: str) -> None:
    if answer.is_success:
        return
    try:
        error = answer.json()["error"]
        said = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        said = answer.reason_phrase or "no reason given"
    hints = {
        401: "--api-key KEY, or BOUGH_API_KEY, is sent to it",
        403: "--api-key KEY, or BOUGH_API_KEY, is sent to it",
        404: "the address of most servers ends in /v1",
        429: "its queue is full: try again in a while",
        503: "it may still be loading its model: try again in a while",
    }
    raise ServerFailed(
        f"{urlsplit(url).netloc} says {answer.status_code}: {said}", hints.get(answer.status_code, "")
    )
