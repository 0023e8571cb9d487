"""Ollama's protocol, which many editors speak: bodies in, one object or lines of JSON out."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import bough
from bough.errors import UsageError
from bough.server import chat, options, outputs
from bough.server.facts import FileFacts, file_facts
from bough.server.failures import Failure, unfit
from bough.server.models import Models, Resident, ServedModel
from bough.server.options import Thinking
from bough.server.schemas import Object, OllamaBody, OllamaChatBody, OllamaGenerateBody
from bough.server.service import Service, Writer
from bough.session.events import Finished, Reasoning, SessionEvent, Text
from bough.session.reader import RequestReader
from bough.session.requests import TextRequest
from bough.session.worker import Job, State
from bough.text.grammar import Grammar
from bough.text.infill import Infill

LINES = "application/x-ndjson"
NEVER = "2318-01-01T00:00:00Z"  # a model stays until another needs its place
_NO_LIMIT = (-1, -2)  # num_predict: without end, to the end of the context


def chat_request(body: OllamaChatBody, service: Service) -> TextRequest:
    messages = [_message(each, index) for index, each in enumerate(body.messages)]
    tools = chat.tool_list(body.tools, "tools")
    return _request(body, service, messages=messages, tools=tools or None)


def generate_request(body: OllamaGenerateBody, service: Service) -> TextRequest:
    for name in ("template", "context"):
        if getattr(body, name):
            raise UsageError(f"{name} is set; this server does not support it", param=name)
    if body.images and (body.suffix or body.raw):
        text = "images is set, and so is suffix or raw; images need a chat template"
        raise UsageError(text, param="images")
    if body.suffix:
        return _request(body, service, prompt=body.prompt, infill=Infill(body.suffix))
    if body.raw:
        return _request(body, service, prompt=body.prompt)
    content = _with_images(body.images, body.prompt, "images")
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _request(body, service, messages=[*system, {"role": "user", "content": content}])


def _request(body: OllamaBody, service: Service, **rest: Any) -> TextRequest:
    settings = body.options
    thinking = _thinking(body.think).otherwise(service.thinking)
    limit = None if settings.num_predict in _NO_LIMIT else settings.num_predict
    if limit is not None and limit < 1:
        raise unfit("options.num_predict", limit, "at least 1, or -1")
    return TextRequest(
        **rest,
        max_tokens=limit,
        sampling=options.sampling(service.defaults(thinking.on, raw="prompt" in rest), settings.__dict__),
        stop=options.stops(settings.stop),
        **thinking.fields(),
        grammar=_grammar(body.format),
        compress=options.compression({"compress": body.compress}),
    )


def _thinking(think: bool | str | None) -> Thinking:
    return options.effort(think, "think") if isinstance(think, str) else Thinking(think)


def _grammar(form: str | Object | None) -> Grammar | None:
    if not form:
        return None
    if isinstance(form, Mapping):
        return Grammar("json_schema", form, "format")
    if form != "json":
        raise unfit("format", form, "json or a JSON schema")
    return Grammar("json_object", None, "format")


def _message(entry: Object, index: int) -> Object:
    message = {name: entry[name] for name in ("role", "content") if name in entry}
    if entry.get("images"):
        message["content"] = _with_images(entry["images"], entry.get("content"), f"messages[{index}].images")
    if entry.get("thinking"):
        message["reasoning_content"] = entry["thinking"]
    if entry.get("tool_name"):
        message["name"] = entry["tool_name"]
    return message | ({"tool_calls": entry["tool_calls"]} if entry.get("tool_calls") else {})


def _with_images(images: Any, text: Any, field: str) -> Any:
    if not images:
        return text
    if not isinstance(images, list):
        raise UsageError(f"{field} is of type {type(images).__name__}; needs a list", param=field)
    return [*({"type": "image", "image": each} for each in images), {"type": "text", "text": text or ""}]


@dataclass(slots=True)
class OllamaWriter(Writer[OllamaBody]):
    """The text of a chat is in a message, other text in `response`."""

    media_type = LINES

    def loaded(self) -> Object:
        """Return the answer to an empty prompt, which asks for the model to be loaded."""
        return self._part("") | {"done": True, "done_reason": "load"}

    def write(self, index: int, piece: SessionEvent) -> bytes:
        self.output.add(piece)
        match piece:
            case Text(text):
                return _line(self._part(text))
            case Reasoning(text):
                return _line(self._part("", text))
            case Finished():
                # Arguments are objects here, so that a call is sent when it is complete.
                calls = _line(self._part("", calls=self._calls)) if self._calls else b""
                return calls + _line(self._part("") | self._end(piece))
        return b""

    def keep_alive(self, job: Job) -> bytes:
        return b""  # clients parse every line

    def failure(self, failure: Failure) -> bytes:
        return _line(failure.ollama())

    def result(self) -> Object:
        assert self.output.finished is not None
        part = self._part(self.output.text, self.output.reasoning, self._calls)
        return part | self._end(self.output.finished)

    @property
    def _calls(self) -> list[Object]:
        return [
            {"function": {"name": call.name, "arguments": json.loads(call.text or "{}")}}
            for call in self.output.calls
        ]

    def _part(self, text: str, thinking: str = "", calls: Sequence[Object] = ()) -> Object:
        extra = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        said = {"role": "assistant", "content": text} | extra
        inner = {"message": said} if isinstance(self.body, OllamaChatBody) else {"response": text} | extra
        return {"model": self.model, "created_at": now(), **inner, "done": False}

    def _end(self, finished: Finished) -> Object:
        stats = finished.stats
        prompt, decode = round(1e9 * stats.ttft_s), round(1e9 * stats.decode_s)
        return {
            "done": True,
            "done_reason": "length" if finished.reason == "length" else "stop",
            "total_duration": prompt + decode,
            "load_duration": 0,
            "prompt_eval_count": stats.sent_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": stats.generated_tokens,
            "eval_duration": decode,
            **outputs.notes(stats),
        }


@dataclass(frozen=True, slots=True)
class About:
    """What /api/tags, /api/ps and /api/show say of the models."""

    models: Models
    started: str = field(default_factory=lambda: now())

    def tags(self) -> Object:
        """List the models that requests may name."""
        listed = [(each, self.models.resident(each.name)) for each in self.models.served]
        return {"models": [self._model(each, resident) for each, resident in listed]}

    def loaded(self) -> Object:
        """List the models in memory, with what Ollama's clients ignore: state, requests."""
        return {"models": [self._loaded(each) for each in self.models.residents]}

    def show(self, name: str | None) -> Object:
        model = self.models.named(name)
        resident = self.models.resident(model.name)
        facts = _facts(resident)
        family, info = facts.get("architecture", ""), {}
        abilities = ["completion", "tools"]
        if resident is not None:
            service = resident.service
            session, sampling = service.session, service.sampling_facts()
            abilities += ["thinking"] if session.template.supports_thinking else []
            abilities += ["vision"] if session.images is not None else []
            abilities += ["insert"] if session.tokenizer.infill is not None else []
            if session.vector_spec is not None:
                abilities = ["embedding"]
            info = {
                "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
                "template": _template(session),
                "model_info": {"general.architecture": family, f"{family}.context_length": session.max_ctx},
            }
        return {
            "modelfile": f"FROM {model.name}\n",
            "parameters": "",
            "template": "",
            "details": _details(model),
            "model_info": {},
            "capabilities": abilities,
            "modified_at": self.started,
            **info,
        }

    def _model(self, model: ServedModel, resident: Resident | None) -> Object:
        name = model.name
        return {
            "name": name,
            "model": name,
            "modified_at": self.started,
            "size": model.size,
            "digest": hashlib.sha256(f"{bough.__version__} {name}".encode()).hexdigest(),
            "details": _details(model),
        }

    def _loaded(self, resident: Resident) -> Object:
        worker, facts = resident.service.worker, _facts(resident)
        size = facts.get("memory_bytes", 0)
        state = {name: worker.describe()[name] for name in ("status", "progress", "running", "waiting")}
        return {
            **self._model(resident.model, resident),
            "size": size,
            "size_vram": size if "cuda" in facts.get("device", "") else 0,
            "context_length": resident.service.session.max_ctx if worker.state is State.ready else 0,
            "expires_at": NEVER,
            **state,
            "device": facts.get("device", ""),
            "warnings": facts.get("warnings", []),
            "experts": facts.get("experts"),
        }


def _template(session: RequestReader) -> str:
    """Return the chat template; editors look for .Suffix in it before they ask for the text of a gap."""
    gap = "{#- .Suffix: the text after a gap -#}" if session.tokenizer.infill is not None else ""
    return session.template.source + gap


def _facts(resident: Resident | None) -> Mapping[str, Any]:
    """Return the properties of a model that is loaded, else nothing."""
    if resident is None or resident.service.worker.state is not State.ready:
        return {}
    return resident.service.facts()


def _details(model: ServedModel) -> Object:
    file = file_facts(model.path) if model.path is not None else FileFacts()
    return {
        "parent_model": "",
        "format": "gguf",
        "family": file.architecture,
        "families": [file.architecture],
        "parameter_size": file.parameter_size,
        "quantization_level": file.quantisation,
    }


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _line(value: Object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
