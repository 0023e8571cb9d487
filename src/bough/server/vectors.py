"""Embeddings and relevance, in OpenAI's, Ollama's and Jina's form."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.errors import UsageError
from bough.server.schemas import EmbeddingBody, Object, OllamaEmbedBody, OllamaEmbeddingsBody, RerankBody
from bough.server.service import Writer
from bough.session.events import Finished, SessionEvent, Vector
from bough.session.requests import TextRequest, VectorOptions
from bough.session.vector_prompts import shortened

VectorBody = EmbeddingBody | OllamaEmbedBody | OllamaEmbeddingsBody | RerankBody
MAX_INPUTS = 2048  # of one request, as OpenAI has it


def embedding_requests(
    inputs: Any, *, dimensions: int | None = None, truncate: bool = False
) -> list[TextRequest]:
    """Return a request for each input: a text, a list of them, token ids, or a list of lists of ids."""
    one = isinstance(inputs, str) or (inputs and isinstance(inputs[0], int))
    texts = [inputs] if one else list(inputs)
    _check_count(texts, "input")
    options = VectorOptions(truncate=truncate, dimensions=dimensions)
    return [TextRequest(prompt=text, vector=options) for text in texts]


def rerank_requests(body: RerankBody) -> list[TextRequest]:
    _check_count(body.documents, "documents")
    options = VectorOptions(query=body.query)
    return [TextRequest(prompt=text, vector=options) for text in _documents(body)]


def _documents(body: RerankBody) -> list[str]:
    texts = []
    for index, document in enumerate(body.documents):
        text = document if isinstance(document, str) else document.get("text")
        if not isinstance(text, str):
            where = f"documents[{index}]"
            raise UsageError(f"{where} has no text; needs a string, or an object with one", param=where)
        texts.append(text)
    return texts


def _check_count(values: Sequence[Any], name: str) -> None:
    if not 1 <= len(values) <= MAX_INPUTS:
        raise UsageError(f"{name} has {len(values)} entries; needs 1 to {MAX_INPUTS}", param=name)


@dataclass(slots=True)
class VectorWriter(Writer[VectorBody]):
    """Collects the vectors of a request, whose routes return one object: nothing is streamed.

    Each vector becomes JSON as it arrives: two million numbers at once would stop the event loop for seconds.
    """

    rows: dict[int, str] = field(default_factory=dict)  # of vectors, JSON
    scores: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    def write(self, index: int, piece: SessionEvent) -> bytes:
        match piece:
            case Vector(values) if isinstance(self.body, RerankBody):
                self.scores[index] = values[0]
            case Vector(values):
                self.rows[index] = json.dumps(self._row(index, values), separators=(",", ":"))
            case Finished(stats=stats):
                self.tokens += stats.prompt_tokens
                self.seconds += stats.ttft_s
        return b""

    def result(self) -> Object | bytes:
        rows = ",".join(self.rows[index] for index in sorted(self.rows))
        match self.body:
            case EmbeddingBody():
                head = {"object": "list", "model": self.model, "usage": self._usage}
                return f'{json.dumps(head)[:-1]}, "data": [{rows}]}}'.encode()
            case OllamaEmbedBody():
                spent = {"total_duration": round(1e9 * self.seconds), "load_duration": 0}
                head = {"model": self.model, **spent, "prompt_eval_count": self.tokens}
                return f'{json.dumps(head)[:-1]}, "embeddings": [{rows}]}}'.encode()
            case OllamaEmbeddingsBody():
                return f'{{"embedding": {rows or []}}}'.encode()
            case RerankBody():
                return self._ranked(self.body)

    def _row(self, index: int, values: Sequence[float]) -> Any:
        body = self.body
        if isinstance(body, OllamaEmbeddingsBody | RerankBody):
            return list(values)
        row = shortened(values, body.dimensions)
        if isinstance(body, OllamaEmbedBody):
            return row.tolist()
        packed = body.encoding_format == "base64"
        vector = base64.b64encode(row.tobytes()).decode() if packed else row.tolist()
        return {"object": "embedding", "index": index, "embedding": vector}

    def _ranked(self, body: RerankBody) -> Object:
        best = sorted(self.scores, key=lambda index: (-self.scores[index], index))[: body.top_n]
        results: list[Object] = [{"index": index, "relevance_score": self.scores[index]} for index in best]
        if body.return_documents:
            texts = _documents(body)
            results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
        return {"object": "list", "model": self.model, "results": results, "usage": self._usage}

    @property
    def _usage(self) -> Object:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
