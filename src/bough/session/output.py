"""OutputStream: turns committed tokens into session events and finds stop strings."""

import secrets
from collections.abc import Iterator, Sequence

from bough.engine.sampler import TokenLogprob
from bough.session.events import Reasoning, SessionEvent, Text, ToolArguments, ToolCall
from bough.text.output import Delta, OutputParser
from bough.text.stops import LineStop, StopStrings
from bough.text.stream import TextStream


class OutputStream:
    """The output of one request; stop strings are searched for in the content, not in reasoning or calls."""

    def __init__(
        self,
        stream: TextStream,
        parser: OutputParser,
        stop: Sequence[str],
        *,
        one_call: bool = False,
        lines: LineStop | None = None,
    ):
        self._stream, self._parser = stream, parser
        self._stops, self._lines = StopStrings(stop), lines
        self._one_call = one_call
        # Whether `write` can return a count.
        self.may_end = one_call or any(stop) or lines is not None
        self._ready: list[Delta] = []
        self.reasoning_tokens = 0

    @property
    def stop_string(self) -> str | None:
        return self._stops.hit

    @property
    def called(self) -> bool:
        return self._parser.calls_done > 0

    def write(self, tokens: Sequence[int]) -> int | None:
        """Add committed tokens; return how many to keep, the last one included; None: the text goes on."""
        for count, token in enumerate(tokens, 1):
            self.reasoning_tokens += self._parser.in_reasoning
            self._add(self._parser.push(self._stream.push([token])))
            if self._ended or (self._one_call and self.called):
                return count
        return None

    def finish(self, *, whole: bool) -> None:
        """End the stream; `whole` is False where the token limit or a cancellation cut it off."""
        if not self._ended:
            self._add(self._parser.push(self._stream.flush()))
            self._add(self._parser.flush(whole=whole))
        if not self._ended:
            self._ready.append(Delta("content", self._rest()))

    @property
    def _ended(self) -> bool:
        return self._stops.hit is not None or (self._lines is not None and self._lines.hit)

    def _rest(self) -> str:
        rest = self._stops.flush()
        return rest if self._lines is None else self._lines.push(rest) + self._lines.flush()

    def take(self, logprobs: list[TokenLogprob] | None = None) -> Iterator[SessionEvent]:
        """Yield the events that are ready; the first piece of text carries the log probabilities."""
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
            if self._ended:
                return
            if delta.kind == "content":
                text = self._stops.push(delta.text)
                delta = Delta("content", text if self._lines is None else self._lines.push(text))
            elif delta.kind == "call":
                # A stop string does not continue after a call, so text held back for one precedes the call.
                self._ready.append(Delta("content", self._stops.flush()))
            self._ready.append(delta)


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Merge neighbouring deltas of one kind and drop empty ones."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.index) == (delta.kind, delta.index) and delta.kind != "call":
            joined[-1] = Delta(delta.kind, last.text + delta.text, delta.index)
        elif delta.text:
            joined.append(delta)
    return joined
