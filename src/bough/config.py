"""Settings as frozen dataclasses. Only this module reads the environment; `startup` sets two variables."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from bough.errors import UsageError
from bough.startup import FUSION, SPIN

# How much to reason, and the tokens of it where the chat template does not know the word; None: no limit.
EFFORTS: Mapping[str, int | None] = {
    "minimal": 512,
    "low": 2048,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}


# How tokens are sampled: names of requests, of the command line and of the sampler.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How draft trees are built. No setting changes the generated text."""

    budget: int = 22  # most nodes below the root
    chain: bool = False  # a single path without branches
    lookup: bool = True  # prompt lookup (n-gram) in addition to the draft model
    # The MTP block of the target's file, if it has one; auto: without a draft model.
    mtp: Literal["auto", "on", "off"] = "auto"
    adaptive: bool = True  # fewer rows, down to the root alone, when more would not be faster


@dataclass(frozen=True, slots=True)
class DraftConfig:
    path: Path  # a safetensors checkpoint (folder or file), a DFlash GGUF or that of a small model
    quant: Literal["auto", "q8_0", "q4_k", "none"] = "auto"  # auto: q8_0 on a GPU, unquantised on a CPU
    context: int | None = None  # positions in the KV ring of its full-attention layers, or of a small model
    causal: bool | None = None  # overrides the checkpoint's attention masks
    # Tokens that it can propose, those with the first ids, a multiple of 128; None: all. A vocabulary has its
    # most frequent tokens first, and the head is a large part of a draft call.
    shortlist: int | None = None
    head: Path | None = None  # a Weaver head over it: a .pth file, or .safetensors with config.json beside it

    @property
    def files(self) -> list[Path]:
        return [self.path] if self.head is None else [self.path, self.head]


@dataclass(frozen=True, slots=True)
class CompressConfig:
    """Which prompts are compressed, for requests that do not say. The text may change: it is approximate."""

    mode: Literal["off", "auto"] = "off"
    above: int = 32 << 10  # tokens; shorter prompts are read as they are
    to: float = 0.15  # up to 1: the share of the prompt that is kept; above: its tokens
    scorer: Path | None = None  # a small model whose attention scores, beside words; None: words alone


@dataclass(frozen=True, slots=True)
class EngineConfig:
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    max_ctx: int | None = None  # None: the model's context length, as far as memory allows
    # Requests that run at once, at most. None: on a GPU what fits, up to 8; on a CPU 1.
    parallel: int | None = 1
    # Tokens. Chunks end at multiples of it, so that they depend on the prompt alone. None: by device memory.
    prefill_chunk: int | None = None
    # Matmuls of prompt chunks: in 16 bits, or in int8 with groups of 128 (GPU only): approximate.
    prefill: Literal["exact", "int8"] = "exact"
    weights: Literal["auto", "expanded", "packed"] = "auto"
    # What computes on a CPU: the native library or PyTorch; auto: native code where it runs the model.
    cpu_backend: Literal["auto", "native", "torch"] = "auto"
    # What native code rounds activations to before a matmul; int8 is faster, and approximate.
    cpu_activations: Literal["int16", "int8"] = "int16"
    threads: int | None = None  # of a CPU; None: one for each core, with PyTorch for each idle one
    # f32 (on a CPU), f16, bf16, q8_0, q5_0, q4_0 or tq3_0; auto: f32 on a CPU, what fits on a GPU
    kv_k: str = "auto"  # K cache
    kv_v: str = "auto"  # V cache
    # Of each layer's routed experts so many have no place on a GPU: all are in host memory, and those that
    # steps use are copied to the places of others. 0: all are on the GPU; None: where they do not fit, as
    # many as must.
    experts_host: int | None = None
    vram_limit: int | None = None  # bytes of GPU memory in use, other processes included; None: all
    window: int | None = None  # decoding attends to the last `window` tokens and the first 64; None: all
    speculation: SpecConfig | None = SpecConfig()  # None: plain decoding
    # The file of the image encoder; None: one that lies beside the model.
    mmproj: Path | None = None
    no_images: bool = False  # the model is loaded without an image encoder
    image_tokens: int = 4096  # of one image, at most: a larger one is made smaller
    draft: DraftConfig | None = None  # None: the target's MTP block or prompt lookup alone
    compress: CompressConfig = CompressConfig()
    effort: str | None = (
        None  # of reasoning, for requests that do not say; None: as recommended for the model
    )
    break_loops: bool = True  # reasoning and answers that repeat themselves are ended
    costs: Path | None = None  # file that keeps measured step costs between runs
    # Bytes of host memory for the prefix cache; 0: none; None: a quarter of free memory, up to 8 GiB.
    prefix_cache: int | None = None
    # States after answers are not used: they differ in the last bits from processing the answer as a prompt.
    prefix_cache_exact: bool = False
    prefix_cache_dir: Path | None = None  # keeps snapshots on disk between runs; None: no disk cache
    prefix_cache_dir_size: int = 32 << 30  # most bytes

    @property
    def max_rows(self) -> int:
        """Return the most rows of a step: the root and the draft nodes below it."""
        return self.speculation.budget + 1 if self.speculation else 1


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_keys: tuple[str, ...] = ()  # each grants access to every route; empty: no key is needed
    model_name: str | None = None  # None: the name in the file
    cors_origins: tuple[str, ...] = ()  # in addition to this machine's own; "*": any
    models_max: int = 1  # most models in memory at once, where requests may name several
    strict_model: bool = False  # requests that name no model of this server are refused
    max_queue: int = 64  # most waiting requests, not counting the running ones
    max_body: int = 32 << 20  # most bytes of a request
    image_urls: bool = False  # images that requests name by URL are fetched, from public addresses
    thinking: bool | None = None  # default for requests; None: the template's default
    thinking_budget: int | None = None  # tokens of reasoning
    sampling: Mapping[str, float] = field(default_factory=dict)  # over the model's, for requests
    max_tokens: int | None = None  # default for requests; None: what fits in the context
    drain_s: float = 30.0  # time for running requests to finish at shutdown


@dataclass(frozen=True, slots=True)
class Replicas:
    """Bounds of the number of a model's copies."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Self:
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text.strip())
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not most >= 1 or least > most:
            raise UsageError(f"`replicas` is {text}, needed a number from 1, or the least and the most: 1-4")
        return cls(least, most)


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment variables that users set."""

    target: str | None
    draft: str | None
    offline: bool
    no_color: bool
    debug: bool
    api_key: str | None  # of this server or of a remote one


def omp_threads() -> str | None:
    """Return the number of threads that the user gave to OpenMP, and so to torch."""
    return os.environ.get("OMP_NUM_THREADS")


def pretended_card() -> str | None:
    """Return the architecture that GPUs act as, for tests: such as sm_86."""
    return os.environ.get("BOUGH_PRETEND_CARD") or None


def kernel_choice() -> str:
    """Return the first implementation of kernels that may run on a GPU: cuda, triton or torch."""
    return os.environ.get("BOUGH_KERNELS", "").strip().lower() or "cuda"


def environment() -> Environment:
    def switch(name: str) -> bool:
        return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")

    def named(name: str, alias: str) -> str | None:
        return os.environ.get(name) or os.environ.get(alias) or None

    return Environment(
        target=named("BOUGH_MODEL", "DFLASH_TARGET"),
        draft=named("BOUGH_DRAFT", "DFLASH_DRAFT"),
        offline=switch("HF_HUB_OFFLINE"),
        no_color=bool(os.environ.get("NO_COLOR")),
        debug=switch("BOUGH_DEBUG"),
        api_key=os.environ.get("BOUGH_API_KEY") or None,
    )


def set_ray_environment() -> None:
    """Set what Ray reads when it is imported, unless the user has: loopback, a token, no statistics sent.

    The token is random where the user has none, and seen by this user's processes alone.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # also on Linux: all ports on 127.0.0.1
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets every other program go first
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not has_token and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def child_environment(variables: Mapping[str, str], *, without: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment for a child process that is not ours."""
    ours = (SPIN, *FUSION.items())
    variables_kept = {item for item in os.environ.items() if item not in ours and item[0] not in without}
    return dict(variables_kept) | dict(variables)
