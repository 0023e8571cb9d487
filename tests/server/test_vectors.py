"""Embeddings and rerank over HTTP, by the official openai and ollama clients; what is refused, and how."""

import base64
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import ollama
import openai
import pytest

from bough.config import EngineConfig
from bough.llm import LLM
from bough.models.pooling import TEMPLATE
from bough.server.models import ServedModel
from bough.session.loading import load_session
from tests.gguf_edit import edited
from tests.server.conftest import openai_client
from tests.server.live import MODEL, Live, live

TEXTS = ["the fox", "a dog and another dog", "def add(a, b):"]
CONFIG = EngineConfig(device="cpu", max_ctx=256)
EOS = {"tokenizer.ggml.add_eos_token": True}


@pytest.fixture(scope="module")
def files(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random Qwen3 models: an embedding model, a reranker, and one that generates text."""
    source, folder = tiny_model("qwen3"), tmp_path_factory.mktemp("vectors")
    template = "<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    return {
        "embed": edited(source, folder / "embed.gguf", keys={"qwen3.pooling_type": 3, **EOS}),
        "rank": edited(source, folder / "rank.gguf", keys={TEMPLATE: template}),
        "chat": source,
    }


@pytest.fixture(scope="module")
def server(files: dict[str, Path]) -> Iterator[Live]:
    """All three in one server: their steps take turns."""

    def load(path: Path) -> Callable[..., Any]:
        return lambda progress: load_session(path, CONFIG, progress=progress)

    others = [ServedModel(name, load(files[name])) for name in ("rank", "chat")]
    with live(load(files["embed"]), others=others) as found:
        yield found


@pytest.fixture
def http(server: Live) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(files: dict[str, Path]) -> np.ndarray:
    with LLM(files["embed"], device="cpu", max_ctx=256) as llm:
        return llm.embed(TEXTS)


def test_the_openai_client(server: Live, expected: np.ndarray):
    client = openai_client(server)
    # It asks for base64 by itself, and decodes it.
    for options in ({}, {"encoding_format": "float"}, {"extra_body": {"stream": True}}):
        found = client.embeddings.create(model=MODEL, input=TEXTS, **options)
        assert [each.index for each in found.data] == [0, 1, 2] and found.model == MODEL
        assert np.array_equal(np.float32([each.embedding for each in found.data]), expected)
        assert found.usage.prompt_tokens == found.usage.total_tokens > 10
    one = client.embeddings.create(model=MODEL, input=TEXTS[0])
    assert np.array_equal(np.float32(one.data[0].embedding), expected[0])
    tokenizer = server.session.tokenizer
    ids = [[*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS]
    for given, rows in ((ids, expected), (ids[1], expected[1:2])):
        tokens = client.embeddings.create(model=MODEL, input=given)
        assert np.array_equal(np.float32([each.embedding for each in tokens.data]), rows)
    short = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8).data[0].embedding
    assert np.allclose(short, expected[0, :8] / np.linalg.norm(expected[0, :8]), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions is 99, needed 1 to 64"):
        client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=99)
    with pytest.raises(openai.BadRequestError, match="the context holds 256") as error:
        client.embeddings.create(model=MODEL, input=["fine", "the fox " * 300])
    assert error.value.code == "context_length_exceeded"


def test_the_ollama_client(server: Live, expected: np.ndarray):
    client = ollama.Client(host=server.url)
    found = client.embed(model=MODEL, input=TEXTS)
    assert np.allclose(found.embeddings, expected, atol=1e-7) and found.model == MODEL
    assert found.prompt_eval_count > 10 and found.total_duration > 0
    assert np.allclose(client.embed(model=MODEL, input=TEXTS[1]).embeddings, expected[1:2], atol=1e-7)
    raw = np.array(client.embeddings(model=MODEL, prompt=TEXTS[0]).embedding)
    assert np.allclose(raw / np.linalg.norm(raw), expected[0], atol=1e-6) and np.linalg.norm(raw) > 2
    assert client.embed(model=MODEL, input="the fox " * 300, truncate=True).prompt_eval_count == 256
    with pytest.raises(ollama.ResponseError, match="the context holds 256") as error:
        client.embed(model=MODEL, input="the fox " * 300)
    assert error.value.status_code == 400
    assert client.show(MODEL).capabilities == ["embedding"]
    assert client.show("chat").capabilities[0] == "completion"


def test_base64_is_little_endian_float32(http: httpx2.Client, expected: np.ndarray):
    body = {"input": TEXTS[0], "encoding_format": "base64"}
    text = http.post("/v1/embeddings", json=body).raise_for_status().json()["data"][0]["embedding"]
    assert struct.unpack("<64f", base64.b64decode(text)) == tuple(expected[0])


@pytest.mark.parametrize("route", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking"])
def test_rerank(http: httpx2.Client, files: dict[str, Path], route: str):
    body = {"model": "rank", "query": "a fox?", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    found = http.post(route, json=body).raise_for_status().json()
    with LLM(files["rank"], device="cpu", max_ctx=256) as llm:
        scores = llm.rerank("a fox?", TEXTS)
    assert [each["relevance_score"] for each in found["results"]] == sorted(scores, reverse=True)
    assert all(scores[each["index"]] == each["relevance_score"] for each in found["results"])
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 30 and found["model"] == "rank"
    best = http.post(route, json=body | {"top_n": 1, "return_documents": True}).json()["results"]
    assert best == [found["results"][0] | {"document": {"text": TEXTS[found["results"][0]["index"]]}}]


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/v1/embeddings", {"model": "chat", "input": "a"}, "the model generates text: its file names no"),
        ("/v1/rerank", {"model": "chat", "query": "a", "documents": ["b"]}, "the model generates text"),
        ("/v1/embeddings", {"model": "rank", "input": "a"}, "is a reranker, needed an embedding model"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "is an embedding model, needed a reranker"),
        ("/v1/rerank", {"model": "rank", "query": "a", "documents": []}, "needs 1 or more items"),
        (
            "/v1/rerank",
            {"model": "rank", "query": "a", "documents": [{"x": 1}]},
            r"documents\[0\] has no text",
        ),
        ("/v1/embeddings", {"input": []}, "input has 0 entries"),
        ("/v1/embeddings", {"input": [5] * 20_000}, "the prompt has 20000 tokens, the context holds 256"),
        ("/v1/embeddings", {"input": ["a", ""]}, "an input is empty"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (
            "/v1/completions",
            {"prompt": "a"},
            "is an embedding model and generates no text; use /v1/embeddings",
        ),
        (
            "/v1/chat/completions",
            {"model": "rank", "messages": [{"role": "user", "content": "a"}], "stream": True},
            "is a reranker and generates no text; use /v1/rerank",
        ),
        ("/api/generate", {"prompt": "a"}, "is an embedding model and generates no text"),
    ],
)
def test_what_is_refused(http: httpx2.Client, route: str, body: dict[str, Any], message: str):
    answer = http.post(route, json={"model": MODEL, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert re.search(message, error if isinstance(error, str) else error["message"])
