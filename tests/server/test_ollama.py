"""Ollama's protocol, as its own client and editors speak it; tests/clients has the client itself."""

import json

import httpx2
import pytest

from bough.server.facts import FileFacts, file_facts
from tests.server.live import MODEL, Live

ASK = {"model": "some", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def lines(answer: httpx2.Response) -> list[dict]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.raise_for_status().text.splitlines()]


def test_chat_streams_lines_unless_told_not_to(http: httpx2.Client):
    *pieces, end = lines(http.post("/api/chat", json=ASK))
    whole = http.post("/api/chat", json=ASK | {"stream": False}).raise_for_status().json()
    assert "".join(each["message"]["content"] for each in pieces) == whole["message"]["content"]
    assert whole["message"]["content"].strip() == "You said: hello"
    for each in (end, whole):
        assert each["done"] and each["done_reason"] == "stop" and each["model"] == "some"
        assert each["eval_count"] > 5 and each["prompt_eval_count"] > 0 and each["total_duration"] >= 0
    assert not any(each["done"] for each in pieces) and end["message"]["content"] == ""


def test_options_become_the_requests_own(echo_server: Live, http: httpx2.Client):
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "num_predict": 9,
        "stop": "x",
        "seed": 3,
        "repeat_penalty": 1.2,
    }
    http.post("/api/chat", json=ASK | {"options": options | {"num_ctx": 4096}}).raise_for_status()
    request = echo_server.session.seen[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 3)
    assert sampling.repetition_penalty == 1.2 and request.max_tokens == 9 and request.stop == ["x"]
    http.post("/api/chat", json=ASK | {"options": {"num_predict": -1}, "format": "json"}).raise_for_status()
    request = echo_server.session.seen[-1]
    assert request.max_tokens is None and request.grammar.kind == "json_object"


def test_thinking_and_tools(http: httpx2.Client):
    thought = lines(http.post("/api/chat", json=ASK | {"think": True}))
    assert "".join(each["message"].get("thinking", "") for each in thought) == "Hmm. Yes."
    called = lines(http.post("/api/chat", json=ASK | {"tools": [TOOL]}))
    (calls,) = [each["message"]["tool_calls"] for each in called if "tool_calls" in each["message"]]
    assert calls[0]["function"]["name"] == "look" and isinstance(calls[0]["function"]["arguments"], dict)
    back = [
        *ASK["messages"],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "look", "content": "nothing"},
    ]
    answer = http.post("/api/chat", json=ASK | {"messages": back, "tools": [TOOL], "stream": False})
    assert answer.raise_for_status().json()["done"]


def test_generate(echo_server: Live, http: httpx2.Client):
    body = {"model": "some", "prompt": "abc", "stream": False}
    assert http.post("/api/generate", json=body | {"raw": True}).json()["response"].strip().endswith("abc")
    assert echo_server.session.seen[-1].prompt == "abc"
    http.post("/api/generate", json=body | {"system": "s"}).raise_for_status()
    roles = [each["role"] for each in echo_server.session.seen[-1].messages]
    assert roles == ["system", "user"]
    assert http.post("/api/generate", json={"model": "some"}).json()["done_reason"] == "load"


def test_what_is_there(http: httpx2.Client):
    for route in ("/api/tags", "/api/ps"):
        (model,) = http.get(route).raise_for_status().json()["models"]
        assert model["name"] == model["model"] == MODEL and len(model["digest"]) == 64
    shown = http.post("/api/show", json={"model": "any"}).raise_for_status().json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"] and "{%" in shown["template"]
    assert http.get("/api/version").json()["version"]


@pytest.mark.parametrize(
    ("route", "fields", "said"),
    [
        ("chat", {"format": "yaml"}, "format is 'yaml'"),
        ("chat", {"options": {"num_predict": 0}}, "options.num_predict is 0"),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"think": "a bit"}, "think is 'a bit'"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "loaded without its image encoder",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [3]}]},
            "tool_calls[0].function",
        ),
        ("generate", {"prompt": "x", "context": [1]}, "context is set"),
    ],
)
def test_what_is_refused(http: httpx2.Client, route: str, fields: dict, said: str):
    answer = http.post(f"/api/{route}", json=ASK | fields)
    assert answer.status_code == 400 and said in answer.json()["error"]


def test_a_file_says_its_size_and_type(tiny_model):
    facts = file_facts(tiny_model("qwen2", mix="q8_0"))
    assert (facts.architecture, facts.quantisation) == ("qwen2", "Q8_0")
    assert facts.parameter_size == f"{facts.parameters / 1e6:.1f}M"
    assert FileFacts(parameters=7_600_000_000).parameter_size == "7.6B" and FileFacts().parameter_size == ""
