"""The tilings that `bough tune` measured on this machine's GPUs, in a JSON file."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bough.kernels.quant_matmul.rows import BUCKETS
from bough.kernels.quant_matmul.tiling import MAX_STAGES, Tiling
from bough.kernels.runtime.nvrtc import cache_folder

_VERSION = 2
_INVALID = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)

log = logging.getLogger(__name__)


class TunedFile:
    """Tilings by kind of GPU and bucket. A file that cannot be read counts as empty."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def default(cls) -> "TunedFile":
        return cls(cache_folder() / "tilings.json")

    def load(self, kind: str) -> dict[int, Tiling]:
        """Return the tilings measured on such GPUs, by bucket; warn about an invalid file and return none."""
        try:
            entry = self._kinds().get(kind, {})
            return {_bucket(rows): _tiling(values) for rows, values in entry.items()}
        except _INVALID as error:
            log.warning("%s is not used: %s; `bough tune --reset` removes it", self.path, error)
            return {}

    def save(self, kind: str, tilings: Mapping[int, Tiling]) -> None:
        """Replace the tilings of this kind of GPU, or remove its entry if there are none."""
        try:
            kinds = self._kinds()
        except _INVALID:
            kinds = {}
        kinds.pop(kind, None)
        if tilings:
            kinds[kind] = {str(rows): asdict(tiling) for rows, tiling in tilings.items()}
        elif not kinds:
            self.remove()
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"version": _VERSION, "kinds": kinds}, indent=1), encoding="utf-8")
        part.replace(self.path)

    def remove(self) -> bool:
        """Delete the file, and return whether there was one."""
        existed = self.path.exists()
        self.path.unlink(missing_ok=True)
        return existed

    def _kinds(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise ValueError(f"it is not of version {_VERSION}")
        return dict(content["kinds"])


def _bucket(rows: str) -> int:
    if int(rows) not in BUCKETS:
        raise ValueError(f"it names {rows} rows, needed one of {', '.join(map(str, BUCKETS))}")
    return int(rows)


def _tiling(values: Mapping[str, Any]) -> Tiling:
    tiling = Tiling(**values)
    stages = tiling.stages
    if type(stages) is not int or not 2 <= stages <= MAX_STAGES or type(tiling.halfway) is not bool:
        raise ValueError(f"it holds {dict(values)}, needed 2 to {MAX_STAGES} stages and a switch")
    return tiling
