"""What clients see of a server that is stopped in the middle of their answers."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import anthropic
import httpx2
import openai
import pytest

SERVER = """
import sys, threading, time
from bough.config import ServerConfig
from bough.server.listen import bind
from bough.server.models import ServedModel
from bough.server.run import serve
from bough.session.events import Text
from tests.server.scripted import ScriptedSession

stuck = threading.Event()
threading.Thread(target=lambda: sys.stdin.readline() and stuck.set(), daemon=True).start()

def script(request):
    for index in range(100000):
        yield Text(f"{index} ")
        yield 0.005
        if stuck.is_set():
            time.sleep(20)

config = ServerConfig(port=0, drain_s=2)
listening = bind(config)
session = ScriptedSession(script, parallel=4)
print(listening.getsockname()[1], flush=True)
serve([ServedModel("m", lambda _: session)], config, listening)
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@contextlib.contextmanager
def serving() -> Generator[tuple[subprocess.Popen[str], str]]:
    command, root = [sys.executable, "-c", SERVER], Path(__file__).parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, cwd=root, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        try:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if httpx2.get(f"{url}/health").status_code == 200:
                        break
                time.sleep(0.02)
            yield process, url
        finally:
            process.kill()


def chat(url: str, begun: threading.Barrier) -> object:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    stream = client.chat.completions.create(**CHAT, stream=True)
    next(iter(stream))
    begun.wait()
    return [chunk for chunk in stream]


def response(url: str, begun: threading.Barrier) -> object:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    stream = client.responses.create(model="m", input="Hello", stream=True)
    next(iter(stream))
    begun.wait()
    events = [event for event in stream]
    raise RuntimeError(f"{events[-1].type}: {events[-1].to_json()}")


def message(url: str, begun: threading.Barrier) -> object:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30)
    stream = client.messages.create(**CHAT, max_tokens=10**6, stream=True)
    next(iter(stream))
    begun.wait()
    return [event for event in stream]


def whole(url: str, begun: threading.Barrier) -> object:
    begun.wait()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    return client.chat.completions.create(**CHAT)


def ends(
    url: str, process: subprocess.Popen[str], clients: list, *, stuck: bool = False
) -> dict[str, Exception]:
    """Return each client's error where the server is stopped once all have the beginning of an answer."""
    begun, errors = threading.Barrier(len(clients) + 1), {}

    def ask(client) -> None:
        try:
            client(url, begun)
        except Exception as error:
            errors[client.__name__] = error

    threads = [threading.Thread(target=ask, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    begun.wait(20)
    if stuck:
        assert process.stdin is not None
        process.stdin.write("stuck\n")
        process.stdin.flush()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(20)
    return errors


@pytest.mark.parametrize("stuck", [False, True])
def test_answers_that_shutdown_cuts_end_with_a_typed_error(stuck: bool):
    """`stuck`: the engine is in a long piece of a prompt and does not see that they are cancelled."""
    with serving() as (process, url):
        errors = ends(url, process, [chat, response, message], stuck=stuck)
    assert type(errors["chat"]) is openai.APIError
    assert type(errors["message"]) is anthropic.APIStatusError
    assert "response.failed" in str(errors["response"])
    for error in errors.values():
        assert "the server is stopping" in str(error)


def test_queued_requests_are_refused_at_once():
    with serving() as (process, url):
        begun = time.monotonic()
        errors = ends(url, process, [chat, message, response, chat, whole])
        assert type(errors["whole"]) is openai.InternalServerError
        assert "the server is stopping" in str(errors["whole"])
        assert process.wait(20) == 0
        assert time.monotonic() - begun < 30
