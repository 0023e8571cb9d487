"""Settings as frozen values, and the only place that reads the environment."""

import os
from collections.abc import Mapping, Sequence
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
    # Tokens; cuts fall on multiples of it, so that they are a function of the prompt. None: by its memory.
    prefill_chunk: int | None = None
    weights: Literal["auto", "expanded", "packed"] = "auto"
    # f32 (on a CPU), f16, bf16, q8_0, q5_0, q4_0 or tq3_0; auto: f32 on a CPU, what fits on a GPU
    kv_k: str = "auto"  # keys
    kv_v: str = "auto"  # values
    vram_limit: int | None = None  # bytes of a GPU that may be in use, others' included; None: all
    window: int | None = None  # decoding looks back so many tokens, and on the first 64; None: on all
    speculation: SpecConfig | None = SpecConfig()  # None: plain decoding
    draft: DraftConfig | None = None  # None: copies from the text alone
    costs: Path | None = None  # where measured step costs are kept from run to run
    # Bytes of host memory for states of earlier requests; 0: none; None: a quarter of the free, up to 8 GiB.
    prefix_cache: int | None = None
    prefix_cache_dir: Path | None = None  # where they outlive the process; None: nowhere
    prefix_cache_dir_size: int = 32 << 30  # bytes, at most

    @property
    def max_rows(self) -> int:
        """Of a step: the root and what is proposed below it."""
        return self.speculation.budget + 1 if self.speculation else 1


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    api_keys: tuple[str, ...] = ()  # any of them opens every route; none: no key is asked for
    model_name: str | None = None  # None: the file's own
    cors_origins: tuple[str, ...] = ()  # beside this machine's own; "*": any
    max_queue: int = 64  # requests that wait, beside the one that is answered
    max_body: int = 32 << 20  # bytes of a request
    thinking: bool | None = None  # for requests that say nothing; None: as the template decides
    thinking_budget: int | None = None  # tokens
    drain_s: float = 30.0  # what requests get to end when the server is told to


@dataclass(frozen=True, slots=True)
class Environment:
    """What users set outside the command line."""

    target: str | None
    draft: str | None
    offline: bool
    no_color: bool
    debug: bool
    api_key: str | None  # of a server of ours or another's


def environment() -> Environment:
    def switch(name: str) -> bool:
        return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")

    return Environment(
        target=os.environ.get("DFLASH_TARGET") or None,
        draft=os.environ.get("DFLASH_DRAFT") or None,
        offline=switch("HF_HUB_OFFLINE"),
        no_color=bool(os.environ.get("NO_COLOR")),
        debug=switch("TREEFLASH_DEBUG"),
        api_key=os.environ.get("TREEFLASH_API_KEY") or None,
    )


def child_environment(variables: Mapping[str, str], *, without: Sequence[str] = ()) -> dict[str, str]:
    """What a program that we start finds around it."""
    return {name: value for name, value in os.environ.items() if name not in without} | dict(variables)
