"""The FastAPI application: routes, protocol adapters and error responses."""

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

import bough
from bough.config import ServerConfig
from bough.errors import BoughError, UsageError
from bough.images.parts import with_images
from bough.server import anthropic, chat, completions, llama, ollama, prefill, responses, vectors
from bough.server.bodies import BodyRoute
from bough.server.failures import Failure, failure_of, invalid, unreadable
from bough.server.guard import Guard
from bough.server.metrics import CONTENT_TYPE, Metrics
from bough.server.models import Models, Resident
from bough.server.refusals import LOGGED, RefusalLog
from bough.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    InfillBody,
    LlamaCompletionBody,
    MessagesBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
    PrefillBody,
    RerankBody,
    ResponsesBody,
    TemplateBody,
    TokenizeBody,
)
from bough.server.service import Service, Writer
from bough.server.sse import ClientGone
from bough.session.requests import TextRequest
from bough.session.worker import State

EVENTS = "text/event-stream"
Handler = Callable[..., Any]
HERE = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Model output must not make a browser fetch anything from another server.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def create_app(models: Models, config: ServerConfig, *, metrics: Metrics) -> FastAPI:
    app = FastAPI(
        title="Bough",
        version=bough.__version__,
        docs_url=None,
        redoc_url=None,
        description="OpenAI, Anthropic and Ollama protocols for local models.",
    )
    app.add_middleware(Guard, config=config)
    app.add_middleware(RefusalLog)
    app.router.route_class = BodyRoute
    _generation(app, models)
    _llama(app, models)
    _vectors(app, models)
    _prefill(app, models)
    _ollama(app, models)
    _text(app, models)
    _about(app, models, metrics)
    _pages(app)
    _errors(app)
    return app


def _post(app: FastAPI, path: str, *tags: str) -> Callable[[Handler], Handler]:
    """Add a POST route, also without /v1: clients are often given an address that lacks it."""

    def add(handler: Handler) -> Handler:
        app.add_api_route(path, handler, methods=["POST"], tags=list(tags))
        if path.startswith("/v1/"):
            app.add_api_route(path[3:], handler, methods=["POST"], include_in_schema=False)
        return handler

    return add


def _get(
    app: FastAPI, path: str, *tags: str, listed: bool = True, response: type[Response] = JSONResponse
) -> Callable[[Handler], Handler]:
    """Add a GET route, its HEAD, and both also without /v1."""

    def add(handler: Handler) -> Handler:
        app.add_api_route(
            path, handler, methods=["GET"], tags=list(tags), include_in_schema=listed, response_class=response
        )
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        if path.startswith("/v1/"):
            app.add_api_route(path[3:], handler, methods=["GET", "HEAD"], include_in_schema=False)
        return handler

    return add


Read = Callable[[Any, Service], TextRequest | list[TextRequest]]


async def _answer(
    models: Models, request: Request, body: Any, read: Read, writer: type[Writer], prefix: str = ""
) -> Response:
    """Run what `read` makes of the body and answer as `writer` writes; prefix: of the answer's id."""
    async with models.use(request, body.model) as service:
        requests = read(body, service)
        requests = requests if isinstance(requests, list) else [requests]
        output = writer(service, body, _new_id(prefix))
        stream = "stream" in type(body).model_fields and body.stream  # a field beyond the protocol is ignored
        return await service.respond(request, requests, output, stream=stream)


def _generation(app: FastAPI, models: Models) -> None:
    @_post(app, "/v1/chat/completions", "OpenAI")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await _answer(models, request, body, chat.to_requests, chat.ChatWriter, "chatcmpl")

    @_post(app, "/v1/completions", "OpenAI")
    async def text_completions(body: CompletionBody, request: Request) -> Response:
        read, write = completions.to_requests, completions.CompletionWriter
        if not completions.only_echo(body):
            return await _answer(models, request, body, read, write, "cmpl")
        async with models.use(request, body.model) as service:
            writer = write(service, body, _new_id("cmpl"))
            stream = await asyncio.to_thread(writer.echoed, read(body, service))
            return Response(stream, media_type=EVENTS) if body.stream else JSONResponse(writer.result())

    @_post(app, "/v1/fim/completions", "Mistral")
    async def fim_completions(body: CompletionBody, request: Request) -> Response:
        """Fill the gap before `suffix`; the response is that of a chat."""
        shown = ChatBody(model=body.model, messages=[{"role": "user", "content": ""}], stream=body.stream)
        read: Read = lambda _, service: completions.to_requests(body, service)  # noqa: E731
        return await _answer(models, request, shown, read, chat.ChatWriter, "fim")

    @_post(app, "/v1/responses", "OpenAI")
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        return await _answer(models, request, body, responses.to_request, responses.ResponsesWriter, "resp")

    @_post(app, "/v1/messages", "Anthropic")
    async def create_message(body: MessagesBody, request: Request) -> Response:
        return await _answer(models, request, body, anthropic.to_request, anthropic.MessagesWriter, "msg")

    @_post(app, "/v1/responses/input_tokens", "OpenAI")
    async def input_tokens(body: ResponsesBody, request: Request) -> dict[str, Any]:
        async with models.use(request, body.model) as service:
            ids = await service.encode(request, responses.to_request(body, service))
            return {"object": "response.input_tokens", "input_tokens": len(ids)}

    @_post(app, "/v1/messages/count_tokens", "Anthropic")
    async def count_tokens(body: MessagesBody, request: Request) -> dict[str, Any]:
        async with models.use(request, body.model) as service:
            ids = await service.encode(request, anthropic.to_request(body, service))
            return {"input_tokens": len(ids)}


def _llama(app: FastAPI, models: Models) -> None:
    @_post(app, "/infill", "llama.cpp")
    async def infill(body: InfillBody, request: Request) -> Response:
        """Fill the gap between two texts."""
        if body.n_predict != 0:
            return await _answer(models, request, body, llama.infill_request, llama.LlamaWriter)
        async with models.use(request, body.model) as service:
            gap = llama.infill_request(body, service)
            ids = await service.encode(request, gap)
            if service.session.caches_prefixes:
                await service.prefill(request, gap, llama.WARM_S)
            return JSONResponse(llama.LlamaWriter(service, body).read(len(ids)))

    @_post(app, "/completion", "llama.cpp")
    async def native_completion(body: LlamaCompletionBody, request: Request) -> Response:
        return await _answer(models, request, body, llama.completion_request, llama.LlamaWriter)


def _vectors(app: FastAPI, models: Models) -> None:
    async def run(request: Request, body: vectors.VectorBody, requests: list[TextRequest]) -> Response:
        return await _answer(models, request, body, lambda *_: requests, vectors.VectorWriter)

    @_post(app, "/v1/embeddings", "OpenAI")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Return a vector for each input."""
        return await run(request, body, vectors.embedding_requests(body.input, dimensions=body.dimensions))

    @_post(app, "/v1/rerank", "Rerank")
    async def rerank(body: RerankBody, request: Request) -> Response:
        """Sort documents by how well they answer a query."""
        return await run(request, body, vectors.rerank_requests(body))

    for alias in ("/v2/rerank", "/v1/reranking", "/reranking"):
        app.add_api_route(alias, rerank, methods=["POST"], include_in_schema=False)

    @_post(app, "/api/embed", "Ollama")
    async def ollama_embed(body: OllamaEmbedBody, request: Request) -> Response:
        if not body.input:
            return JSONResponse({"model": body.model or "", "embeddings": []})
        options = {"dimensions": body.dimensions, "truncate": body.truncate}
        return await run(request, body, vectors.embedding_requests(body.input, **options))

    @_post(app, "/api/embeddings", "Ollama")
    async def ollama_embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
        """Return one vector, which is not normalised: Ollama's old route."""
        if not body.prompt:
            return JSONResponse({"embedding": []})
        return await run(request, body, vectors.embedding_requests(body.prompt))


def _prefill(app: FastAPI, models: Models) -> None:
    @_post(app, "/v1/prefill", "OpenAI", "Anthropic")
    async def prefill_ahead(body: PrefillBody, request: Request) -> dict[str, Any]:
        """Process what is there of a request before the rest comes; the prefix cache keeps it."""
        async with models.use(request, body.model) as service:
            request_ahead = prefill.to_request(body, service, request.headers)
            return await service.prefill(request, request_ahead, body.lifetime)


def _ollama(app: FastAPI, models: Models) -> None:
    about = ollama.About(models)

    @_post(app, "/api/chat", "Ollama")
    async def ollama_chat(body: OllamaChatBody, request: Request) -> Response:
        if body.messages:
            return await _answer(models, request, body, ollama.chat_request, ollama.OllamaWriter)
        async with models.use(request, body.model) as service:
            return JSONResponse(ollama.OllamaWriter(service, body).loaded())

    @_post(app, "/api/generate", "Ollama")
    async def ollama_generate(body: OllamaGenerateBody, request: Request) -> Response:
        if body.prompt or body.suffix or body.images:
            return await _answer(models, request, body, ollama.generate_request, ollama.OllamaWriter)
        async with models.use(request, body.model) as service:
            return JSONResponse(ollama.OllamaWriter(service, body).loaded())

    @_post(app, "/api/show", "Ollama")
    async def ollama_show(body: OllamaShowBody) -> dict[str, Any]:
        """Describe a model."""
        return about.show(body.model or body.name)

    @_get(app, "/api/tags", "Ollama")
    async def ollama_tags() -> dict[str, Any]:
        return about.tags()

    @_get(app, "/api/ps", "Ollama")
    async def ollama_ps() -> dict[str, Any]:
        return about.loaded()

    @_get(app, "/api/version", "Ollama")
    async def ollama_version() -> dict[str, Any]:
        return {"version": bough.__version__}


def _text(app: FastAPI, models: Models) -> None:
    @_post(app, "/tokenize", "Text")
    async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
        service = models.current
        tokenizer = service.session.tokenizer
        if (body.content is None) == (body.messages is None):
            raise UsageError("content is needed, or messages; exactly one of them", param="content")
        if body.messages is not None:
            tools = chat.tool_list(body.tools, "tools")
            prompt = TextRequest(messages=body.messages, tools=tools or None)
            ids = await service.encode(request, prompt)
        else:
            ids = await service.encode(request, TextRequest(prompt=body.content))
            if not body.add_special and tokenizer.bos_id is not None:
                ids = ids[1:]  # every raw prompt begins with it
        return {"tokens": [_piece(tokenizer, id) for id in ids] if body.with_pieces else ids}

    @_post(app, "/detokenize", "Text")
    def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        return {"content": models.current.session.tokenizer.decode(body.tokens, skip_special=False)}

    @_post(app, "/apply-template", "Text")
    def apply_template(body: TemplateBody) -> dict[str, Any]:
        service = models.current
        kwargs = dict(body.chat_template_kwargs or {})
        thinking = kwargs.pop("enable_thinking", service.config.thinking)
        chat.check_template_options(kwargs)
        rendered = service.session.template.render(
            with_images(body.messages, service.session.images),
            tools=chat.tool_list(body.tools, "tools"),
            thinking=thinking,
            add_generation_prompt=body.add_generation_prompt,
            continue_final=chat.continues(body),
            **kwargs,
        )
        return {"prompt": rendered.text}


def _about(app: FastAPI, models: Models, metrics: Metrics) -> None:
    started = time.time()

    @_get(app, "/health", "Server")
    async def health() -> Response:
        await models.refresh()
        ready, shown = models.health()
        headers = {} if ready else {"retry-after": "2"}
        return JSONResponse({"pid": os.getpid(), **shown}, 200 if ready else 503, headers)

    def model(id: str, resident: Resident | None) -> dict[str, Any]:
        loaded = resident is not None and resident.service.worker.state is State.ready
        session = resident.service.session if resident is not None and loaded else None
        modalities: dict[str, Any] = {}
        if session is not None:  # as llama.cpp says it
            inputs = ["text"] if session.images is None else ["text", "image"]
            modalities = {"architecture": {"input_modalities": inputs, "output_modalities": ["text"]}}
        return {
            "id": id,
            "object": "model",
            "created": int(started),
            "owned_by": "bough",
            "type": "model",
            "display_name": id,
            "created_at": datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_model_len": session.max_ctx if session is not None else None,
            "loaded": loaded,
            **modalities,
        }

    @_get(app, "/v1/models", "OpenAI", "Anthropic")
    async def list_models() -> dict[str, Any]:
        """List the models that requests may name, loaded or not."""
        names = [each.name for each in models.served]
        data = [model(name, models.resident(name)) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": data, "has_more": False, **ends}

    @_get(app, "/v1/models/{id:path}", "OpenAI", "Anthropic")
    async def get_model(id: str) -> dict[str, Any]:
        """Return the model that requests of this name get."""
        return model(id, models.resident(id))

    @_get(app, "/props", "Server")
    async def props() -> dict[str, Any]:
        """Describe the model that was used last."""
        await models.refresh()
        service = models.current
        session, config = service.session, service.config
        return {
            "version": bough.__version__,
            "model": service.model_name,
            "models": [each.name for each in models.served],
            "max_ctx": session.max_ctx,
            "vocabulary": session.tokenizer.vocab_size,
            "chat_template": session.template.source,
            "supports_thinking": session.template.supports_thinking,
            "modalities": {"vision": session.images is not None, "audio": False},
            "thinking": {"default": config.thinking, "budget": config.thinking_budget},
            "sampling": service.sampling_facts(),
            "queue": dict(service.worker.describe()),
            **service.facts(),
        }

    @_get(app, "/metrics", "Server", response=PlainTextResponse)
    async def prometheus() -> Response:
        await models.refresh()
        return Response(metrics.page([each.service for each in models.residents]), media_type=CONTENT_TYPE)


def _pages(app: FastAPI) -> None:
    files = {path.name: path for folder in ("page", "docs") for path in (HERE / folder).glob("*.*")}

    async def send(path: Path) -> Response:
        return FileResponse(path, headers=PAGE_HEADERS, media_type=TYPES.get(path.suffix))

    @_get(app, "/", listed=False)
    async def page() -> Response:
        return await send(files["index.html"])

    @_get(app, "/docs", listed=False)
    async def docs() -> Response:
        return await send(files["docs.html"])

    # One route for each file: a pattern would match the unknown paths of other methods, too.
    for path in files.values():
        _get(app, f"/{path.name}", listed=False)(functools.partial(send, path))


def _errors(app: FastAPI) -> None:
    def respond(request: Request, failure: Failure) -> Response:
        return JSONResponse(failure.body(request.url.path), failure.status, failure.headers)

    @app.exception_handler(BoughError)
    async def expected(request: Request, error: BoughError) -> Response:
        request.state.logged = LOGGED in getattr(error, "__notes__", ())
        return respond(request, failure_of(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return respond(request, invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]  # of `url`, control characters are missing
        messages = {
            404: f"there is no route {path}; /docs lists all routes",
            405: f"{path} does not take {request.method}",
        }
        failure = Failure(error.status_code, messages.get(error.status_code, str(error.detail)))
        if error.status_code == 400:
            failure = unreadable(error.__cause__)
        response = respond(request, failure)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        response = respond(request, failure_of(error))
        # The error goes on to the HTTP server, which then closes the connection: a client must not reuse it.
        response.headers["Connection"] = "close"
        return response


def _piece(tokenizer: Any, id: int) -> dict[str, Any]:
    raw = tokenizer.token_bytes(id)
    try:
        return {"id": id, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": id, "piece": list(raw)}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
