"""Fill in the middle as editors ask for it: the bodies of llama.vim and Continue, as they build them.

llama.vim a1c8e6e: autoload/llama.vim. Continue d0a3c0b6: core/llm/llms/Ollama.ts, LlamaCpp.ts, LlamaStack.ts
and Mistral.ts, with the stop strings of core/autocomplete/templating.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import ollama
import pytest

from bough.config import EngineConfig, SpecConfig
from bough.session.loading import load_session
from bough.spec.prompt_lookup import PromptLookup
from tests.gguf_edit import GAP_TOKENS, edited
from tests.server.conftest import openai_client
from tests.server.live import MODEL, Live, live

FOLDER = Path(__file__).parent / "editors"
GAP = {"input_prefix": "a", "input_suffix": "b"}


def body(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def code_model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the tokens of Qwen2.5-Coder."""
    folder = tmp_path_factory.mktemp("code")
    return edited(tiny_model("qwen3"), folder / "code.gguf", controls=GAP_TOKENS)


@pytest.fixture(scope="module")
def server(code_model: Path) -> Iterator[Live]:
    config = EngineConfig(device="cpu", max_ctx=1024, speculation=SpecConfig())
    with live(lambda progress: load_session(code_model, config, progress=progress)) as found:
        yield found


@pytest.fixture
def http(server: Live) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def gap_ids(server: Live, prefix: str, suffix: str) -> list[int]:
    """Return the prompt that the model was trained with."""
    tokenizer = server.session.tokenizer
    return tokenizer.encode(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>")


def completed(http: httpx2.Client, ids: list[int], **fields: Any) -> str:
    """Return how the model continues these tokens, greedily."""
    asked = {"prompt": ids, "temperature": 0, **fields}
    return http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["text"]


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.raise_for_status().text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_llama_vim(server: Live, http: httpx2.Client):
    ring, fim = body("llama_vim_ring"), body("llama_vim_fim")
    assert http.post("/infill", json=ring).raise_for_status().json() == {}
    found = (
        http.post("/infill", json=fim | {"n_indent": 0, "t_max_predict_ms": 1e6}).raise_for_status().json()
    )
    assert set(found) == set(fim["response_fields"])
    assert found["timings/predicted_n"] > 0 and found["truncated"] is False
    # Other files first, then the gap, as llama.cpp puts them together; greedily, for its sampler of gaps.
    tokenizer = server.session.tokenizer
    others = "".join(f"<|file_sep|>{each['filename']}\n{each['text']}" for each in fim["input_extra"])
    head = tokenizer.encode(f"<|repo_name|>myproject\n{others}<|file_sep|>filename\n")
    ids = [*head, *gap_ids(server, fim["input_prefix"] + fim["prompt"], fim["input_suffix"])]
    assert found["timings/prompt_n"] <= len(ids)
    assert found["content"] == completed(http, ids, max_tokens=128)
    assert found["tokens_cached"] == len(ids) + found["timings/predicted_n"]


def test_what_the_ring_has_read_is_cached(server: Live, http: httpx2.Client):
    long = {"text": "def unusual(name):\n    return name\n" * 12, "filename": "long.py"}
    ring = body("llama_vim_ring") | {"input_extra": [long]}
    http.post("/infill", json=ring).raise_for_status()
    fim = body("llama_vim_fim") | {"input_extra": [long], "response_fields": None, "n_predict": 4}
    timings = http.post("/infill", json=fim).raise_for_status().json()["timings"]
    assert timings["cache_n"] > 200 and timings["prompt_n"] < 120


def test_a_gap_ends_with_its_lines(http: httpx2.Client):
    fim = body("llama_vim_fim") | {"response_fields": None, "n_indent": 0, "t_max_predict_ms": None}
    whole = http.post("/infill", json=fim).raise_for_status().json()
    # Text of which the model writes lines: a bias makes them likely.
    newline = http.post("/tokenize", json={"content": "\n"}).json()["tokens"][0]
    lines = fim | {"logit_bias": {str(newline): 100}, "n_predict": 8}
    assert http.post("/infill", json=lines).json()["content"] == "\n" * 8 and whole["stop_type"] != "word"
    for limit in ({"n_indent": 4}, {"t_max_predict_ms": 1e-6}):
        found = http.post("/infill", json=lines | limit).raise_for_status().json()
        assert found["content"] == "" and found["tokens_predicted"] < 8, limit


@pytest.mark.parametrize("name", ["continue_ollama", "continue_llamacpp", "continue_completions"])
def test_continue(server: Live, http: httpx2.Client, name: str):
    asked = body(name) | ({} if name == "continue_ollama" else {"temperature": 0})
    if name == "continue_ollama":
        asked["options"]["temperature"] = 0
    prefix, suffix = body("continue_ollama")["prompt"], body("continue_ollama")["suffix"]
    stops = body("continue_completions")["stop"]
    expected = completed(http, gap_ids(server, prefix, suffix), max_tokens=40, stop=stops)
    assert len(expected) > 5
    match name:
        case "continue_ollama":
            answer = http.post("/api/generate", json=asked).raise_for_status()
            text = "".join(json.loads(line)["response"] for line in answer.text.splitlines())
        case "continue_llamacpp":
            text = "".join(event["content"] for event in events(http.post("/completion", json=asked)))
        case _:
            streamed = events(http.post("/v1/completions", json=asked))
            text = "".join(event["choices"][0]["text"] for event in streamed)
            chat = events(http.post("/v1/fim/completions", json=asked))
            assert "".join(event["choices"][0]["delta"].get("content") or "" for event in chat) == expected
    assert text == expected


def test_the_official_clients(server: Live, http: httpx2.Client):
    expected = completed(http, gap_ids(server, "def a", "return a"), max_tokens=8)
    options = {"temperature": 0, "num_predict": 8}
    client = ollama.Client(host=server.url)
    assert client.generate(MODEL, "def a", suffix="return a", options=options).response == expected
    asked = {"prompt": "def a", "suffix": "return a", "max_tokens": 8, "temperature": 0}
    found = openai_client(server).completions.create(model=MODEL, **asked)
    assert found.choices[0].text == expected


def test_continue_asks_ollamas_show_whether_a_gap_can_be_filled(http: httpx2.Client):
    shown = http.post("/api/show", json={"model": MODEL}).raise_for_status().json()
    assert ".Suffix" in shown["template"] and "insert" in shown["capabilities"]


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("/infill", GAP),
        ("/completion", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"prompt": "a", "suffix": "b", "stream": False}),
    ],
)
def test_code_may_repeat_itself(
    server: Live, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, route: str, asked: dict[str, Any]
):
    raws, sampling_for = [], server.session.sampling_for
    monkeypatch.setattr(
        server.session,
        "sampling_for",
        lambda thinking, *, raw=False: raws.append(raw) or sampling_for(thinking, raw=raw),
    )
    http.post(route, json=asked | {"n_predict": 1, "max_tokens": 1}).raise_for_status()
    assert raws == [True]


def test_an_empty_file_and_a_list_of_tokens(server: Live, http: httpx2.Client):
    asked = {"suffix": "\nreturn a", "max_tokens": 6, "temperature": 0}
    expected = completed(http, gap_ids(server, "", "\nreturn a"), max_tokens=6)
    assert http.post("/v1/completions", json=asked | {"prompt": ""}).json()["choices"][0]["text"] == expected
    ollama = {"suffix": "\nreturn a", "options": {"temperature": 0, "num_predict": 6}, "stream": False}
    assert http.post("/api/generate", json=ollama).json()["response"] == expected
    ids = server.session.tokenizer.encode("def a")
    by_text, by_ids = (
        http.post("/v1/completions", json=asked | {"prompt": prompt}).json()["choices"][0]["text"]
        for prompt in ("def a", ids)
    )
    assert by_text == by_ids


def test_long_files_are_cut_far_from_the_gap(server: Live, http: httpx2.Client):
    fim = body("llama_vim_fim") | {"response_fields": None, "n_predict": 24}
    long = fim | {"input_prefix": "x = 1\n" * 4000 + fim["input_prefix"]}
    found = http.post("/infill", json=long).raise_for_status().json()
    assert 900 < found["tokens_evaluated"] <= 1000
    refused = http.post("/v1/completions", json={"prompt": long["input_prefix"], "suffix": "x"})
    assert refused.status_code == 400 and "the context holds 1024" in refused.json()["error"]["message"]


def test_lookup_copies_from_before_and_after_the_gap(server: Live):
    before, after = "total = first + second\n", "print(third, fourth)\n"
    tokenizer = server.session.tokenizer
    for copied in (before, after):
        begun, lookup = tokenizer.encode(copied), PromptLookup()
        lookup.append([*gap_ids(server, before, after), *begun[:4]])
        assert lookup.propose(4)[0] == begun[4:8]


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("/infill", GAP),
        ("/infill", {**GAP, "n_predict": 0}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"prompt": "a", "suffix": "b"}),
        ("/v1/fim/completions", {"prompt": "a", "suffix": "b", "stream": True}),
    ],
)
def test_a_model_without_the_tokens(pair_server: Live, route: str, asked: dict[str, Any]):
    answer = httpx2.post(pair_server.url + route, json=asked)
    assert answer.status_code == 400 and "cannot fill in the middle: its vocabulary has no" in answer.text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"input_prefix": "a"}, "input_suffix is missing"),
        (
            {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "x"}]},
            "input_extra[0] is not",
        ),
        ({"input_prefix": "a", "input_suffix": "b", "n_predict": -3}, "n_predict is -3"),
    ],
)
def test_what_infill_refuses(http: httpx2.Client, asked: dict[str, Any], message: str):
    answer = http.post("/infill", json=asked)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
