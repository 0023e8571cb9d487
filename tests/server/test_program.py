"""`bough serve` and `bough stop` as programs, with the pair inside the package."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx2
import pytest

from bough.hub.catalog import named

PROGRAM = [sys.executable, "-m", "bough.cli.main"]
SMALL = ["--device", "cpu", "--max-ctx", "512", "--offline"]
LONG = {
    "messages": [{"role": "user", "content": "Write a long story."}],
    "stream": True,
    "temperature": 1,
    "max_tokens": 40,
    "logit_bias": {},
}


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    dropped = ("DFLASH_TARGET", "DFLASH_DRAFT", "BOUGH_API_KEY", "BOUGH_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    source = str(Path(__file__).parents[2] / "src")
    return kept | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": source,
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def wait_for(url: str) -> None:
    for _ in range(1200):
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("the server did not come up")


@contextlib.contextmanager
def serving(surroundings: dict[str, str]) -> Generator[tuple[str, subprocess.Popen[str]]]:
    port = free_port()
    command = [*PROGRAM, "serve", "--port", str(port), *SMALL]
    child = subprocess.Popen(command, env=surroundings, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}", child
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def pieces(answer: httpx2.Response) -> Iterator[dict]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_sigterm_lets_running_requests_finish(surroundings: dict[str, str]):
    with serving(surroundings) as (url, child):
        props = httpx2.get(f"{url}/props").json()
        assert props["model"] == "bough-40m" and props["max_ctx"] == 512
        assert props["device"] == "cpu" and props["draft"] == "draft.gguf" and props["budget"] == 22
        assert props["prefix_cache"]["snapshots"] == props["prefix_cache"]["host_bytes"] == 0
        assert 'bough:prefix_cache{what="host_bytes"} 0.0' in httpx2.get(f"{url}/metrics").text
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=60) as answer:
            chunks = pieces(answer)
            seen = [next(chunks) for _ in range(4)]
            child.send_signal(signal.SIGTERM)
            seen += list(chunks)
        assert seen[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        assert child.wait(20) == 0
        assert child.stderr is not None
        log = child.stderr.read()
        assert f"answers at {url}" in log and "/v1/chat/completions" in log and "tok/s" in log
        with pytest.raises(httpx2.TransportError):
            httpx2.get(url)


def test_sigint_cancels_running_requests(surroundings: dict[str, str]):
    with serving(surroundings) as (url, child):
        body = LONG | {"max_tokens": 400}
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            chunks = pieces(answer)
            next(chunks)
            child.send_signal(signal.SIGINT)
            last = list(chunks)[-1]
        assert last["error"]["code"] == "unavailable" or last["choices"][0]["finish_reason"] == "stop"
        assert child.wait(60) == 0


LOADS = """
import time
from bough.config import ServerConfig
from bough.server.listen import bind
from bough.server.models import ServedModel
from bough.server.run import serve

def load(progress):
    progress(1, 4)
    time.sleep(60)

config = ServerConfig(port=0)
listening = bind(config)
print(listening.getsockname()[1], flush=True)
serve([ServedModel("slow", load)], config, listening)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_loading_ends_the_server(surroundings: dict[str, str], number: int):
    with subprocess.Popen(
        [sys.executable, "-c", LOADS], env=surroundings, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{int(child.stdout.readline())}"
        health = httpx2.get(f"{url}/health", timeout=30)
        assert (health.status_code, health.json()["status"], health.json()["progress"]) == (
            503,
            "loading",
            0.25,
        )
        child.send_signal(number)
        assert child.wait(60) == 0


def test_daemon_and_stop(surroundings: dict[str, str], tmp_path: Path):
    port = free_port()
    # A proxy for other hosts must not be used for the local server.
    surroundings |= {"http_proxy": f"http://127.0.0.1:{free_port()}", "no_proxy": ""}

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *arguments], env=surroundings, capture_output=True, text=True, timeout=120
        )

    nothing = program("stop")
    assert nothing.returncode == 1 and "no server runs in the background" in nothing.stderr
    other = tmp_path / "other.gguf"
    other.symlink_to(named("bough-40m")[0].pair.target)
    models = ["bough-40m", str(other)]
    start = ["serve", *models, "--port", str(port), "--daemon", "--log-file", str(tmp_path / "log"), *SMALL]
    begun = program(*start)
    assert begun.returncode == 0, begun.stderr
    try:
        assert f"bough-40m answers at http://127.0.0.1:{port}" in begun.stdout
        listed = httpx2.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["bough-40m", "other"]
        body = {"model": str(other), "prompt": "def f(n):", "max_tokens": 4}
        httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).raise_for_status()
        found = json.loads(program("ps", "--json").stdout)["models"]
        (shown,) = [each for each in found if each["address"] == f"http://127.0.0.1:{port}"]
        assert (shown["name"], shown["status"], shown["running"], shown["context"]) == ("other", "ok", 0, 512)
        assert shown["memory_bytes"] > 1 << 20
        again = program(*start)
        assert again.returncode == 2 and "in the background" in again.stderr
    finally:
        ended = program("stop", "--port", str(port))
    assert ended.returncode == 0 and f"port {port} has ended" in ended.stdout
    with pytest.raises(httpx2.TransportError):
        httpx2.get(f"http://127.0.0.1:{port}")
    assert "answers at" in (tmp_path / "log").read_text()
    assert not list((tmp_path / "state").rglob("*.pid"))


def test_a_failed_start_reports_the_reason(surroundings: dict[str, str], tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for extra in ([], ["--daemon"]):
            done = subprocess.run(
                [*PROGRAM, "serve", "--port", str(port), *SMALL, *extra],
                env=surroundings,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 2
            assert f"port {port} on 127.0.0.1 is in use" in done.stderr


def test_a_failed_load_of_a_daemon_is_reported(surroundings: dict[str, str], tmp_path: Path):
    done = subprocess.run(
        [*PROGRAM, "serve", "--port", str(free_port()), "--device", "cpu", "--max-ctx", "900m", "--daemon"],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "its log says" in done.stderr and "--max-ctx is 943718400" in done.stderr
    assert not list((tmp_path / "state").rglob("*.pid"))


def test_settings_are_shown_without_keys(bough_program, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("secret-one\n\nsecret-two\n")
    done = bough_program(
        "serve", "--print-config", "--api-key-file", keys, "--think-budget", "2k", "--kv", "f16"
    )
    found = json.loads(done.stdout)
    assert found["server"]["api_keys"] == 2 and "secret" not in done.stdout
    assert (
        found["server"]["thinking_budget"] == 2048
        and found["engine"]["kv_k"] == "f16" == found["engine"]["kv_v"]
    )
    assert found["engine"]["draft"]["path"].endswith("draft.gguf")


def test_a_key_file_that_everyone_can_read_is_warned_of(bough_program, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    for mode, warned in ((0o644, True), (0o600, False), (0o640, False)):
        keys.chmod(mode)
        done = bough_program("serve", "--print-config", "--api-key-file", keys)
        assert ("can read the keys" in done.stderr) == warned


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--host", "0.0.0.0"], "there is no key"),
        (["--api-key", " "], "--api-key is empty"),
        (["--api-key-file", "nowhere"], "cannot be read"),
        (["--log-file", "x"], "needs --daemon"),
        (["--daemon", "--port", "0"], "a port other than 0"),
    ],
)
def test_invalid_settings_are_rejected(bough_program, arguments: list[str], message: str):
    done = bough_program("serve", *arguments)
    assert done.exit_code == 2 and message in done.stderr


@pytest.fixture
def bough_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from typer.testing import CliRunner

    from bough.cli.program import app

    for name in ("DFLASH_TARGET", "DFLASH_DRAFT", "BOUGH_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])
