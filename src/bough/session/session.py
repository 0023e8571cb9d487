"""A loaded model that turns text into text: messages or a raw prompt in, pieces of text out.

The engine returns tokens; the session detokenises them, applies stop strings and parses reasoning and tool
calls. A stop string ends the text exactly before its first character, wherever token boundaries are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from bough.engine.engine import Engine
from bough.engine.events import Done, Event, Failed, Progress, Tokens, VerifiedTree
from bough.engine.sampler import TokenLogprob
from bough.engine.sequence import Sequence
from bough.engine.stats import RequestStats
from bough.errors import Cancelled
from bough.hub.recommended import NOTHING_KNOWN, Recommended
from bough.images.opening import ImageLimits
from bough.memory.planner import MemoryPlan
from bough.session.compression import Compression
from bough.session.constraint import TokenConstraint
from bough.session.events import Finished, Reasoning, SessionEvent, Text, TreeStep
from bough.session.output import OutputStream
from bough.session.reader import RequestReader
from bough.session.requests import Prompt, TextRequest
from bough.session.vectors import VectorGeneration, Vectors
from bough.text.template import ChatTemplate
from bough.text.tokenizer import Tokenizer

__all__ = ["Finished", "Progress", "Session", "Text", "TextRequest"]


LOOPED = "The reasoning repeated itself and was ended there."
ANSWER_LOOPED = "The answer repeated itself and was ended there."


class Session(RequestReader):
    def __init__(  # noqa: PLR0913 (what a session is made of)
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        plan: MemoryPlan,
        *,
        recommended: Recommended = NOTHING_KNOWN,
        break_loops: bool = True,
        save_costs: Callable[[], object] = lambda: None,
        compression: Compression | None = None,
        images: ImageLimits | None = None,
    ):
        super().__init__(
            tokenizer,
            template,
            engine.limits,
            recommended=recommended,
            break_loops=break_loops,
            compression=compression,
            images=images,
        )
        self.engine = engine
        self._vectors: Vectors | None = None
        self.plan = plan
        self.load_seconds: Mapping[str, float] = {}  # by phase: planning, reading, compiling, capturing
        self._save_costs = save_costs
        self._generations: dict[Sequence, TextGeneration] = {}
        self._undelivered: list[tuple[Generation, SessionEvent | Failed]] = []  # before the next step

    @property
    def caches_prefixes(self) -> bool:
        return self.engine.prefixes.enabled

    def compute_vectors(self, vectors: Vectors) -> None:
        """Take requests for vectors from now on, and none for text."""
        self._vectors, self.vector_spec = vectors, vectors.spec

    def generate(self, request: TextRequest) -> Iterator[SessionEvent]:
        """Run a request to its end. Closing the iterator, or an error, frees its memory."""
        generation = self.begin(request)
        try:
            ended = False
            while not ended:
                for event in [event for owner, event in self.step() if owner is generation]:
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
                    ended = isinstance(event, Finished)
        finally:
            self.end(generation)
            self._save_costs()

    @property
    def parallel(self) -> int:
        return self.engine.slots

    @property
    def running(self) -> int:
        return self.engine.running if self._vectors is None else len(self._vectors)

    @property
    def idle(self) -> bool:
        return self.engine.idle and not self._undelivered and not self._vectors

    @property
    def amid_chunk(self) -> bool:
        return self.engine.amid_chunk

    def use_idle_time(self) -> bool:
        """Do a piece of work that later requests will profit from; return whether there was any."""
        return self._vectors is None and self.engine.use_idle_time()

    def begin(self, request: TextRequest, *, beside: "Generation | None" = None) -> "Generation":
        """Queue a request, which `step` runs; raise if it cannot run.

        beside: a generation that may have the same prompt, which is then processed only once.
        """
        try:
            prompt = request.encoded or _prompt_of(beside, request) or self.prepare(request).encoded
        except Cancelled:
            generation = UnreadGeneration(request)
            self._undelivered.append((generation, generation.cancelled_before()))
            return generation
        assert prompt is not None
        if self._vectors is not None:
            return self._vectors.begin(request, prompt.ids)
        output = self._prompts.output(request, prompt)
        leader = beside.sequence if isinstance(beside, TextGeneration) else None
        sequence = self.engine.add(
            self._engine_request(request, prompt, may_stop=output.may_end), leader=leader
        )
        if prompt.compressed is not None:
            sequence.stats.compressed(prompt.compressed.report)
        generation = self._generations[sequence] = TextGeneration(
            replace(request, encoded=prompt), self.engine, sequence, output, self._show
        )
        return generation

    def step(self) -> list[tuple["Generation", SessionEvent | Failed]]:
        """Run one step of the engine; return what it brought to whom, the end of a request included.

        What fails is the request that the failing work was for. All others go on.
        """
        events, self._undelivered = self._undelivered, []
        if self._vectors is not None:
            return [*events, *self._vectors.step()]
        for generation in self._running():
            if generation.request.cancelled():
                events += self._text(generation, [self.engine.cancel(generation.sequence)])
        try:
            step = self.engine.step()
        except Exception as error:
            owners = [self._generations[each] for each in self.engine.working if each in self._generations]
            if not owners:
                raise
            return [*events, *(self._failed(generation, error) for generation in owners)]
        by_owner: dict[Sequence, list[Event]] = {}
        for sequence, event in step:
            by_owner.setdefault(sequence, []).append(event)
        for sequence, events_of in by_owner.items():
            if sequence in self._generations:
                events += self._text(self._generations[sequence], events_of)
        if self.engine.idle:
            self._save_costs()
        return events

    def end(self, generation: "Generation") -> None:
        """Free what a generation holds, wherever it is. Idempotent."""
        if isinstance(generation, VectorGeneration):
            assert self._vectors is not None
            self._vectors.end(generation)
        generation.ended = True
        if isinstance(generation, TextGeneration):
            self._generations.pop(generation.sequence, None)
            self.engine.release(generation.sequence)

    def _running(self) -> list["TextGeneration"]:
        return [each for each in self._generations.values() if not each.ended]

    def _text(
        self, generation: "TextGeneration", step: list[Event]
    ) -> list[tuple["Generation", SessionEvent | Failed]]:
        """Return a generation's events of one engine step; an error of its text is its own."""
        pairs: list[tuple[Generation, SessionEvent | Failed]] = []
        try:
            for event in generation.events(step):
                pairs.append((generation, event))
        except Exception as error:
            return [*pairs, self._failed(generation, error)]
        if generation.ended:
            # The engine releases it at its next step, after its reader has the end of the text.
            self._generations.pop(generation.sequence, None)
        return pairs

    def _failed(self, generation: "TextGeneration", error: Exception) -> tuple["Generation", Failed]:
        self.end(generation)
        return generation, Failed(error)

    def _show(self, tree: VerifiedTree) -> TreeStep:
        texts = [self.tokenizer.token_bytes(token).decode(errors="replace") for token in tree.tokens]
        return TreeStep(texts, tree.parents, tree.accepted, 1000 * tree.draft_s, 1000 * tree.step_s)


def _prompt_of(beside: "Generation | None", request: TextRequest) -> Prompt | None:
    """Return the prompt of a generation that the request is another choice of."""
    if beside is None or beside.request.messages is not request.messages:
        return None
    return beside.request.encoded if beside.request.prompt is request.prompt else None


class UnreadGeneration:
    """A request that was begun, and perhaps cancelled while its prompt was encoded."""

    def __init__(self, request: TextRequest):
        self.request = request
        self.ended = False

    def cancelled_before(self) -> Finished:
        """End a request that was cancelled while its prompt was encoded."""
        self.ended = True
        return Finished(reason="cancelled", tokens=[], stats=RequestStats(0))


class TextGeneration(UnreadGeneration):
    """One request's engine events turned into session events."""

    def __init__(
        self,
        request: TextRequest,
        engine: Engine,
        sequence: Sequence,
        output: OutputStream,
        show: Callable[[VerifiedTree], TreeStep],
    ):
        super().__init__(request)
        self.sequence = sequence
        self._engine, self._output, self._show = engine, output, show
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
                case Failed(error):
                    raise error
                case Done():
                    self.ended = True
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
        return [*before, Tokens(tokens.ids[:keep], logprobs), self._engine.stop(self.sequence, keep=keep)]

    def _text(self) -> Iterator[SessionEvent]:
        for piece in self._output.take(self._pending):
            yield piece
            if isinstance(piece, Text | Reasoning):
                self._pending = None

    def _finished(self, done: Done) -> Finished:
        stats = done.stats
        if stats.compression is not None and stats.compression.reason:
            stats.notes = [*stats.notes, f"The prompt was not compressed: {stats.compression.reason}."]
        stats.reasoning_tokens = min(self._output.reasoning_tokens, len(self._tokens))
        constraint = self.sequence.request.constraint
        if isinstance(constraint, TokenConstraint):
            stats.reasoning_loops = constraint.loops_ended
            repeats = constraint.spec.repeats
            stats.answer_loops = int(repeats is not None and repeats.ended)
            stats.avoided_sentences = 0 if repeats is None else repeats.avoided
            looped = (LOOPED * bool(stats.reasoning_loops), ANSWER_LOOPED * stats.answer_loops)
            stats.notes = [*stats.notes, *filter(None, looped)]
        called = done.reason == "stop" and self._output.called
        return Finished(
            reason="tool_calls" if called else done.reason,
            stop_string=self._output.stop_string,
            tokens=self._tokens,
            stats=stats,
            logprobs=self._logprobs,
        )


Generation = UnreadGeneration | TextGeneration | VectorGeneration  # a request that was begun
