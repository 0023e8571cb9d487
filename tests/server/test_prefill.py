"""POST /v1/prefill: what is read before the question comes, in the shapes of all protocols."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from bough.config import CompressConfig, EngineConfig, ServerConfig
from bough.session.events import Progress
from bough.session.loading import load_session
from tests.compress.conversations import prose
from tests.server.conftest import anthropic_client, openai_client
from tests.server.live import Live, live, scripted

QUESTION = "\n\nWhat about the harbour?"
OPTIONS = {"model": "m", "temperature": 0, "max_tokens": 6}


def document(seed: int) -> str:
    return prose(random.Random(seed), 30)


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Live]:
    config = EngineConfig(device="cpu", max_ctx=8192, prefix_cache=1 << 30)
    with live(lambda progress: load_session(tiny_model(context=8192), config, progress=progress)) as found:
        yield found


@pytest.fixture(scope="module")
def uncached(tiny_model: Callable[..., Path]) -> Iterator[Live]:
    config = EngineConfig(
        device="cpu", max_ctx=8192, prefix_cache=0, compress=CompressConfig(mode="auto", above=800)
    )
    with live(lambda progress: load_session(tiny_model(context=8192), config, progress=progress)) as found:
        yield found


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def prefill(server: Live, **body) -> dict:
    answer = httpx2.post(f"{server.url}/v1/prefill", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat_after_it_has_cached_tokens_and_the_same_text(server: Live, uncached: Live) -> None:
    text = document(1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    client = openai_client(server)
    found = client.post("/prefill", body={"messages": messages, "lifetime": 60}, cast_to=object)
    assert isinstance(found, dict) and found["object"] == "prefill" and found["complete"]
    assert 1024 <= found["ready_tokens"] <= found["prompt_tokens"] and found["cached_tokens"] == 0
    messages[1] = {"role": "user", "content": text + QUESTION}
    chat = client.chat.completions.create(messages=messages, seed=1, **OPTIONS)
    plain = openai_client(uncached).chat.completions.create(
        messages=messages, seed=1, extra_body={"compress": "off"}, **OPTIONS
    )
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == found["ready_tokens"]
    assert chat.choices[0].message.content == plain.choices[0].message.content
    again = prefill(server, messages=[messages[0], {"role": "user", "content": text}])
    assert again["cached_tokens"] == again["ready_tokens"] == found["ready_tokens"]


def test_every_protocol_has_it(server: Live) -> None:
    texts = [document(seed) for seed in (2, 3, 4)]
    found = prefill(server, prompt=texts[0])
    answer = openai_client(server).completions.create(prompt=texts[0] + QUESTION, **OPTIONS)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == found["ready_tokens"] > 0
    found = prefill(server, input=texts[1], instructions="Be brief.")
    response = openai_client(server).responses.create(
        model="m", input=texts[1] + QUESTION, instructions="Be brief.", max_output_tokens=6
    )
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == found["ready_tokens"] > 0
    content = [{"type": "text", "text": texts[2]}]
    found = prefill(server, messages=[{"role": "user", "content": content}], system="Be brief.")
    content.append({"type": "text", "text": QUESTION})
    message = anthropic_client(server).messages.create(
        messages=[{"role": "user", "content": content}], system="Be brief.", model="m", max_tokens=6
    )
    assert message.usage.cache_read_input_tokens == found["ready_tokens"] > 0


def test_a_conversation_is_read_up_to_the_next_turn(server: Live) -> None:
    messages = [{"role": "user", "content": document(5)}, {"role": "assistant", "content": document(6)}]
    found = prefill(server, messages=messages)
    messages.append({"role": "user", "content": "And then?"})
    chat = openai_client(server).chat.completions.create(messages=messages, **OPTIONS)
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == found["ready_tokens"] > 0


def test_what_is_wrong_is_refused(server: Live, uncached: Live) -> None:
    def refused(where: Live, **body) -> dict:
        answer = httpx2.post(f"{where.url}/v1/prefill", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    assert "messages, prompt and input" in refused(server)["message"]
    assert refused(server, prompt="a", input="b")["message"].endswith("the body has prompt and input")
    assert refused(server, prompt="a", lifetime=0)["param"] == "lifetime"
    assert refused(server, messages=[])["param"] == "messages"
    assert refused(server, messages=[{"role": "user", "content": 5}])
    assert "prefix cache is off" in refused(uncached, prompt="a")["message"]


def test_a_server_that_compresses_says_so(tiny_model: Callable[..., Path]) -> None:
    compress = CompressConfig(mode="auto", above=800)
    config = EngineConfig(device="cpu", max_ctx=8192, prefix_cache=1 << 30, compress=compress)
    with live(lambda progress: load_session(tiny_model(context=8192), config, progress=progress)) as found:
        body = {"prompt": document(7)}
        answer = httpx2.post(f"{found.url}/v1/prefill", json=body, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "compress"
        assert prefill(found, compress="off", **body)["complete"]


def test_it_ends_with_its_lifetime_or_its_client_and_waits_for_others() -> None:
    going = threading.Event()
    begun: list[str] = []

    def script(request):
        begun.append("prefill" if request.prefill_for_s is not None else "chat")
        while not going.is_set() and not request.cancelled():
            yield 0.002
            yield Progress(1, 2)

    with scripted(script, ServerConfig(api_keys=("k",))) as server:
        refused = httpx2.post(f"{server.url}/v1/prefill", json={"prompt": "a"})
        assert refused.status_code == 401
        headers = {"authorization": "Bearer k"}
        body = {"prompt": "a", "lifetime": 0.05}
        answer = httpx2.post(f"{server.url}/v1/prefill", json=body, headers=headers, timeout=60)
        assert answer.json()["complete"] is False
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{server.url}/v1/prefill", json={"prompt": "a"}, headers=headers, timeout=0.3)
        server.settle()
        # A slot for prefill alone is not one that a chat waits for.
        client = openai_client(server, api_key="k")
        reading = threading.Thread(
            target=lambda: httpx2.post(f"{server.url}/v1/prefill", json={"prompt": "b"}, headers=headers)
        )
        reading.start()
        until(lambda: server.worker.running == 1)
        asking = threading.Thread(
            target=lambda: client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
        )
        asking.start()
        until(lambda: server.worker.running == 2)
        going.set()
        reading.join(20)
        asking.join(20)
        assert begun == ["prefill", "prefill", "prefill", "chat"]


def test_too_many_are_refused() -> None:
    going = threading.Event()

    def script(request):
        while not going.is_set() and not request.cancelled():
            yield 0.002
            yield Progress(1, 2)

    with scripted(script) as server:
        client = openai_client(server)
        threads = [
            threading.Thread(target=lambda: client.post("/prefill", body={"prompt": "a"}, cast_to=object))
            for _ in range(9)
        ]
        for count, each in enumerate(threads, 1):
            each.start()
            until(lambda count=count: server.worker.running + server.worker.waiting == count)
        with pytest.raises(openai.RateLimitError, match="prefill alone"):
            client.post("/prefill", body={"prompt": "a"}, cast_to=object)
        going.set()
        for each in threads:
            each.join(20)
