"""What replicas are made of, and how many there are."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bough.config import EngineConfig, Replicas, ServerConfig
from bough.errors import UsageError
from bough.llm import AUTO, find_draft, find_model
from bough.session.folders import costs_file

# Requests that a replica takes beyond its slots: it has the next one at hand when one ends, and all others
# wait where they can still go to any replica.
QUEUE = 2
CONTROL = 2  # calls for a replica's state, which must not wait for its requests
GPU_SLOTS = 8  # most that an engine chooses by itself


@dataclass(frozen=True, slots=True)
class Settings:
    path: Path  # of the model; on several machines each one has it there
    engine: EngineConfig  # of each replica
    server: ServerConfig
    replicas: Replicas
    gpu: bool  # one for each replica

    @property
    def model_name(self) -> str:
        return self.server.model_name or self.path.stem

    @property
    def slots(self) -> int:
        return self.engine.parallel or (GPU_SLOTS if self.gpu else 1)


def settings_for(path: Path, engine: EngineConfig, server: ServerConfig, replicas: Replicas) -> Settings:
    """Return the settings with a device and threads for each replica."""
    if engine.device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"`device` is {engine.device}, needed auto, cpu or cuda: every replica has a GPU of its own"
        )
    gpu = engine.device == "cuda" or (engine.device == "auto" and _has_gpu())
    if not gpu:
        threads = engine.threads or max(1, (os.cpu_count() or 1) // replicas.most)
        engine = replace(engine, device="cpu", threads=threads)
    return Settings(path.absolute(), engine, server, replicas, gpu)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """Return the settings that the arguments of a Serve application name: fields of both configurations."""
    values = dict(arguments)
    replicas = Replicas.parse(str(values.pop("replicas", 1)))
    target, card, fetched = find_model(values.pop("model", None), offline=False)
    speculation, draft = find_draft(target, card, values.pop("draft", AUTO), fetch=fetched)
    engine = _configured(EngineConfig, values) | {
        "parallel": values.pop("parallel", None),
        "speculation": speculation,
        "draft": draft,
        "costs": costs_file(),
    }
    server = {"model_name": card.name if card else target.stem} | _configured(ServerConfig, values)
    if values:
        raise UsageError(f"there is no setting {next(iter(values))!r}", "docs/scale-out.md lists them")
    return settings_for(target, _checked(EngineConfig, engine), _checked(ServerConfig, server), replicas)


def _configured(kind: type[EngineConfig | ServerConfig], values: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a configuration out of what is given."""
    names = [each.name for each in fields(kind) if each.name in values]
    return {name: values.pop(name) for name in names}


def _checked(kind: type, values: Mapping[str, Any]) -> Any:
    """Return the configuration; values may be texts, as on a command line."""
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise UsageError(f"`{name}` is {values.get(name)!r}: {first['msg']}", param=name) from error
