"""What /props shows of a loaded model."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bough.config import EngineConfig
from bough.gguf.reader import GGUFFile
from bough.hub.names import GGUFSet
from bough.memory.planner import format_names
from bough.session.expert_uses import caches_of
from bough.session.session import Session


@dataclasses.dataclass(frozen=True, slots=True)
class FileFacts:
    """What a model's file says without being loaded."""

    architecture: str = ""
    parameters: int = 0
    quantisation: str = ""

    @property
    def parameter_size(self) -> str:
        billions = self.parameters / 1e9
        size = f"{billions:.1f}B" if billions >= 1 else f"{1e3 * billions:.1f}M"
        return size if self.parameters else ""


@functools.cache
def file_facts(path: Path) -> FileFacts:
    with GGUFFile.open(path) as file:
        weights: dict[str, int] = {}
        for info in file.tensors.values():
            weights[info.type.name] = weights.get(info.type.name, 0) + info.elements
        label = GGUFSet((path.name,), 0).label
        quantisation = max(weights, key=lambda name: weights[name]) if label == path.name else label
        return FileFacts(file.architecture, sum(weights.values()), quantisation)


def _proposer(session: Session, config: EngineConfig) -> str:
    """Return what proposes tokens: draft, mtp, lookup or nothing."""
    if config.speculation is None:
        return "nothing"
    if config.draft is not None:
        return "draft"
    return "mtp" if session.engine.drafter.features.taps else "lookup"


def _experts(session: Session) -> Mapping[str, Any] | None:
    """Return how many experts of steps had a place on the device; None: all have one."""
    use = caches_of(session.engine.target).use
    return None if use is None else {"hits": use.hits, "misses": use.misses, "hit_rate": round(use.share, 4)}


def model_facts(session: Session, path: Path, config: EngineConfig) -> Mapping[str, Any]:
    model, states = session.engine.target, session.engine.states
    return {
        "file": path.name,
        "architecture": model.spec.architecture,
        "context_length": model.spec.context_length,
        "device": str(model.device),
        "pooling": session.vector_spec and session.vector_spec.pooling.name,
        "weights_bytes": session.plan.weights,
        "memory_bytes": session.plan.total,
        "kv": format_names(session.plan.kv),
        "parallel": session.parallel,
        "shared_tokens": session.plan.kv_tokens,
        "free": {"slots": states.free_slots, "pages": states.pages.free, "of_pages": states.pages.capacity},
        "window": states.buffers.window,
        "approximate": session.engine.approximate,
        "draft": config.draft.path.name if config.draft else None,
        "proposes": _proposer(session, config),
        "warnings": session.engine.drafter.notes(-1).warnings,
        "budget": config.speculation.budget if config.speculation else 0,
        "prefix_cache": dataclasses.asdict(session.engine.prefixes.usage),
        "experts": _experts(session),
        "compress": config.compress.mode,
        "chain": bool(config.speculation and config.speculation.chain),
    }
