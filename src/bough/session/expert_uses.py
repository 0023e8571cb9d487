"""How often each expert of a model was used, in a file: the next start gives places to those used most."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from bough.models.decoder import Decoder, Target
from bough.models.expert_caches import ExpertCaches

_KEPT = 0.5  # of the counts of earlier runs, so that a new kind of work takes over


def caches_of(target: Target) -> ExpertCaches:
    """Return the caches of a model's experts; native code has none."""
    return target.expert_caches if isinstance(target, Decoder) else ExpertCaches.of(())


class ExpertUses:
    """The counts of one model, beside the costs of steps. What cannot be read is counted anew."""

    def __init__(self, costs: Path | None, model: Path, caches: ExpertCaches):
        """`costs`: the file of steps' costs; None: nothing is kept."""
        key = hashlib.sha256(f"{model.name} {model.stat().st_size}".encode()).hexdigest()[:16]
        self._path = None if costs is None or not caches.layers else costs.with_name(f"experts-{key}.json")
        self._caches = caches
        self._before = self._read()

    def warm(self) -> None:
        """Give the places on the device to the experts that were used most."""
        if self._caches.layers:
            self._caches.fill(self._before)

    def save(self) -> None:
        if self._path is None:
            return
        uses = self._caches.uses
        if self._before is not None:
            layers = zip(uses, self._before, strict=True)
            uses = [[a + int(_KEPT * b) for a, b in zip(*layer, strict=True)] for layer in layers]
        part = self._path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(uses))
            part.replace(self._path)

    def _read(self) -> list[list[int]] | None:
        try:
            uses = json.loads(self._path.read_text()) if self._path else None
        except (OSError, ValueError):
            return None
        shape = [len(layer.cache.places) for layer in self._caches.layers if layer.cache is not None]
        sound = isinstance(uses, list) and all(isinstance(layer, list) for layer in uses)
        if not sound or [len(layer) for layer in uses] != shape:
            return None
        return uses if all(isinstance(count, int) for layer in uses for count in layer) else None
