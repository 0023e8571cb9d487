"""What /props shows of a loaded model."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bough.config import EngineConfig
from bough.memory.planner import format_names
from bough.session.session import Session


def model_facts(session: Session, path: Path, config: EngineConfig) -> Mapping[str, Any]:
    model = session.engine.target
    return {
        "file": path.name,
        "architecture": model.spec.architecture,
        "context_length": model.spec.context_length,
        "device": str(model.device),
        "weights_bytes": session.plan.weights,
        "memory_bytes": session.plan.total,
        "kv": format_names(session.plan.kv),
        "parallel": session.parallel,
        "shared_tokens": session.plan.kv_tokens,
        "window": session.engine.states.buffers.window,
        "approximate": session.engine.approximate,
        "draft": config.draft.path.name if config.draft else None,
        "warnings": session.engine.drafter.warnings(-1),
        "budget": config.speculation.budget if config.speculation else 0,
        "prefix_cache": dataclasses.asdict(session.engine.prefixes.usage),
        "compress": config.compress.mode,
        "chain": bool(config.speculation and config.speculation.chain),
    }
