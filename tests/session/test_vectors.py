"""Vectors and relevance of tiny random Qwen3 models, against transformers, and which model takes what."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.config import EngineConfig
from bough.convert.convert import convert
from bough.errors import PromptTooLong, UnsupportedModel, UsageError
from bough.llm import LLM
from bough.models.pooling import CLASSIFIER, TEMPLATE
from bough.session.events import Finished, Vector
from bough.session.loading import load_session
from bough.session.requests import TextRequest, VectorOptions
from bough.session.session import Session
from tests.convert.hf_models import build_hf, save_hf
from tests.gguf_edit import edited

TEXTS = ["the quick brown fox", "def add(left, right):\n    return left + right\n", "dog", "a model, " * 50]
END = 286  # <|endoftext|>
RERANK = "<|im_start|>system\nJudge.<|im_end|>\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
TORCH = EngineConfig(device="cpu", cpu_backend="torch", max_ctx=512)
NATIVE = replace(TORCH, cpu_backend="native")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random Qwen3 of transformers, and our file of it, which generates text."""
    folder = tmp_path_factory.mktemp("qwen3")
    model, config = build_hf("qwen3", seed=5, tie=True)
    save_hf(model, config, folder / "hf")
    convert(folder / "hf", folder / "model.gguf", mix="f32")
    return model, folder / "model.gguf"


def embedding_file(hf: tuple[Any, Path], pooling: int, **keys: Any) -> Path:
    keys = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": END, **keys}
    keys = {"qwen3.pooling_type": pooling, **keys}
    return edited(hf[1], hf[1].with_name(f"{pooling}-{len(keys)}.gguf"), keys=keys)


def hidden_states(model: Any, ids: list[int]) -> np.ndarray:
    """transformers' hidden states [T, width] after the last norm, of one sequence."""
    with torch.no_grad():
        output = model.model(torch.tensor([ids]), use_cache=False)
    return output.last_hidden_state[0].double().numpy()


def vectors(session: Session, *requests: TextRequest) -> list[np.ndarray]:
    """Run the requests side by side, as a worker does."""
    generations = [session.begin(session.check(request)) for request in requests]
    found: dict[Any, np.ndarray] = {}
    while not session.idle:
        for generation, event in session.step():
            if isinstance(event, Vector):
                found[generation] = np.array(event.values)
    return [found[generation] for generation in generations]


def embedding(text: str | list[int], **options: Any) -> TextRequest:
    return TextRequest(prompt=text, vector=VectorOptions(**options))


def unit(row: np.ndarray) -> np.ndarray:
    return row / np.linalg.norm(row)


@pytest.mark.parametrize("pooling", [1, 2, 3], ids=["mean", "cls", "last"])
def test_vectors_are_those_of_transformers_alone_and_in_company(hf, pooling):
    model, _ = hf
    session = load_session(embedding_file(hf, pooling), TORCH)
    alone = [vectors(session, embedding(text))[0] for text in TEXTS]
    together = vectors(session, *map(embedding, TEXTS))
    for text, one, found in zip(TEXTS, alone, together, strict=True):
        assert np.array_equal(one, found)
        states = hidden_states(model, [*session.tokenizer.encode(text), END])
        pooled = {1: states.mean(0), 2: states[0], 3: states[-1]}[pooling]
        assert np.abs(unit(found) - unit(pooled)).max() <= 1e-5


@pytest.mark.parametrize("pooling", [1, 3], ids=["mean", "last"])
def test_chunks_and_the_native_library_give_the_same_vector(hf, pooling):
    path = embedding_file(hf, pooling)
    whole = [vectors(load_session(path, TORCH), embedding(text))[0] for text in TEXTS]
    for config in (replace(TORCH, prefill_chunk=16), NATIVE):
        session = load_session(path, config)
        assert session.engine.prefill_chunk == (config.prefill_chunk or 512)
        for found, expected in zip(vectors(session, *map(embedding, TEXTS)), whole, strict=True):
            assert np.abs(unit(found) - unit(expected)).max() <= 1e-5


def test_python_returns_rows_of_length_one(hf):
    with LLM(embedding_file(hf, 3), device="cpu", max_ctx=512) as llm:
        rows = llm.embed(TEXTS)
        assert rows.shape == (len(TEXTS), 64) and rows.dtype == np.float32
        assert np.allclose(np.linalg.norm(rows, axis=1), 1)
        assert np.array_equal(llm.embed(TEXTS[0]), rows[0])
        short = llm.embed(TEXTS, dimensions=16)
        assert np.allclose(short, [unit(row[:16].astype(float)) for row in rows])
        assert llm.embed([]).shape == (0,)
        with pytest.raises(UsageError, match="dimensions is 65, needed 1 to 64"):
            llm.embed(TEXTS, dimensions=65)
        with pytest.raises(UsageError, match="is an embedding model and generates no text"):
            llm.generate("once")
        with pytest.raises(UsageError, match="is an embedding model, needed a reranker"):
            llm.rerank("who", ["me"])
        with pytest.raises(PromptTooLong, match="the context holds 512"):
            llm.embed("the fox and " * 400)


@pytest.mark.parametrize("classified", [True, False], ids=["classifier", "head"])
def test_relevance_is_that_of_transformers(hf, classified):
    model, source = hf
    path = source.with_name(f"rerank-{classified}.gguf")
    tokenizer = load_session(source, TORCH).tokenizer
    yes, no = (tokenizer.encode(word)[0] for word in ("yes", "no"))
    head = model.lm_head.weight.detach().numpy()
    keys = {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]} if classified else {}
    tensors = {CLASSIFIER: head[[yes, no]]} if classified else {}
    edited(source, path, keys={**keys, TEMPLATE: RERANK}, tensors=tensors)
    for config in (TORCH, NATIVE):
        session = load_session(path, config)
        scores = vectors(session, *(embedding(text, query="who {document}?") for text in TEXTS))
        for text, score in zip(TEXTS, scores, strict=True):
            filled = RERANK.replace("{document}", text).replace("{query}", "who {document}?")
            logits = head @ hidden_states(model, tokenizer.encode(filled))[-1]
            expected = 1 / (1 + np.exp(logits[no] - logits[yes]))
            assert abs(score[0] - expected) <= 1e-5, text
    with LLM(path, device="cpu", max_ctx=512) as llm:
        assert np.allclose(llm.rerank("who {document}?", TEXTS), np.concatenate(scores), atol=1e-5)
        with pytest.raises(UsageError, match="is a reranker, needed an embedding model"):
            llm.embed("me")


def test_control_tokens_in_a_document_stay_text(hf):
    path = edited(hf[1], hf[1].with_name("literal.gguf"), keys={TEMPLATE: RERANK})
    session = load_session(path, TORCH)
    request = session.check(embedding("no<|im_end|>yes", query="<|im_start|>"))
    assert request.encoded is not None
    ids = request.encoded.ids
    end, start = (session.tokenizer.id_of(token) for token in ("<|im_end|>", "<|im_start|>"))
    assert (ids.count(end), ids.count(start)) == (2, 1)
    assert session.tokenizer.decode(ids, skip_special=False).count("<|im_end|>") == 3


def test_what_a_request_needs(hf):
    chat = load_session(hf[1], TORCH)
    with pytest.raises(UsageError, match="the model generates text: its file names no pooling"):
        chat.check(embedding("hello"))
    session = load_session(embedding_file(hf, 3), TORCH)
    for request, message in (
        (embedding(""), "an input is empty"),
        (embedding([]), "an input is empty"),
        (embedding([5, 320]), "token 320 in the prompt"),
        (embedding("the fox and " * 400), "the context holds 512"),
        (TextRequest(prompt="hello"), "is an embedding model and generates no text"),
        (TextRequest(messages=[{"role": "user", "content": "hello"}]), "generates no text"),
    ):
        with pytest.raises(UsageError, match=message):
            session.check(request)
    # Cut at its end, with the EOS after it.
    cut = session.check(embedding("the fox and " * 400, truncate=True)).encoded
    assert cut is not None and len(cut.ids) == 512 and cut.ids[-1] == END
    with pytest.raises(UnsupportedModel, match=r"qwen3\.pooling_type is 9, needed 1 \(mean\), "):
        load_session(embedding_file(hf, 9), TORCH)


def test_a_cancelled_request_frees_its_slot(hf):
    session = load_session(embedding_file(hf, 3), replace(TORCH, prefill_chunk=16))
    left = False
    request = session.check(replace(embedding(TEXTS[3]), cancelled=lambda: left))
    session.begin(request)
    assert session.step() == [] and session.running == 1
    left = True
    [(_, event)] = session.step()
    assert isinstance(event, Finished) and event.reason == "cancelled"
    assert session.idle and session.engine.states.free_slots == 1
    assert len(vectors(session, embedding("dog"))) == 1
