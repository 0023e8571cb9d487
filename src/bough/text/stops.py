"""StopStrings: finds stop strings in streamed text; any split of the text gives the same result."""

from collections.abc import Sequence


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
