"""Settings as frozen values, and the only place that reads the environment."""

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    max_ctx: int | None = None  # None: what the model was made for, as far as memory allows
    prefill_chunk: int = (
        512  # tokens; cuts fall on multiples of it, so that they are a function of the prompt
    )
    weights: Literal["auto", "expanded", "packed"] = "auto"


@dataclass(frozen=True, slots=True)
class Environment:
    """What users set outside the command line."""

    target: str | None
    draft: str | None
    offline: bool
    no_color: bool
    debug: bool


def environment() -> Environment:
    def switch(name: str) -> bool:
        return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")

    return Environment(
        target=os.environ.get("DFLASH_TARGET") or None,
        draft=os.environ.get("DFLASH_DRAFT") or None,
        offline=switch("HF_HUB_OFFLINE"),
        no_color=bool(os.environ.get("NO_COLOR")),
        debug=switch("TREEFLASH_DEBUG"),
    )
