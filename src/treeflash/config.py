"""Settings as frozen values, and the only place that reads the environment."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How trees are proposed. Whatever is set here, the text stays the same."""

    budget: int = 22  # nodes below the root, at most
    chain: bool = False  # one path, no branches
    lookup: bool = True  # copies from the text beside the draft's proposals
    adaptive: bool = True  # fewer rows, down to the root alone, when more do not pay


@dataclass(frozen=True, slots=True)
class DraftConfig:
    path: Path  # a safetensors checkpoint (folder or file) or a dflash GGUF
    quant: Literal["auto", "q8_0", "q4_k", "none"] = "auto"  # auto: q8_0 on a GPU, as it is on a CPU
    context: int | None = None  # positions that its full-attention layers look back on
    causal: bool | None = None  # overrides what the checkpoint says of its layers


@dataclass(frozen=True, slots=True)
class EngineConfig:
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    max_ctx: int | None = None  # None: what the model was made for, as far as memory allows
    # Tokens; cuts fall on multiples of it, so that they are a function of the prompt.
    prefill_chunk: int = 512
    weights: Literal["auto", "expanded", "packed"] = "auto"
    speculation: SpecConfig | None = SpecConfig()  # None: plain decoding
    draft: DraftConfig | None = None  # None: copies from the text alone
    costs: Path | None = None  # where measured step costs are kept from run to run


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
