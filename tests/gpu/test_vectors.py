"""Vectors and relevance on a GPU: near those of a CPU, the same bits alone and in company."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bough.config import EngineConfig
from bough.hub.catalog import EMBEDDED, named
from bough.models.pooling import TEMPLATE
from bough.session.events import Vector
from bough.session.loading import load_session
from bough.session.requests import TextRequest, VectorOptions
from bough.session.session import Session
from tests.gguf_edit import edited

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 17, 64, 65, 300, 513, 2000, 4500)  # of the last one two chunks
CPU = EngineConfig(device="cpu", max_ctx=8192)


def ids(length: int) -> list[int]:
    return [33 + 7 * index % 90 for index in range(length)]


def vectors(session: Session, requests: list[TextRequest]) -> list[np.ndarray]:
    generations = [session.begin(session.check(request)) for request in requests]
    found = {}
    while not session.idle:
        found |= {
            owner: np.array(event.values) for owner, event in session.step() if isinstance(event, Vector)
        }
    return [found[generation] for generation in generations]


def unit(row: np.ndarray) -> np.ndarray:
    return row / np.linalg.norm(row)


@pytest.mark.parametrize("pooling", [1, 3], ids=["mean", "last"])
def test_vectors_of_the_embedded_model(tmp_path: Path, pooling: int) -> None:
    """Gated DeltaNet and attention layers, in K-quants."""
    found = named(EMBEDDED)
    assert found is not None and found[0].pair is not None
    path = edited(found[0].pair.target, tmp_path / "m.gguf", keys={"qwen35.pooling_type": pooling})
    requests = [TextRequest(prompt=ids(length), vector=VectorOptions()) for length in LENGTHS]
    session = load_session(path, replace(CPU, device="cuda"))
    together = vectors(session, requests)
    alone = [vectors(session, [request])[0] for request in requests]
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))
    for length, row, other in zip(LENGTHS, together, vectors(load_session(path, CPU), requests), strict=True):
        assert unit(row) @ unit(other) > 0.999, length


@pytest.mark.parametrize("mix", ["f32", "q4_k_m"])
def test_relevance_by_the_head(tiny_model: Callable[..., Path], tmp_path: Path, mix: str) -> None:
    template = "<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    source = tiny_model("qwen3", width=256, mix=mix, context=8192)
    path = edited(source, tmp_path / "m.gguf", keys={TEMPLATE: template})
    documents = ["a", "the fox " * 30, "def add(a, b):\n" * 90]
    requests = [TextRequest(prompt=text, vector=VectorOptions("a fox?")) for text in documents]
    on_gpu, on_cpu = (
        np.concatenate(vectors(load_session(path, config), requests))
        for config in (replace(CPU, device="cuda"), CPU)
    )
    assert np.abs(on_gpu - on_cpu).max() < 0.02
