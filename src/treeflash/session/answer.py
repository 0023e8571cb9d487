"""Answer: committed tokens to the events of a session, and where the text ends; knows no tensors."""

import secrets
from collections.abc import Iterator, Sequence

from treeflash.engine.sampler import TokenLogprob
from treeflash.session.requests import Reasoning, SessionEvent, Text, ToolArguments, ToolCall
from treeflash.text.output import Delta, OutputParser
from treeflash.text.stops import StopStrings
from treeflash.text.stream import TextStream


class Answer:
    """Stop strings are looked for in the content alone: reasoning and calls are not the answer's text."""

    def __init__(
        self, stream: TextStream, parser: OutputParser, stop: Sequence[str], *, one_call: bool = False
    ):
        self._stream, self._parser = stream, parser
        self._stops = StopStrings(stop)
        self._one_call = one_call
        self.may_end = one_call or any(stop)  # whether `write` ever gives a number
        self._ready: list[Delta] = []
        self.reasoning_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return self._stops.hit

    @property
    def called(self) -> bool:
        """Whether a call is complete."""
        return self._parser.calls_done > 0

    def write(self, tokens: Sequence[int]) -> int | None:
        """Takes committed tokens; a number: the text ends with so many of them."""
        for count, token in enumerate(tokens, 1):
            self.reasoning_tokens += self._parser.in_reasoning
            self._add(self._parser.push(self._stream.push([token])))
            if self._stops.hit is not None or (self._one_call and self.called):
                return count
        return None

    def finish(self, *, whole: bool) -> None:
        """No more tokens come; not `whole`: they were cut off."""
        if self._stops.hit is None:
            self._add(self._parser.push(self._stream.flush()))
            self._add(self._parser.flush(whole=whole))
        if self._stops.hit is None:
            self._ready.append(Delta("content", self._stops.flush()))

    def take(self, logprobs: list[TokenLogprob] | None = None) -> Iterator[SessionEvent]:
        """What is ready to be shown; the log probabilities go with the first piece of text."""
        ready, self._ready = _joined(self._ready), []
        for delta in ready:
            match delta.kind:
                case "content":
                    yield Text(delta.text, logprobs)
                case "reasoning":
                    yield Reasoning(delta.text, logprobs)
                case "call":
                    yield ToolCall(delta.index, f"call_{secrets.token_hex(12)}", delta.text)
                case "arguments":
                    yield ToolArguments(delta.index, delta.text)
            if delta.kind in ("content", "reasoning"):
                logprobs = None

    def _add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if self._stops.hit is not None:
                return
            if delta.kind == "content":
                delta = Delta("content", self._stops.push(delta.text))
            elif delta.kind == "call":
                # No stop string goes on behind a call, and what was held back stands before it.
                self._ready.append(Delta("content", self._stops.flush()))
            self._ready.append(delta)


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one; nothing empty."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.index) == (delta.kind, delta.index) and delta.kind != "call":
            joined[-1] = Delta(delta.kind, last.text + delta.text, delta.index)
        elif delta.text:
            joined.append(delta)
    return joined
