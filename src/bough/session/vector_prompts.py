"""Prompts whose vector or relevance is computed: the tokens of a text, or of a query and a document."""

import re
from collections.abc import Sequence

import numpy as np

from bough.errors import PromptTooLong, UsageError
from bough.models.pooling import Pooling, VectorSpec
from bough.session.requests import Prompt, TextRequest
from bough.text.tokenizer import EncodeLimit, Tokenizer

_PLACES = re.compile(r"\{(query|document)\}")


def check_role(request: TextRequest, spec: VectorSpec | None) -> None:
    """Raise UsageError unless the model computes what the request wants."""
    options = request.vector
    if spec is None and options is not None:
        raise UsageError(
            "the model generates text: its file names no pooling, which makes vectors of hidden states",
            "load an embedding model, such as Qwen3-Embedding, or a reranker",
            param="model",
        )
    if spec is not None and options is None:
        ranks = spec.pooling is Pooling.rank
        use, python = ("/v1/rerank", "LLM.rerank") if ranks else ("/v1/embeddings", "LLM.embed")
        raise UsageError(
            f"the model is {spec.kind} and generates no text",
            f"use {use} of a server, or {python} in Python",
            param="model",
        )
    if spec is None or options is None:
        return
    if (options.query is not None) != (spec.pooling is Pooling.rank):
        needed = "an embedding model" if options.query is None else "a reranker"
        raise UsageError(f"the model is {spec.kind}, needed {needed}", param="model")
    if options.dimensions is not None and not 1 <= options.dimensions <= spec.width:
        raise UsageError(
            f"dimensions is {options.dimensions}, needed 1 to {spec.width}, the size of the model's vectors",
            param="dimensions",
        )


def vector_prompt(request: TextRequest, spec: VectorSpec, tokenizer: Tokenizer, limit: EncodeLimit) -> Prompt:
    """Return the prompt, with the EOS that the tokenizer asks for; raise for one that is too long."""
    assert request.vector is not None
    truncate, text = request.vector.truncate, request.prompt or ""
    cut = EncodeLimit(limit.tokens, limit.cancelled, stops_at_tokens=False) if truncate else limit
    if isinstance(text, list):
        ids, end = text, 0
    elif request.vector.query is not None:
        ids, end = _of_pair(spec.template, request.vector.query, text, tokenizer, limit), 0
    else:
        # A text that cannot fit is cut first: encoding all of it would be for nothing.
        text = text[: limit.tokens * tokenizer.longest_token] if truncate else text
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        eos = [tokenizer.eos_id] if tokenizer.adds_eos and tokenizer.eos_id is not None else []
        ids, end = [*bos, *tokenizer.encode(text, limit=cut), *eos], len(eos)
    if len(ids) > limit.tokens and truncate:
        ids = [*ids[: limit.tokens - end], *ids[len(ids) - end :]]
    if len(ids) > limit.tokens:
        raise PromptTooLong(len(ids), limit.tokens, "shorten the input", raisable=limit.raisable)
    if len(ids) == end:
        raise UsageError("an input is empty, needed some text", param="input")
    return Prompt(ids, {}, "none", [])


def _of_pair(template: str, query: str, document: str, tokenizer: Tokenizer, limit: EncodeLimit) -> list[int]:
    """Return the template's tokens with both texts in it, in which control tokens stay text."""
    values, pieces, literals = {"query": query, "document": document}, [], []
    length = position = 0
    for match in _PLACES.finditer(template):
        before, value = template[position : match.start()], values[match[1]]
        pieces += [before, value]
        literals.append((length + len(before), length + len(before) + len(value)))
        length, position = literals[-1][1], match.end()
    pieces.append(template[position:])
    return tokenizer.encode("".join(pieces), literals=literals, limit=limit)


def shortened(values: Sequence[float], dimensions: int | None = None) -> np.ndarray:
    """Return the first `dimensions` values of a vector, all if None, as float32 of length 1."""
    row = np.array(values[:dimensions], np.float64)
    return (row / max(float(np.linalg.norm(row)), 1e-12)).astype(np.float32)
