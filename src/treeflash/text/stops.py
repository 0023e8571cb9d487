"""Finds stop strings in text that arrives in pieces; any split of the text gives the same result."""

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # could still become a stop string
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Text that may be shown now; nothing any more once a stop string was found."""
        if self.hit is not None:
            return ""
        self._held += text
        # Where several match, the one that is complete first in the text wins; among those the longest.
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
        """What was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _possible_start(self) -> int:
        """Index from which the held text could be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for start in range(max(0, len(self._held) - longest + 1), len(self._held)):
            if any(stop.startswith(self._held[start:]) for stop in self._stops):
                return start
        return len(self._held)
