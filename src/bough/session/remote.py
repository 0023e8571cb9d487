"""A model of an OpenAI-compatible server: a session's events over HTTP. Imports no torch."""

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2 as httpx

from bough.errors import BoughError, UsageError
from bough.session.events import Reasoning, Text

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
        raise UsageError(f"`url` is {url!r}; needs an address like http://127.0.0.1:8000")
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
        hint = "bough serve starts one; `url` says where it is"
        raise Unreachable(f"there is no server at {host}: {error}", hint) from error
    except httpx.TimeoutException as error:
        raise ServerFailed(f"{host} does not answer: {type(error).__name__}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerFailed(f"the connection to {host} broke off: {error}") from error


@dataclass(slots=True)
class RemoteEnd:
    """The end of a generation: measured at the client, and as the server reports it."""

    reason: str = ""  # empty: the server ended the stream without one
    pieces: int = 0  # of reasoning, text and calls
    ttft_s: float | None = None  # None: there was no piece
    decode_s: float = 0.0  # from the first piece to the last
    usage: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)  # of a Bough server

    @property
    def tokens(self) -> int | None:
        count = self.usage.get("completion_tokens")
        return count if isinstance(count, int) else None

    @property
    def cached_tokens(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def tok_s(self, tokens: int | None) -> float:
        """Return tokens after the first over the time since the first."""
        return (tokens - 1) / self.decode_s if tokens and self.decode_s > 0 else 0.0


class RemoteSession:
    def __init__(
        self,
        http: httpx.Client,
        url: str,
        *,
        name: str,
        ours: bool = False,
        context: int | None = None,
        sees: bool | None = None,
    ):
        self.name = name
        self.url = url
        self.ours = ours  # a Bough server, with extensions of the protocol
        self.context = context  # tokens, where the server says how many
        self.sees = sees  # images, where the server says so
        self._http = http

    @classmethod
    def connect(cls, url: str, *, key: str | None, model: str | None) -> Self:
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
        ours = any(entry.get("owned_by") == OURS for entry in models)
        name = model or models[0]["id"]
        entry = next((entry for entry in models if entry["id"] == name), {})
        context, about = entry.get("max_model_len"), entry.get("architecture")
        inputs = about.get("input_modalities") if isinstance(about, Mapping) else None
        return cls(
            http,
            base,
            name=name,
            ours=ours,
            context=context if isinstance(context, int) else None,
            sees="image" in inputs if isinstance(inputs, list) else None,
        )

    def generate(
        self, body: Mapping[str, Any], *, cancelled: Callable[[], bool]
    ) -> Generator[Reasoning | Text | RemoteEnd]:
        """Yield the pieces of an answer and its end. body: of the request, without the model."""
        sent = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}} | dict(body)
        end, begun, first = RemoteEnd(), time.perf_counter(), 0.0
        with (
            failures(self.url),
            self._http.stream("POST", f"{self.url}/chat/completions", json=sent) as answer,
        ):
            if not answer.is_success:
                answer.read()
                raise_for_status(answer, self.url)
            for chunk in _chunks(answer, self.url):
                end.usage = chunk.get("usage") or end.usage
                end.stats = (chunk.get(OURS) or {}).get("stats") or end.stats
                for choice in chunk.get("choices") or []:
                    end.reason = choice.get("finish_reason") or end.reason
                    delta = choice.get("delta") or {}
                    thought = delta.get("reasoning_content") or delta.get("reasoning")
                    if thought or delta.get("content") or delta.get("tool_calls"):
                        now = time.perf_counter()
                        first = first or now
                        end.pieces += 1
                        end.ttft_s, end.decode_s = first - begun, now - first
                    if thought:
                        yield Reasoning(thought)
                    if text := delta.get("content"):
                        yield Text(text)
                if cancelled():
                    break
        yield end


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
        401: "`api_key` KEY, or BOUGH_API_KEY, is sent to it",
        403: "`api_key` KEY, or BOUGH_API_KEY, is sent to it",
        404: "the address of most servers ends in /v1",
        429: "its queue is full: try again in a while",
        503: "it may still be loading its model: try again in a while",
    }
    raise ServerFailed(
        f"{urlsplit(url).netloc} says {answer.status_code}: {said}", hints.get(answer.status_code, "")
    )
