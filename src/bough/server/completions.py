"""OpenAI text completions: request bodies in, one object or a stream of chunks out."""

import time
from dataclasses import dataclass, field
from typing import Any

from bough.engine.stats import RequestStats
from bough.errors import UsageError
from bough.server import options, outputs
from bough.server.chat import usage_of
from bough.server.failures import Failure
from bough.server.schemas import CompletionBody, Object
from bough.server.service import Service
from bough.server.sse import DONE, comment, event
from bough.session.collected import GeneratedOutput
from bough.session.requests import (
    Finished,
    Infill,
    Reasoning,
    SessionEvent,
    Text,
    TextRequest,
    TokenLogprob,
)
from bough.session.worker import Job

MAX_CHOICES = 128


def to_requests(body: CompletionBody, service: Service) -> list[TextRequest]:
    """Return `n` requests for each prompt."""
    count = body.n or 1
    options.reject_unsupported(body.extras)
    gap = Infill(body.suffix) if body.suffix else None
    if body.best_of is not None and body.best_of != count:
        raise UsageError(f"best_of is {body.best_of}; needs the value of n, {count}", param="best_of")
    if body.echo and body.logprobs is not None:
        raise UsageError("echo is set together with logprobs; the prompt has no logprobs", param="echo")
    prompts = _prompts(body)
    if len(prompts) * count > MAX_CHOICES:
        raise UsageError(
            f"n is {count} for {len(prompts)} prompts; needs at most {MAX_CHOICES} choices", param="n"
        )
    fields = body.__dict__
    params = options.sampling(service.defaults(None, raw=True), fields, logprobs=body.logprobs)
    grammar = options.answer_grammar(fields)
    ends = options.ends(fields, service.session.tokenizer.vocab_size, constrained=grammar is not None)
    return [
        TextRequest(
            prompt=prompt,
            infill=gap,
            max_tokens=0 if only_echo(body) else options.token_limit(fields, "max_tokens", "n_predict"),
            sampling=each,
            stop=options.stops(body.stop),
            stop_token_ids=ends.stop_token_ids,
            ignore_eos=ends.ignore_eos,
            grammar=grammar,
            draft_budget=body.bough.budget if body.bough else None,
            compress=options.compression(fields),
        )
        for prompt in prompts
        for each in options.choice_params(params, count)
    ]


def only_echo(body: CompletionBody) -> bool:
    """Return whether the response is the prompt alone."""
    return bool(body.echo) and body.max_tokens == 0


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not body.suffix and (not prompt or not all(prompt)):
        raise UsageError("prompt is empty; needs some text", param="prompt")
    return list(prompt)


@dataclass(slots=True)
class CompletionWriter:
    service: Service
    body: CompletionBody
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    outputs: dict[int, GeneratedOutput] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)

    def write(self, index: int, piece: SessionEvent) -> bytes:
        fresh = index not in self.outputs
        output = self.outputs.setdefault(index, GeneratedOutput())
        begin = b""
        if fresh and self.body.echo:
            prompt = Text(self._echo(index))
            output.add(prompt)
            begin = self._chunk(index, prompt.text)
        # A completion is raw text: reasoning is part of it.
        if isinstance(piece, Reasoning):
            piece = Text(piece.text, piece.logprobs)
        output.add(piece)
        match piece:
            case Text(text, logprobs):
                return begin + self._chunk(index, text, logprobs=self._logprobs(index, logprobs))
            case Finished(reason=reason, stats=stats):
                timings = outputs.timings(stats) if self._timings_wanted else None
                return begin + self._chunk(index, "", reason=reason, timings=timings)
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

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        reason: str | None = None,
        logprobs: Object | None = None,
        timings: Object | None = None,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._head() | {"choices": [choice]}
        if self._usage_wanted:
            chunk["usage"] = None
        if timings is not None:
            chunk["timings"] = timings
        return event(chunk)

    def _head(self) -> Object:
        model = self.body.model or self.service.model_name
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": model,
            "system_fingerprint": self.service.fingerprint,
        }

    @property
    def _timings_wanted(self) -> bool:
        return bool(self.body.timings or self.body.timings_per_token)

    @property
    def _usage_wanted(self) -> bool:
        return bool((self.body.stream_options or {}).get("include_usage"))

    def end(self) -> bytes:
        if not self._usage_wanted:
            return DONE
        return event(self._head() | {"choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> Object:
        return usage_of(list(self.outputs.values()), self.body.n or 1)

    def keep_alive(self, job: Job) -> bytes:
        return comment(job)

    def failure(self, failure: Failure) -> bytes:
        return event(failure.openai()) + DONE

    def result(self) -> Object:
        choices = []
        self.offsets.clear()
        for index, output in sorted(self.outputs.items()):
            logprobs = self._logprobs(index, output.logprobs) if self.body.logprobs is not None else None
            reason = output.finished.reason if output.finished else "stop"
            choices.append(
                {"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": reason}
            )
        result = self._head() | {"choices": choices, "usage": self._usage()}
        if self._timings_wanted:
            stats = [output.finished.stats for output in self.outputs.values() if output.finished]
            result["timings"] = outputs.timings(*stats)
        return result

    def _logprobs(self, index: int, logprobs: list[TokenLogprob] | None) -> Object | None:
        if logprobs is None or self.body.logprobs is None:
            return None
        token_bytes = self.service.session.tokenizer.token_bytes
        offset = self.offsets.get(index, 0)
        columns: Object = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in logprobs:
            text = token_bytes(entry.token).decode(errors="replace")
            columns["tokens"].append(text)
            columns["token_logprobs"].append(max(entry.logprob, -9999.0))
            columns["top_logprobs"].append(
                {token_bytes(id).decode(errors="replace"): max(value, -9999.0) for id, value in entry.top}
            )
            columns["text_offset"].append(offset)
            offset += len(text)
        self.offsets[index] = offset
        return columns
