"""Where streamed text ends; any split of the text gives the same result."""

import time
from collections.abc import Callable, Sequence


class StopStrings:
    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # the possible start of a stop string
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Return the text that precedes any stop string so far; nothing after one was found."""
        if self.hit is not None:
            return ""
        self._held += text
        # Of several matches the one that ends first wins; among those the longest.
        ends = [
            (start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0
        ]
        if ends:
            _, start, self.hit = min(ends)
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._possible_start()
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        rest, self._held = self._held, ""
        return rest

    def _possible_start(self) -> int:
        """Return the index from which the held text could begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for start in range(max(0, len(self._held) - longest + 1), len(self._held)):
            if any(stop.startswith(self._held[start:]) for stop in self._stops):
                return start
        return len(self._held)


class LineStop:
    """Ends a text with one of its lines: after a time, or before a line that is indented less.

    A blank line is indented less, as llama.cpp has it for editors.
    """

    def __init__(
        self, seconds: float | None = None, indent: int = 0, *, now: Callable[[], float] = time.perf_counter
    ):
        """`seconds`: from the first text on; None: no limit. `indent`: spaces and tabs; 0: any."""
        self._seconds, self._indent, self._now = seconds, indent, now
        self._begun: float | None = None
        self._held = ""  # a line's end and the white space after it
        self.hit = False

    def push(self, text: str) -> str:
        """Return the text before the end, if there is one; nothing after it was found."""
        shown = ""
        if self._begun is None and text:
            self._begun = self._now()
        for character in text:
            if self.hit:
                break
            if self._held and character in " \t":
                self._held += character
                continue
            if self._held and len(self._held) <= self._indent:
                self.hit = True
                break
            shown, self._held = shown + self._held, ""
            if character != "\n":
                shown += character
            elif self._seconds is not None and self._now() - (self._begun or 0.0) > self._seconds:
                self.hit = True
            else:
                self._held = character
        return shown

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        rest, self._held = self._held, ""
        return "" if self.hit else rest
