"""Disconnecting clients, many clients at once, and shutdown."""

import asyncio
import gc
import random
import socket
import threading
import time

import anthropic
import httpx2
import openai
import pytest

from bough.config import ServerConfig
from bough.session.events import Progress, Text
from tests.server.conftest import anthropic_client, openai_client
from tests.server.live import Live, scripted
from tests.server.scripted import said

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def endless(request):
    """Prefill for a while, then generate until cancelled."""
    for done in range(10):
        yield Progress(done, 10)
        yield 0.01
    for index in range(100_000):
        yield Text(f"{index} ")
        yield 0.002


def raw(server: Live, path: str, body: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_disconnecting_cancels_the_request(path: str, stream: str):
    what = '"input":"x"' if path.endswith("responses") else '"messages":[{"role":"user","content":"x"}]'
    with scripted(endless) as server:
        for pause in (0.02, 0.3):  # during prefill, and during decoding
            server.session.busy.clear()
            connection = raw(server, path, f'{{{what},"stream":{stream}}}')
            assert server.session.busy.wait(5)
            time.sleep(pause)
            assert server.worker.running
            connection.close()
            server.settle(2)
        assert server.session.cancelled == 2


def test_two_hundred_disconnecting_clients_leave_no_work():
    picks = random.Random(5)

    def script(request):
        if "stay" in str(request.messages):
            yield Text("here")
            return
        for index in range(picks.randrange(40)):
            yield Text(f"{index} ")
            yield 0.001

    with scripted(script, ServerConfig(max_queue=300)) as server:

        def vanish(index: int) -> None:
            mine = random.Random(index)
            path = mine.choice(["/v1/chat/completions", "/v1/messages", "/v1/completions"])
            fields = (
                '"prompt":"x"' if path == "/v1/completions" else '"messages":[{"role":"user","content":"x"}]'
            )
            body = f'{{{fields},"stream":{mine.choice(["true", "false"])}}}'
            try:
                if mine.random() < 0.15:  # before the request is complete
                    with socket.create_connection(("127.0.0.1", server.port)) as connection:
                        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n"
                        connection.sendall((head + body)[: mine.randrange(150)].encode())
                    return
                with raw(server, path, body) as connection:
                    time.sleep(mine.random() * 0.05)
                    if mine.random() < 0.5:
                        connection.recv(mine.randrange(1, 400))
            except OSError:
                pass

        def crowd(first: int) -> None:
            threads = [threading.Thread(target=vanish, args=[first + index]) for index in range(100)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            server.settle(20)

        crowd(0)
        gc.collect()
        before = len(gc.get_objects())
        crowd(100)
        gc.collect()
        assert len(gc.get_objects()) < before + 5000
        answer = httpx2.post(
            f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "stay"}]}
        )
        assert answer.json()["choices"][0]["message"]["content"] == "here"


def test_sixty_four_requests_run_in_order():
    everyone = threading.Event()
    answered: list[int] = []

    def script(request):
        assert everyone.wait(30)
        yield Text("You said: ")
        yield Text(said(request))

    with scripted(script) as server:

        async def main() -> list[str]:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            other = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)

            async def ask(index: int) -> str:
                text = f"number {index}"
                asked = {"model": "m", "messages": [{"role": "user", "content": text}]}
                match index % 4:
                    case 0:
                        chunks = await client.chat.completions.create(**asked, stream=True)
                        found = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
                    case 1:
                        found = (await client.chat.completions.create(**asked)).choices[0].message.content
                    case 2:
                        found = (await client.responses.create(model="m", input=text)).output_text
                    case _:
                        found = (await other.messages.create(**asked, max_tokens=9)).content[0].text
                answered.append(index)
                return found or ""

            tasks = []
            for index in range(64):
                tasks.append(asyncio.create_task(ask(index)))
                while server.worker.waiting + server.worker.running <= index:
                    await asyncio.sleep(0.001)
            everyone.set()
            return await asyncio.gather(*tasks)

        texts = asyncio.run(asyncio.wait_for(main(), 60))
        assert texts == [f"You said: number {index}" for index in range(64)]
        assert [said(request) for request in server.session.seen] == [f"number {i}" for i in range(64)]
        assert sorted(answered) == list(range(64))


def test_concurrent_clients_get_the_same_text(pair_server: Live):
    options = {"model": "m", "max_tokens": 5, "temperature": 0}
    asked = [[{"role": "user", "content": f"Write a {word} function."}] for word in ("short", "long", "good")]
    client = openai_client(pair_server)
    alone = [
        client.chat.completions.create(messages=each, **options).choices[0].message.content for each in asked
    ]

    async def main() -> list[str | None]:
        crowd = openai.AsyncOpenAI(base_url=f"{pair_server.url}/v1", api_key="none", max_retries=0)
        answers = await asyncio.gather(
            *(crowd.chat.completions.create(messages=each, **options) for each in asked * 3)
        )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(main()) == alone * 3


def test_a_full_queue_returns_retry_after():
    with scripted(endless, ServerConfig(max_queue=1)) as server:
        connections = [raw(server, "/v1/chat/completions", '{"messages":[{"role":"user","content":"x"}]}')]
        assert server.session.busy.wait(5)
        connections.append(
            raw(server, "/v1/chat/completions", '{"messages":[{"role":"user","content":"x"}]}')
        )
        while server.worker.waiting < 1:
            time.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as caught:
            openai_client(server).chat.completions.create(model="m", **CHAT)
        assert int(caught.value.response.headers["retry-after"]) > 0
        with pytest.raises(anthropic.RateLimitError):
            anthropic_client(server).messages.create(model="m", max_tokens=1, **CHAT)
        for connection in connections:
            connection.close()
        server.settle()


def test_an_invalid_request_fails_before_it_queues():
    with scripted(endless) as server:
        connection = raw(server, "/v1/chat/completions", '{"messages":[{"role":"user","content":"x"}]}')
        assert server.session.busy.wait(5)
        with pytest.raises(openai.BadRequestError, match="No user query"):
            openai_client(server).chat.completions.create(
                model="m", messages=[{"role": "assistant", "content": "x"}], stream=True
            )
        connection.close()
        server.settle()


def test_keep_alive_during_a_long_prompt(monkeypatch: pytest.MonkeyPatch):
    def script(request):
        for done in range(6):
            yield Progress(done, 6)
            yield 0.06
        yield Text("at last")

    monkeypatch.setattr("bough.server.service.KEEP_ALIVE_S", 0.03)
    with scripted(script) as server:
        streams = {
            "/v1/chat/completions": CHAT,
            "/v1/completions": {"prompt": "x"},
            "/v1/responses": {"input": "x"},
            "/v1/messages": CHAT,
        }
        for path, body in streams.items():
            answer = httpx2.post(server.url + path, json={**body, "stream": True})
            assert ": prompt 3/6\n\n" in answer.text and "at last" in answer.text, path
        client = anthropic_client(server)
        with client.messages.stream(model="m", max_tokens=5, **CHAT) as stream:
            assert stream.get_final_text() == "at last"
        with openai_client(server).responses.stream(model="m", input="x") as stream:
            assert [event for event in stream][-1].type == "response.completed"
