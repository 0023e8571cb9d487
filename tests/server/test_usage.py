"""Usage, limits and the log line of a request."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from bough.config import EngineConfig
from bough.engine.stats import RequestStats
from bough.errors import UsageError
from bough.server import outputs
from bough.server.run import line
from bough.session.events import Text
from bough.session.loading import load_session
from tests.server.conftest import openai_client
from tests.server.live import Live, live, scripted


def test_usage_covers_all_choices(echo_server: Live):
    def usage(count: int):
        asked = [{"role": "user", "content": "one two three"}]
        found = openai_client(echo_server).chat.completions.create(model="m", messages=asked, n=count)
        assert len(found.choices) == count
        return found.usage.model_dump()

    one, three = usage(1), usage(3)
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    for name in ("steps", "drafted_tokens", "accepted_tokens"):
        assert three["speculation"][name] == 3 * one["speculation"][name] > 0
    assert three["speculation"]["acceptance_length"] == one["speculation"]["acceptance_length"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_has_the_usage_of_the_whole_answer(echo_server: Live, count: int):
    asked = [{"role": "user", "content": "one two three"}]
    options = {"model": "m", "messages": asked, "n": count}
    completions = openai_client(echo_server).chat.completions
    whole = completions.create(**options).usage.model_dump()
    chunks = list(completions.create(**options, stream=True, stream_options={"include_usage": True}))
    [streamed] = [chunk.usage.model_dump() for chunk in chunks if chunk.usage is not None]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed[name] == whole[name] > 0


def test_usage_lists_approximations(echo_server: Live, tiny_model: Callable[..., Path]):
    config = EngineConfig(device="cpu", max_ctx=512, kv_k="q8_0", kv_v="q4_0", window=100)
    asked = [{"role": "user", "content": "one"}]
    bodies = {
        "/v1/chat/completions": {"messages": asked, "max_tokens": 4},
        "/v1/completions": {"prompt": "one", "max_tokens": 4},
        "/v1/responses": {"input": "one", "max_output_tokens": 4},
        "/v1/messages": {"messages": asked, "max_tokens": 4},
    }
    with live(lambda progress: load_session(tiny_model(), config, progress=progress)) as server:
        for route, body in bodies.items():
            usage = httpx2.post(server.url + route, json={"model": "m"} | body, timeout=60).json()["usage"]
            assert usage["approximate"] == ["values in q4_0", "a window of 100 tokens"], route
            exact = httpx2.post(echo_server.url + route, json={"model": "m"} | body, timeout=60).json()
            assert "approximate" not in exact["usage"], route


def test_usage_counts_loops_of_reasoning_where_there_were_any():
    assert outputs.notes(RequestStats(reasoning_loops=1), RequestStats(reasoning_loops=2)) == {
        "reasoning_loops": 3
    }
    assert outputs.notes(RequestStats(answer_loops=1), RequestStats(avoided_sentences=2)) == {
        "answer_loops": 1,
        "avoided_sentences": 2,
    }
    assert outputs.notes(RequestStats()) == {}


def test_max_tokens_is_limited_by_the_context(pair_server: Live):
    ids = httpx2.post(f"{pair_server.url}/tokenize", json={"content": "1, 2, 3, 4, 5, 6, 7, 8, "}).json()
    prompt = (ids["tokens"] * 100)[:1016]
    found = openai_client(pair_server).completions.create(
        model="m", prompt=prompt, max_tokens=10**9, temperature=0
    )
    assert found.choices[0].finish_reason == "length" and found.usage
    # The last token needs no position: no forward pass follows it.
    assert found.usage.prompt_tokens == 1016 and found.usage.completion_tokens == 1024 - 1016 + 1


def test_stop_strings_do_not_end_a_tool_call(pair_server: Live):
    tokenizer = pair_server.session.tokenizer
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    bias = {str(tokenizer.id_of("<tool_call>")): 100}
    body = {
        "messages": [{"role": "user", "content": "What time is it?"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stop": ["<", "{", "c"],
        "logit_bias": bias,
        "max_tokens": 60,
    }
    answer = httpx2.post(f"{pair_server.url}/v1/chat/completions", json=body, timeout=60).json()
    choice = answer["choices"][0]
    # Stop strings apply to the text alone, not to a call.
    assert choice["finish_reason"] == "tool_calls", choice
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}


def test_an_error_is_one_log_line():
    lines: list[str] = []

    def script(request):
        yield Text("so far")
        yield UsageError("the grammar cannot be used:\nforged line\x1b[2J" + "x" * 1000)

    with scripted(script) as server:
        server.worker._notify = lambda job, result: lines.append(line(job, result))
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert httpx2.post(f"{server.url}/v1/chat/completions", json=body).status_code == 400
    assert len(lines) == 1 and lines[0].isprintable() and len(lines[0]) < 400
    assert "/v1/chat/completions" in lines[0] and "UsageError: the grammar" in lines[0]
