"""A session that follows a script instead of a model."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from bough.engine.events import Failed
from bough.engine.sampler import SamplingParams, TokenLogprob
from bough.engine.stats import RequestStats, StepRecord
from bough.errors import PromptTooLong, UsageError
from bough.images.opening import ImageLimits
from bough.session.events import (
    Finished,
    Progress,
    Reasoning,
    SessionEvent,
    Text,
    ToolArguments,
    ToolCall,
    TreeStep,
)
from bough.session.requests import TextRequest
from bough.text.template import ChatTemplate
from tests.text.templates import QWEN35, SEEING


class Bytes:
    """A tokenizer whose tokens are the 256 bytes."""

    vocab_size = 256
    bos_id = None
    infill = None

    def encode(self, text: str, **_options) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, ids: list[int], **_options) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        if not 0 <= id < 256:
            raise UsageError(f"token id {id} is not a byte")
        return bytes([id])


Script = Callable[[TextRequest], Iterable[SessionEvent | float | Exception]]


class ScriptedSession:
    """Yields the events of a script, sleeps for its numbers (seconds) and raises its exceptions."""

    vector_spec = None
    caches_prefixes = True

    def __init__(
        self,
        script: Script,
        *,
        max_ctx: int = 200_000,
        parallel: int = 1,
        images: ImageLimits | None = None,
    ):
        self.images = images
        self.script, self.max_ctx, self.parallel = script, max_ctx, parallel
        self._generations: list[Iterator[SessionEvent]] = []
        self.tokenizer = Bytes()
        source = QWEN35 if images is None else SEEING
        self.template = ChatTemplate(source, controls=["<|im_start|>", "<|im_end|>", "<|image_pad|>"])
        self.seen: list[TextRequest] = []
        self.cancelled = 0
        self.busy = threading.Event()

    def sampling_for(self, thinking: bool | None, *, raw: bool = False) -> SamplingParams:
        return SamplingParams(recommended=not raw)

    def encode(self, request: TextRequest) -> list[int]:
        if request.prompt is not None:
            prompt = request.prompt
            return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        rendered = self.template.render(
            request.messages or [],
            tools=request.tools,
            thinking=request.thinking,
            continue_final=request.continue_final,
            **request.template_options,
        )
        ids = self.tokenizer.encode(rendered.text)
        if len(ids) > self.max_ctx:
            raise PromptTooLong(len(ids), self.max_ctx)
        return ids

    def check(self, request: TextRequest) -> TextRequest:
        self.encode(request)
        return request

    def scores(self, request: TextRequest) -> bool:
        return False

    @property
    def running(self) -> int:
        return len(self._generations)

    @property
    def idle(self) -> bool:
        return not self._generations

    @property
    def amid_chunk(self) -> bool:
        return False

    def use_idle_time(self) -> bool:
        return False

    def begin(self, request: TextRequest, *, beside: object = None) -> Iterator[SessionEvent]:
        self._generations.append(self.generate(request))
        return self._generations[-1]

    def step(self) -> list[tuple[Iterator[SessionEvent], SessionEvent | Failed]]:
        """Advance every script by one event."""
        found: list[tuple[Iterator[SessionEvent], SessionEvent | Failed]] = []
        for generation in list(self._generations):
            try:
                event: SessionEvent | Failed = next(generation)
            except Exception as error:
                event = Failed(error)
            if isinstance(event, Failed | Finished):
                self.end(generation)
            found.append((generation, event))
        return found

    def end(self, generation: Iterator[SessionEvent]) -> None:
        if generation in self._generations:
            self._generations.remove(generation)

    def generate(self, request: TextRequest) -> Iterator[SessionEvent]:
        ids = self.encode(request)
        self.seen.append(request)
        self.busy.set()
        stats = RequestStats(prompt_tokens=len(ids), cached_tokens=1, seed=request.sampling.seed or 0)
        tokens: list[int] = []
        reason, stop_string = "stop", None
        yield Progress(0, len(ids), 1)
        for step in self.script(request):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                end = time.monotonic() + step
                while time.monotonic() < end and not request.cancelled():
                    time.sleep(0.002)
                continue
            if request.cancelled():
                self.cancelled += 1
                reason = "cancelled"
                break
            if isinstance(step, Finished):
                reason, stop_string = step.reason, step.stop_string
                break
            if isinstance(step, Text | Reasoning):
                fresh = self.tokenizer.encode(step.text)
                tokens += fresh
                stats.token_arrived()
                stats.step_done(StepRecord(4, len(fresh), 0.0), committed=max(1, min(4, len(fresh))))
                if isinstance(step, Reasoning):
                    stats.reasoning_tokens += len(fresh)
                elif request.sampling.logprobs is not None:
                    top = [(65, -1.5)] * min(1, request.sampling.logprobs)
                    step = Text(step.text, [TokenLogprob(token, -0.5, top) for token in fresh])
            if isinstance(step, ToolCall):
                reason = "tool_calls"
            if not isinstance(step, TreeStep) or request.trees:
                yield step
        stats.generated_tokens = len(tokens)
        yield Finished(reason=reason, stop_string=stop_string, tokens=tokens, stats=stats)


def said(request: TextRequest) -> str:
    """Return the last message as text."""
    if request.messages is None:
        return str(request.prompt)
    content = request.messages[-1].get("content")
    return content if isinstance(content, str) else str(content)


def echo(request: TextRequest) -> Iterator[SessionEvent | float]:
    """Reason if requested, call the first tool unless it has its result, else echo the message."""
    if request.thinking:
        yield Reasoning("Hmm. ")
        yield Reasoning("Yes.")
    last = (request.messages or [{"role": "user"}])[-1]
    if request.tools and request.tool_choice != "none" and last["role"] != "tool":
        tool = request.tools[0]["function"]
        yield Text("Let me see.")
        yield ToolCall(0, "call_1", tool["name"])
        for piece in ('{"city"', ': "Par', 'is"}'):
            yield ToolArguments(0, piece)
        return
    yield TreeStep(["a", "b", "c"], [-1, 0, 0], [0, 1], 0.5, 2.0)
    for word in f"You said: {said(request)}".split(" "):
        yield Text(word + " ")
