"""Measured step costs in a small JSON file, so that a new run need not measure them again."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from bough.spec.costs import StepCosts


class CostFile:
    """Costs by device and model. What cannot be read or written is measured again."""

    def __init__(self, path: Path | None, key: str):
        self._path, self._key = path, key

    def load(self) -> StepCosts:
        costs, entry = self._costs(), self._read().get(self._key)
        # Without a file there is no first contact: each would be one.
        costs.checked = self._path is None or (isinstance(entry, dict) and entry.get("checked") is True)
        suspected = entry.get("suspected") if isinstance(entry, dict) else None
        if isinstance(suspected, dict) and all(isinstance(count, int) for count in suspected.values()):
            costs.suspected = suspected
        return costs

    def _costs(self) -> StepCosts:
        entry: Any = self._read().get(self._key)
        try:
            steps = {int(rows): float(seconds) for rows, seconds in entry["step"].items()}
            draft = {int(mix): float(seconds) for mix, seconds in entry["draft"].items()}
            gap = {str(kind): float(seconds) for kind, seconds in entry.get("gap", {}).items()}
            backlog = float(entry.get("backlog", 0.0))
        except (TypeError, KeyError, ValueError, AttributeError):
            return StepCosts()
        sound = all(1 <= rows <= 64 and seconds > 0 for rows, seconds in steps.items())
        sound = sound and all(mix >= 0 and seconds >= 0 for mix, seconds in draft.items())
        sound = sound and backlog >= 0 and all(seconds >= 0 for seconds in gap.values())
        return StepCosts(steps, draft, gap, backlog) if sound else StepCosts()

    def save(self, costs: StepCosts) -> None:
        if self._path is None:
            return
        book = self._read()
        book[self._key] = {
            name: {str(key): seconds for key, seconds in costs_by.items()}
            for name, costs_by in (("step", costs.step), ("draft", costs.draft), ("gap", costs.gap))
        } | {"backlog": costs.backlog, "checked": costs.checked, "suspected": costs.suspected}
        part = self._path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(book))
            part.replace(self._path)

    def _read(self) -> dict[str, Any]:
        try:
            book = json.loads(self._path.read_text()) if self._path else {}
        except (OSError, ValueError):
            return {}
        return book if isinstance(book, dict) else {}
