"""A loaded model that turns text into text: messages or a raw prompt in, pieces of text out.

The engine returns tokens; the session detokenises them, applies stop strings and parses reasoning and tool
calls. A stop string ends the text exactly before its first character, wherever token boundaries are.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from treeflash.engine.engine import Engine
from treeflash.engine.events import Done, Event, Progress, Tokens, VerifiedTree
from treeflash.engine.sampler import SamplingParams, TokenLogprob
from treeflash.engine.sequence import Request, Sequence
from treeflash.engine.stats import RequestStats
from treeflash.errors import Cancelled
from treeflash.hub.catalog import Card
from treeflash.memory.planner import MemoryPlan
from treeflash.session.output import OutputStream
from treeflash.session.prompts import Prompts
from treeflash.session.requests import Finished, Prompt, Reasoning, SessionEvent, Text, TextRequest, TreeStep
from treeflash.text.template import ChatTemplate
from treeflash.text.tokenizer import EncodeLimit, Tokenizer

__all__ = ["Finished", "Progress", "Session", "Text", "TextRequest"]


class Session:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        plan: MemoryPlan,
        *,
        card: Card | None = None,
        file_sampling: SamplingParams | None = None,
        save_costs: Callable[[], None] = lambda: None,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.plan = plan
        self.card = card
        self._file_sampling = file_sampling or SamplingParams()
        self._save_costs = save_costs
        self._prompts = Prompts(tokenizer, template)

    @property
    def max_ctx(self) -> int:
        return self.engine.max_ctx

    def sampling_for(self, thinking: bool | None) -> SamplingParams:
        """Return the recommended sampling: the model card's, else the file's; greedy if neither has any.

        thinking: whether the request thinks; None: as the model does by default.
        """
        if self.card is None or not self.card.sampling:
            return self._file_sampling
        thinks = self.card.thinking if thinking is None else thinking
        return SamplingParams(**asdict(self.card.sampling["thinking" if thinks else "plain"]))

    def encode(self, request: TextRequest) -> list[int]:
        """Return the prompt's token ids; raises if the template refuses the messages."""
        return self._prompts.encode(request, self._limit(request, stops_at_tokens=False)).ids

    def check(self, request: TextRequest) -> TextRequest:
        """Return the request with its encoded prompt; raise what `generate` would before its first step.

        It can run in another thread than `generate`.
        """
        prompt = self._prompts.encode(request, self._limit(request))
        self.engine.check(self._engine_request(request, prompt, self._prompts.output(request, prompt)))
        return replace(request, encoded=prompt)

    def generate(self, request: TextRequest) -> Iterator[SessionEvent]:
        """Run a request to its end. Closing the iterator, or an error, frees its memory."""
        try:
            prompt = request.encoded or self._prompts.encode(request, self._limit(request))
        except Cancelled:
            yield Finished(reason="cancelled", tokens=[], stats=RequestStats(0))
            return
        output = self._prompts.output(request, prompt)
        sequence = self.engine.add(self._engine_request(request, prompt, output))
        generation = _Generation(self.engine, sequence, output, self._show)
        try:
            while not sequence.finished:
                if request.cancelled():
                    yield from generation.events([self.engine.cancel(sequence)])
                else:
                    step = self.engine.step()
                    yield from generation.events([event for owner, event in step if owner is sequence])
        finally:
            self.engine.release(sequence)
            self._save_costs()

    def _limit(self, request: TextRequest, *, stops_at_tokens: bool = True) -> EncodeLimit:
        raisable = self.engine.max_ctx_raisable
        return EncodeLimit(self.max_ctx, request.cancelled, stops_at_tokens, raisable)

    def _engine_request(self, request: TextRequest, prompt: Prompt, output: OutputStream) -> Request:
        room = self.max_ctx - len(prompt.ids) + 1
        return Request(
            prompt=prompt.ids,
            max_tokens=max(1, room) if request.max_tokens is None else request.max_tokens,
            sampling=request.sampling,
            stop_ids=self._stop_ids(request),
            may_stop=output.may_end,
            constraint=self._prompts.constraint(request, prompt),
            draft_budget=request.draft_budget,
            trees=request.trees,
            boundaries=prompt.boundaries,
        )

    def _stop_ids(self, request: TextRequest) -> frozenset[int]:
        return request.stop_token_ids | (frozenset() if request.ignore_eos else self.tokenizer.stop_ids)

    def _show(self, tree: VerifiedTree) -> TreeStep:
        texts = [self.tokenizer.token_bytes(token).decode(errors="replace") for token in tree.tokens]
        return TreeStep(texts, tree.parents, tree.accepted, 1000 * tree.draft_s, 1000 * tree.step_s)


class _Generation:
    """One request's engine events turned into session events."""

    def __init__(
        self,
        engine: Engine,
        sequence: Sequence,
        output: OutputStream,
        show: Callable[[VerifiedTree], TreeStep],
    ):
        self._engine, self._sequence, self._output, self._show = engine, sequence, output, show
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if sequence.sampling.logprobs is None else []
        self._pending: list[TokenLogprob] | None = None  # since the last piece of text

    def events(self, step: list[Event]) -> Iterator[SessionEvent]:
        """Turn the events of one engine step into text; a stop string ends the sequence inside it."""
        for event in self._apply_stops(step):
            match event:
                case Progress():
                    yield event
                case VerifiedTree():
                    yield self._show(event)
                case Tokens(ids, logprobs):
                    self._tokens += ids
                    if self._logprobs is not None:
                        self._logprobs += logprobs or []
                        self._pending = (self._pending or []) + (logprobs or [])
                    yield from self._text()
                case Done():
                    self._output.finish(whole=event.reason == "stop")
                    yield from self._text()
                    yield self._finished(event)

    def _apply_stops(self, step: list[Event]) -> list[Event]:
        """Return the step's events, cut where a stop string or the last allowed tool call ends the text."""
        tokens = next((event for event in step if isinstance(event, Tokens)), None)
        keep = self._output.write(tokens.ids) if tokens is not None else None
        if tokens is None or keep is None:
            return step
        logprobs = None if tokens.logprobs is None else tokens.logprobs[:keep]
        before = [event.cut(keep) if isinstance(event, VerifiedTree) else event for event in step]
        before = [event for event in before if not isinstance(event, Tokens | Done)]
        return [*before, Tokens(tokens.ids[:keep], logprobs), self._engine.stop(self._sequence, keep=keep)]

    def _text(self) -> Iterator[SessionEvent]:
        for piece in self._output.take(self._pending):
            yield piece
            if isinstance(piece, Text | Reasoning):
                self._pending = None

    def _finished(self, done: Done) -> Finished:
        stats = done.stats
        stats.reasoning_tokens = min(self._output.reasoning_tokens, len(self._tokens))
        called = done.reason == "stop" and self._output.called
        return Finished(
            reason="tool_calls" if called else done.reason,
            stop_string=self._output.stop_string,
            tokens=self._tokens,
            stats=stats,
            logprobs=self._logprobs,
        )
