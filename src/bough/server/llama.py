"""llama.cpp's own protocol, which editors speak: /infill and /completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bough.engine.sampler import SamplingParams
from bough.engine.stats import RequestStats
from bough.errors import UsageError
from bough.server import options, outputs
from bough.server.schemas import InfillBody, LlamaBody, LlamaCompletionBody, Object
from bough.server.service import Service, Writer
from bough.server.sse import event
from bough.session.events import Finished, SessionEvent, Text
from bough.session.requests import TextRequest
from bough.text.infill import Infill

WARM_S = 300.0  # how long what a request without tokens has read is kept for the next
# What a sampler that `samplers` does not name is set to.
_OFF: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}


def infill_request(body: InfillBody, service: Service) -> TextRequest:
    seconds = None if not body.t_max_predict_ms else body.t_max_predict_ms / 1000
    gap = Infill(
        body.input_suffix,
        [_file(each, index) for index, each in enumerate(body.input_extra or ())],
        body.prompt,
        fit=True,
        line_s=seconds,
        indent=max(0, body.n_indent or 0),
    )
    return replace(_request(body, service), prompt=body.input_prefix, infill=gap)


def completion_request(body: LlamaCompletionBody, service: Service) -> TextRequest:
    if not body.prompt:
        raise UsageError("prompt is empty; needs some text", param="prompt")
    return replace(_request(body, service), prompt=body.prompt)


def _request(body: LlamaBody, service: Service) -> TextRequest:
    options.reject_unsupported(body.extras)
    limits = () if body.n_predict == 0 else ("n_predict", "max_tokens")
    shared = options.fields_of(body, service, *limits, grammar=options.answer_grammar(body.__dict__))
    shared["sampling"] = _sampling(body, shared["sampling"])
    return TextRequest(**shared)


def _sampling(body: LlamaBody, params: SamplingParams) -> SamplingParams:
    """Return the sampling by the samplers that the request lists; all others are off.

    llama.cpp's sampler for gaps ends unlikely texts and joins tokens: the likeliest token is nearest to it.
    """
    names = body.samplers
    if not isinstance(names, list):
        return params
    for name in _OFF.keys() - set(names):
        params = replace(params, **_OFF[name])
    greedy = "infill" in names or body.temperature == 0
    return replace(params, temperature=0.0) if greedy else params


def _file(given: Object, index: int) -> tuple[str, str]:
    name, text = given.get("filename") or "tmp", given.get("text")
    where = f"input_extra[{index}]"
    if not isinstance(text, str) or not isinstance(name, str):
        raise UsageError(f"{where} is not a filename and a text", param=where)
    return name, text


@dataclass(slots=True)
class LlamaWriter(Writer[LlamaBody]):
    def write(self, index: int, piece: SessionEvent) -> bytes:
        self.output.add(piece)
        match piece:
            case Text(text):
                return event({"index": index, "content": text, "tokens": [], "stop": False, "id_slot": -1})
            case Finished():
                return event(self._final("", piece))
        return b""

    def result(self) -> Object:
        assert self.output.finished is not None
        return self._final(self.output.text, self.output.finished)

    def read(self, prompt_tokens: int) -> Object:
        return self._final("", Finished(reason="length", tokens=[], stats=RequestStats(prompt_tokens)))

    def _final(self, content: str, finished: Finished) -> Object:
        stats = finished.stats
        ends = {"length": "limit", "stop": "eos"}.get(finished.reason, "none")
        whole = {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self.model,
            "tokens_predicted": stats.generated_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "has_new_line": "\n" in self.output.text,
            "truncated": False,
            "stop_type": "word" if finished.stop_string else ends,
            "stopping_word": finished.stop_string or "",
            "tokens_cached": stats.prompt_tokens + stats.generated_tokens,
            "timings": outputs.timings(stats),
        }
        return whole if not self.body.response_fields else _selected(whole, self.body.response_fields)


def _selected(whole: Object, paths: Sequence[str]) -> Object:
    """Return the values at these paths, under the paths: what is not there is left out."""
    found: Object = {}
    for path in paths:
        value: Any = whole
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found
