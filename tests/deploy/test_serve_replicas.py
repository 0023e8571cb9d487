"""Replicas on a real Ray, with the pair inside the package: the same text, faults, cancellation, ports.

Starting Ray takes most of the time, so each test is a whole story on one cluster.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from bough.config import DraftConfig, EngineConfig
from bough.hub.catalog import named
from bough.session.loading import load_session
from tests.server.live import Live, live

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

ROOT = Path(__file__).parents[2]
START_S, SETTLE_S = 240, 120  # on a slow machine that does other things, too
TURNS = [
    "Write a Python function that merges two sorted lists into one, and explain in a few sentences how it "
    "works, what it costs for lists of different lengths, and what happens if one of the lists is empty.",
    "Now write the same for three lists.",
]
STORY = {"role": "user", "content": "Write a long story."}
# Plain decoding for as long as the context allows: some ten seconds on any CPU.
ENDLESS = {"ignore_eos": True, "bough": {"budget": 0}}
ENDLESS_JSON = {
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 90000}}},
    "bough": {"budget": 0},
}


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """An environment without the user's own settings, Ray's among them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "BOUGH_"))}
    return kept | {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def plain() -> Iterator[Live]:
    """One server without replicas, as the commands below configure theirs."""
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    config = EngineConfig(device="cpu", max_ctx=8192, parallel=2, draft=DraftConfig(pair.draft), threads=1)
    with live(lambda progress: load_session(pair.target, config, progress=progress)) as server:
        yield server


@contextlib.contextmanager
def started(
    command: list[str], port: int, *, env: dict[str, str], log: Path, replicas: int
) -> Generator[str]:
    """Run a command until its replicas answer; end it, and Ray with it, in any case."""
    with log.open("wb") as output:
        child = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: child.poll() is not None or len(replicas_of(url)) == replicas, START_S, log)
        assert child.poll() is None, log.read_text()
        yield url
    finally:
        processes = descendants(child.pid)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(60)
        for pid in [child.pid, *processes]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


def until(done: Callable[[], bool], seconds: float, log: Path | None = None) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, log.read_text() if log else f"not within {seconds} s"
        time.sleep(0.05)


def health(url: str) -> dict[str, Any]:
    # Before the application is deployed Serve's proxy answers, in words.
    with contextlib.suppress(httpx2.TransportError, ValueError):
        return httpx2.get(f"{url}/health", timeout=30).json()
    return {}


def replicas_of(url: str) -> list[dict[str, Any]]:
    return health(url).get("replicas", [])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def descendants(pid: int) -> list[int]:
    """Return all processes below one; the files of one that has just ended are missing."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(
                int(path.parent.name)
            )
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def listening(pids: list[int]) -> set[str]:
    """Return the addresses, in hexadecimal, on which the processes listen."""
    sockets = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[fields[9]] = fields[1].partition(":")[0]
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
                    found |= {sockets[inode[1]]} if inode and inode[1] in sockets else set()
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def openai_turns(url: str, **options: Any) -> tuple[list[str], list[int]]:
    """Return the texts of a streamed conversation, and its cached tokens."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    messages: list[Any] = []
    texts, cached = [], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        text = ""
        for chunk in client.chat.completions.create(
            model="any",
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        ):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            cached += [chunk.usage.prompt_tokens_details.cached_tokens] if chunk.usage else []
        texts.append(text)
        messages.append({"role": "assistant", "content": text})
    return texts, cached


def anthropic_turns(url: str) -> tuple[list[str], list[int]]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    messages: list[Any] = []
    texts, cached = [], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        with client.messages.stream(
            model="any", messages=messages, max_tokens=24, extra_body={"temperature": 0}
        ) as stream:
            texts.append("".join(stream.text_stream))
            cached.append(stream.get_final_message().usage.cache_read_input_tokens)
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts, cached


def same_text(url: str, plain: str) -> None:
    """Both SDKs get the text of one server; second turns are where their prefix is cached."""
    for turns in (openai_turns, anthropic_turns):
        expected, _ = turns(plain)
        texts, cached = turns(url)
        assert texts == expected and cached[1] > 0
    expected, _ = openai_turns(plain)
    with ThreadPoolExecutor(4) as pool:
        sessions = [{"extra_headers": {"x-session-id": str(number)}} for number in range(4)]
        found = list(pool.map(lambda options: openai_turns(url, **options), sessions))
    assert [texts for texts, _ in found] == [expected] * 4
    assert all(cached[1] > 0 for _, cached in found)


class Story:
    """A stream read in a thread; `begun` is set with its first piece of text."""

    def __init__(self, url: str, protocol: str, session: str):
        self.begun, self.text, self.error = threading.Event(), "", None
        self._url, self._session = url, {"x-session-id": session}
        self._thread = threading.Thread(target=self._read, args=(getattr(self, f"_{protocol}"),))
        self._thread.start()

    def _read(self, pieces: Callable[[], Iterator[str]]) -> None:
        try:
            for piece in pieces():
                self.text += piece
                self.begun.set()
        except Exception as error:
            self.error = error
        self.begun.set()

    def join(self) -> "Story":
        self._thread.join(SETTLE_S)
        assert not self._thread.is_alive()
        return self

    def _long(self) -> Iterator[str]:
        return self._openai(max_tokens=200)

    def _openai(self, **options: Any) -> Iterator[str]:
        client = openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=120)
        for chunk in client.chat.completions.create(
            model="any",
            messages=[STORY],
            temperature=0,
            stream=True,
            extra_body=ENDLESS,
            extra_headers=self._session,
            **options,
        ):
            yield from filter(None, [chunk.choices[0].delta.content])

    def _anthropic(self) -> Iterator[str]:
        client = anthropic.Anthropic(base_url=self._url, api_key="none", max_retries=0, timeout=120)
        with client.messages.stream(
            model="any",
            messages=[STORY],
            max_tokens=8000,
            extra_body=ENDLESS_JSON,
            extra_headers=self._session,
        ) as stream:
            yield from stream.text_stream

    def _whole(self) -> Iterator[str]:
        body = {"messages": [STORY], "temperature": 0, "max_tokens": 24}
        answer = httpx2.post(
            f"{self._url}/v1/chat/completions", json=body, headers=self._session, timeout=SETTLE_S
        )
        yield answer.raise_for_status().json()["choices"][0]["message"]["content"]


def vanishing_clients(url: str, port: int, count: int) -> None:
    """Clients that leave at any time leave no request on any replica."""
    body = json.dumps({"messages": [STORY], "temperature": 0, "stream": True, **ENDLESS}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    for index in range(count):
        with socket.create_connection(("127.0.0.1", port), timeout=SETTLE_S) as client:
            client.sendall(head.encode() + body)
            for _ in range(index % 4):
                client.recv(4096)
    until(lambda: idle(url), SETTLE_S)
    reasons = re.findall(
        r'replica_request_success_total\{finished_reason="cancelled".*\} (\d+)', metrics(url)
    )
    assert sum(map(int, reasons)) > 0


def idle(url: str) -> bool:
    state = health(url)
    counts = [state, *state["replicas"]]
    return len(counts) == 3 and not any(each["running"] or each["waiting"] for each in counts)


def metrics(url: str) -> str:
    return httpx2.get(f"{url}/metrics", timeout=30).text


def sessions_on_both(url: str) -> tuple[str, str, int]:
    """Return a session on one replica and its process, and a session on the other replica."""
    where: dict[int, str] = {}
    for number in range(50):
        name, before = f"s{number}", _requests_by_replica(url)
        # Of its own, so that no prefix decides where it goes.
        body = {"prompt": [number + 300] * 40, "max_tokens": 1, "temperature": 0}
        httpx2.post(f"{url}/v1/completions", json=body, headers={"x-session-id": name}, timeout=60)
        after = _requests_by_replica(url)
        for each in replicas_of(url):
            if after[each["replica"]] != before[each["replica"]]:
                where.setdefault(each["pid"], name)
        if len(where) == 2:
            (pid, one), (_, other) = where.items()
            return one, other, pid
    raise AssertionError("all sessions are on one replica")


def _requests_by_replica(url: str) -> dict[str, float]:
    found = re.findall(r'replica_e2e_request_latency_seconds_count\{replica="(\w+)"\} (\S+)', metrics(url))
    return {name: float(value) for name, value in found}


def killed_replica(url: str, plain: str) -> None:
    """Streams on a killed replica end with a typed error, all others are as they would be without it."""
    expected = {protocol: Story(plain, protocol, "").join().text for protocol in ("long", "whole")}
    one, other, pid = sessions_on_both(url)
    lost = [Story(url, "openai", one), Story(url, "anthropic", one)]
    kept = Story(url, "long", other)
    for story in (*lost, kept):
        assert story.begun.wait(SETTLE_S)
    # Both slots are taken: these wait on the replica that is about to end.
    waiting = [Story(url, "whole", one) for _ in range(2)]
    until(lambda: any(each["pid"] == pid and each["waiting"] for each in replicas_of(url)), SETTLE_S)
    # The state was told although this replica had all the requests that it takes.
    assert all(not story.error and story.text for story in lost)
    os.kill(pid, signal.SIGKILL)
    for story in lost:
        assert story.join().text
    openai_error, anthropic_error = (story.error for story in lost)
    assert isinstance(openai_error, openai.APIError) and openai_error.code == "unavailable"
    assert isinstance(anthropic_error, anthropic.APIStatusError)
    assert anthropic_error.body["error"]["type"] == "overloaded_error"
    assert "replica" in str(openai_error) and "replica" in str(anthropic_error)
    assert (kept.join().error, kept.text) == (None, expected["long"])
    for story in waiting:
        assert (story.join().error, story.text) == (None, expected["whole"])
    until(lambda: len(replicas_of(url)) == 2, START_S)
    assert pid not in [each["pid"] for each in replicas_of(url)]
    assert Story(url, "whole", one).join().text == expected["whole"]


def test_two_replicas(surroundings: dict[str, str], tmp_path: Path, plain: Live):
    port, log = free_port(), tmp_path / "log"
    options = ["--replicas", "2", "--port", str(port), "--device", "cpu", "--offline"]
    sizes = ["--max-ctx", "8192", "--parallel", "2", "--threads", "1"]
    command = [sys.executable, "-m", "bough.cli.main", "serve", *options, *sizes]
    with started(command, port, env=surroundings, log=log, replicas=2) as url:
        state = health(url)
        assert state["status"] == "ok" and state["parallel"] == 4
        processes = [state["pid"], *descendants(state["pid"])]
        assert len(processes) > 4 and listening(processes) <= LOOPBACK
        variables = Path(f"/proc/{state['replicas'][0]['pid']}/environ").read_bytes()
        assert b"RAY_AUTH_MODE=token" in variables and b"RAY_AUTH_TOKEN=" in variables
        same_text(url, plain.url)
        vanishing_clients(url, port, 20)
        killed_replica(url, plain.url)
        total = re.search(r"^bough:generation_tokens_total (\S+)", metrics(url), re.M)
        assert total is not None and float(total[1]) > 100
    assert "answers at" in log.read_text() and "Traceback" not in log.read_text()


def test_the_configuration_of_the_documents(surroundings: dict[str, str], tmp_path: Path, tiny_model):
    page = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    port, log = free_port(), tmp_path / "log"
    small = {
        "port: 8000": f"port: {port}",
        "/models/qwen3.6-27b.gguf": str(tiny_model()),
        "replicas: 2": "replicas: 1",
    }
    for shown, used in small.items():
        assert config.count(shown) == 1
        config = config.replace(shown, used)
    (tmp_path / "config.yaml").write_text(config + "      device: cpu\n      threads: 1\n")
    given = re.findall(r"^export (RAY_\w+)=(\S+)$", page, re.M)
    command = [str(Path(sys.executable).with_name("serve")), "run", str(tmp_path / "config.yaml")]
    with started(command, port, env=surroundings | dict(given), log=log, replicas=1) as url:
        assert listening(descendants(os.getpid())) <= LOOPBACK
        body = {"messages": [STORY], "max_tokens": 4}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["model"] == "qwen" and answer["usage"]["completion_tokens"] <= 4
