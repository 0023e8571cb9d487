"""OpenAI text completions: request bodies in, one object or a stream of chunks out."""

from dataclasses import dataclass, field, replace
from typing import Any

from bough.engine.sampler import TokenLogprob
from bough.engine.stats import RequestStats
from bough.errors import UsageError
from bough.server import options, outputs
from bough.server.chat import ChoicesWriter
from bough.server.failures import unfit
from bough.server.schemas import CompletionBody, Object
from bough.server.service import Service
from bough.session.collected import GeneratedOutput
from bough.session.events import Finished, Reasoning, SessionEvent, Text
from bough.session.requests import TextRequest
from bough.text.infill import Infill

MAX_CHOICES = 128


def to_requests(body: CompletionBody, service: Service) -> list[TextRequest]:
    """Return `n` requests for each prompt."""
    count = body.n or 1
    options.reject_unsupported(body.extras)
    gap = Infill(body.suffix) if body.suffix else None
    if body.best_of is not None and body.best_of != count:
        raise unfit("best_of", body.best_of, f"the value of n, {count}")
    if body.echo and body.logprobs is not None:
        raise UsageError("echo is set together with logprobs; the prompt has no logprobs", param="echo")
    prompts = _prompts(body)
    if len(prompts) * count > MAX_CHOICES:
        text = f"n is {count} for {len(prompts)} prompts; needs at most {MAX_CHOICES} choices"
        raise UsageError(text, param="n")
    echo = only_echo(body)
    shared = options.fields_of(
        body,
        service,
        *(() if echo else ("max_tokens", "n_predict")),
        grammar=options.answer_grammar(body.__dict__),
        logprobs=body.logprobs,
    )
    shared |= {"max_tokens": 0} if echo else {}
    request = TextRequest(infill=gap, **shared)
    choices = options.choice_params(request.sampling, count)
    return [replace(request, prompt=prompt, sampling=each) for prompt in prompts for each in choices]


def only_echo(body: CompletionBody) -> bool:
    return bool(body.echo) and body.max_tokens == 0


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not body.suffix and (not prompt or not all(prompt)):
        raise UsageError("prompt is empty; needs some text", param="prompt")
    return list(prompt)


@dataclass(slots=True)
class CompletionWriter(ChoicesWriter[CompletionBody]):
    offsets: dict[int, int] = field(default_factory=dict)

    kind = chunk_kind = "text_completion"

    def write(self, index: int, piece: SessionEvent) -> bytes:
        fresh = index not in self.outputs
        output = self.outputs.setdefault(index, GeneratedOutput())
        begin = b""
        if fresh and self.body.echo:
            prompt = Text(self._echo(index))
            output.add(prompt)
            begin = self.chunk(index, {"text": prompt.text})
        # A completion is raw text: reasoning is part of it.
        if isinstance(piece, Reasoning):
            piece = Text(piece.text, piece.logprobs)
        output.add(piece)
        match piece:
            case Text(text, logprobs):
                logprobs = self._logprobs(index, logprobs)
                return begin + self.chunk(index, {"text": text}, logprobs=logprobs)
            case Finished():
                return begin + self.chunk(index, {"text": ""}, piece)
        return begin

    def _echo(self, index: int) -> str:
        prompt = _prompts(self.body)[index // (self.body.n or 1)]
        return prompt if isinstance(prompt, str) else self.service.session.tokenizer.decode(prompt)

    def echoed(self, requests: list[TextRequest]) -> bytes:
        """Add the prompts as whole outputs; return the stream of a response without generated tokens."""
        out = b""
        for index, request in enumerate(requests):
            stats = RequestStats(prompt_tokens=len(self.service.session.encode(request)))
            out += self.write(index, Finished(reason="length", tokens=[], stats=stats))
        return out + self.end()

    def choice(self, index: int, output: GeneratedOutput) -> Object:
        self.offsets[index] = 0
        return {"text": output.text, "logprobs": self._logprobs(index, output.logprobs)}

    def _logprobs(self, index: int, logprobs: list[TokenLogprob] | None) -> Object | None:
        if logprobs is None or self.body.logprobs is None:
            return None
        token_bytes = self.service.session.tokenizer.token_bytes
        offset = self.offsets.get(index, 0)
        columns: Object = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in logprobs:
            [(text, logprob), *top] = [
                (token_bytes(id).decode(errors="replace"), max(value, outputs.LEAST_LOGPROB))
                for id, value in [(entry.token, entry.logprob), *entry.top]
            ]
            for name, value in zip(columns, (text, logprob, dict(top), offset), strict=True):
                columns[name].append(value)
            offset += len(text)
        self.offsets[index] = offset
        return columns
