"""Options that several commands share, each declared once, and how a command takes them in groups.

An option is an `Annotated` type. Options that belong together are the fields of a frozen dataclass, and a
command takes that dataclass as one parameter.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from bough.cli import aliases
from bough.cli.command import Command
from bough.cli.completion import model_names
from bough.cli.values import device as device_name
from bough.cli.values import kept, memory, memory_or_none, size
from bough.config import EFFORTS, CompressConfig, EngineConfig
from bough.errors import UsageError

MODEL_HELP = "A .gguf file, a folder that holds one, a short name (`bough list`), or USER/REPO[:QUANT]"
DEFAULTS = EngineConfig()
COMPRESS = ("compress", "compress_above", "compress_to", "compress_scorer")
# Options that every engine has.
REASONING = ("effort", "break_loops")
HARDWARE = (
    "vram_limit", "experts_host", "prefill", "device", "threads", "cpu_backend", "cpu_activations", "offline",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Only:
    """In `Annotated[GROUP, Only(...)]`: the fields that become options; the others keep their defaults."""

    names: tuple[str, ...]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with every dataclass among its parameters expanded into one option per field.

    Typer reads a command's options from its signature. This builds a signature in which a parameter whose
    type is a dataclass is replaced by the dataclass's fields, in their order. The returned function takes
    these as keyword arguments, makes the dataclasses again and calls the command with them.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type, list[str]]] = {}
    expanded: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        found = _group(hints[name])
        if found is None:
            expanded.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
        else:
            groups[name] = found[0], [option.name for option in found[1]]
            expanded += found[1]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        values = {
            name: kind(**{option: given.pop(option) for option in names})
            for name, (kind, names) in groups.items()
        }
        command(**given, **values)

    result: Any = call
    result.__signature__ = inspect.Signature(expanded)
    result.__annotations__ = {parameter.name: parameter.annotation for parameter in expanded}
    return result


def _group(hint: Any) -> tuple[type, list[inspect.Parameter]] | None:
    """Return a dataclass of options and its fields as parameters; None: the hint is of a single option."""
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return None
    types = get_type_hints(kind, include_extras=True)
    chosen = [name for each in extras if isinstance(each, Only) for name in each.names]
    return kind, [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=types[field.name],
        )
        for field in fields(kind)
        if field.name in chosen or not chosen
    ]


def panel(title: str) -> Callable[..., Any]:
    """Return `typer.Option` for options that the help shows under this title."""
    return functools.partial(typer.Option, rich_help_panel=title)


_prompt, _sampling, _output = panel("Prompt"), panel("Sampling"), panel("Output")
_speculation, _engine, _kv_cache = panel("Speculation"), panel("Engine"), panel("KV cache")
_compress, _reasoning = panel("Compression of long prompts"), panel("Reasoning")

Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}; else BOUGH_MODEL.", autocompletion=model_names),
]
Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{MODEL_HELP}; else BOUGH_MODEL. Of several, requests name one.",
        autocompletion=model_names,
        show_default=False,
    ),
]
System = Annotated[str | None, _prompt("--system", "-s", help="Instructions that come before the prompt.")]
Think = Annotated[
    bool | None,
    _prompt(
        "--think/--no-think",
        help="Reason before answering; else as the model's template decides.",
        show_default=False,
    ),
]
Seed = Annotated[
    int | None, _sampling("--seed", min=0, help="Same seed, same text. Random and shown when absent.")
]
AsJson = Annotated[bool, _output("--json", help="Print one JSON object, for errors too.")]
Quiet = Annotated[bool, _output("--quiet", "-q", help="No progress, notices or statistics.")]
Draft = Annotated[
    str | None,
    _speculation(
        "--draft",
        metavar="auto|none|mtp|lookup|PATH|REPO",
        help="What proposes tokens: a draft by path or repository; the MTP block in the model's file; prompt "
        "lookup alone; nothing. auto: the draft listed for the model, else its MTP block. With ,mtp after "
        "it (auto,mtp) the draft and the block propose in one tree. "
        "Default: BOUGH_DRAFT, else auto.",
    ),
]
MaxContext = Annotated[
    int | None,
    _engine(
        "--max-ctx",
        parser=size,
        metavar="TOKENS",
        help="Most tokens of the prompt, as the template writes it, and the answer together: 8192, 8k, 1m. "
        "Default: what the model was made for, up to 32k on a CPU and 256k on a GPU, as memory allows.",
    ),
]
Parallel = Annotated[
    int | None,
    _engine(
        "--parallel",
        min=1,
        max=64,
        metavar="N",
        help="Requests that run at once; they share the memory for tokens. "
        "Default: on a GPU what fits, up to 8; on a CPU 1.",
    ),
]
VramLimit = Annotated[
    int | None,
    _engine(
        "--vram-limit",
        parser=memory,
        metavar="SIZE",
        help="Let no more of the GPU's memory be in use than this, other programs' included: 24g. "
        "Default: all of it.",
    ),
]


class DraftQuant(StrEnum):
    auto = "auto"
    q8_0 = "q8_0"
    q4_k = "q4_k"
    none = "none"


class KVType(StrEnum):
    auto = "auto"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q5_0 = "q5_0"
    q4_0 = "q4_0"
    tq3_0 = "tq3_0"


class CPUActivations(StrEnum):
    int16 = "int16"
    int8 = "int8"


class Prefill(StrEnum):
    exact = "exact"
    int8 = "int8"


class CPUBackend(StrEnum):
    auto = "auto"
    native = "native"
    torch = "torch"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How tokens are proposed; cli/speculation.py says what the options mean together."""

    draft: Draft = None
    draft_quant: Annotated[
        DraftQuant,
        _speculation(
            "--draft-quant", help="Quantise the draft while it is loaded. auto: q8_0 on a GPU, none on a CPU."
        ),
    ] = DraftQuant.auto
    budget: Annotated[
        int | None,
        _speculation(
            "--budget",
            min=1,
            max=63,
            metavar="N",
            help="Most proposed tokens in a tree. Default: as recommended for the model, else 22.",
        ),
    ] = None
    chain: Annotated[bool, _speculation("--chain", help="Propose one path, no branches.")] = False
    no_draft: Annotated[
        bool, _speculation("--no-draft", help="Propose nothing: plain decoding. The same as --draft none.")
    ] = False


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """How the KV cache is stored and read."""

    kv: Annotated[
        KVType,
        _kv_cache(
            "--kv",
            case_sensitive=False,
            help="The type it is stored in. auto: f32 on a CPU, which alone has it; on a GPU f16, "
            "or the most bits in which the context fits. Below 8 bits the text may change: "
            "docs/long-context.md.",
        ),
    ] = KVType.auto
    kv_k: Annotated[
        KVType | None, _kv_cache("--kv-k", case_sensitive=False, help="Keys alone; else as --kv says.")
    ] = None
    kv_v: Annotated[
        KVType | None, _kv_cache("--kv-v", case_sensitive=False, help="Values alone; else as --kv says.")
    ] = None
    window: Annotated[
        int | None,
        _kv_cache(
            "--window",
            parser=size,
            metavar="TOKENS",
            help="While decoding attend only to this many of the last tokens and to the first 64: "
            "approximate. Default: to all.",
        ),
    ] = None


Effort = StrEnum("Effort", [(word, word) for word in EFFORTS])


class Compress(StrEnum):
    off = "off"
    auto = "auto"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Where a model is loaded, and with how much memory."""

    max_ctx: MaxContext = None
    prefix_cache: Annotated[
        int | None,
        _engine(
            "--prefix-cache",
            parser=memory_or_none,
            metavar="SIZE",
            help="Memory for states of earlier prompts, so that a repeated prefix is not computed again: "
            "512m, 8g; 0 turns it off. Default: a quarter of the memory that is free, up to 8g.",
        ),
    ] = None
    prefix_cache_exact: Annotated[
        bool,
        _engine(
            "--prefix-cache-exact",
            help="Do not use states that were saved after an answer: they differ in the last bits from "
            "processing the answer as part of a prompt.",
        ),
    ] = False
    prefix_cache_dir: Annotated[
        Path | None,
        _engine(
            "--prefix-cache-dir",
            metavar="PATH",
            help="Keep states of prompts in this folder, too: "
            "later runs need not compute a repeated prefix again.",
        ),
    ] = None
    prefix_cache_dir_size: Annotated[
        int,
        _engine(
            "--prefix-cache-dir-size",
            parser=memory,
            metavar="SIZE",
            help="Most bytes in that folder; the least recently used are deleted. Default: 32g.",
            show_default=False,
        ),
    ] = DEFAULTS.prefix_cache_dir_size
    vram_limit: VramLimit = None
    experts_host: Annotated[
        int,
        _engine(
            "--experts-host",
            min=0,
            metavar="N",
            help="Keep the routed experts of N layers in host memory; a GPU reads some over the bus, "
            "more slowly.",
        ),
    ] = 0
    prefill: Annotated[
        Prefill,
        _engine(
            "--prefill",
            help="Matmuls of prompts. int8: with 8 bits, on a GPU; approximate, and slower on an H200: "
            "docs/long-context.md has the figures.",
        ),
    ] = Prefill.exact
    device: Annotated[
        str,
        _engine("--device", parser=device_name, metavar="auto|cpu|cuda|cuda:N", help="Where to compute."),
    ] = "auto"
    threads: Annotated[
        int | None,
        _engine(
            "--threads",
            min=1,
            max=256,
            metavar="N",
            help="Threads of a CPU. Default: one for each core; with PyTorch one for each idle core.",
        ),
    ] = None
    cpu_backend: Annotated[
        CPUBackend,
        _engine(
            "--cpu-backend",
            help="What computes on a CPU: native code, with weights as small as in the file, or PyTorch. "
            "auto: native code where it runs the model.",
        ),
    ] = CPUBackend.auto
    cpu_activations: Annotated[
        CPUActivations,
        _engine(
            "--cpu-activations",
            help="What native code rounds activations to. int8: faster with many rows, approximate.",
        ),
    ] = CPUActivations.int16
    effort: Annotated[
        Effort | None,
        _reasoning(
            "--effort",
            help="How much to reason: in the chat template's own words where it has them, else in tokens: "
            "minimal 512, low 2048, medium 8192. Default: as recommended for the model.",
        ),
    ] = None
    break_loops: Annotated[
        bool,
        _reasoning(
            "--break-loops/--no-break-loops",
            help="End reasoning that repeats itself for the third time, as at the end of a budget.",
        ),
    ] = True
    offline: Annotated[bool, _engine("--offline", help="Use only what is on this machine.")] = False
    compress: Annotated[
        Compress,
        _compress(
            "--compress",
            help="Read only what the question needs of long documents and tool results: approximate, the "
            "answer may change. docs/compression.md says what is lost. off: every prompt is read whole.",
        ),
    ] = Compress.off
    compress_above: Annotated[
        int,
        _compress(
            "--compress-above",
            parser=size,
            metavar="TOKENS",
            help="Leave shorter prompts as they are: 32k, 16384. Default: 32k.",
            show_default=False,
        ),
    ] = DEFAULTS.compress.above
    compress_to: Annotated[
        float,
        _compress(
            "--compress-to",
            parser=kept,
            metavar="SHARE|TOKENS",
            help="Most tokens of the compressed prompt, everything included: 0.15, 10%, 16k. Default: 0.15.",
            show_default=False,
        ),
    ] = DEFAULTS.compress.to
    compress_scorer: Annotated[
        str,
        _compress(
            "--compress-scorer",
            metavar="MODEL|words",
            help="A small model whose attention chooses, beside words in common; words: these alone.",
        ),
    ] = "words"

    def config(self, cache: KVCacheOptions) -> EngineConfig:
        """Return the engine's settings; speculation has its defaults."""
        if self.prefix_cache == 0 and self.prefix_cache_dir is not None:
            raise UsageError(
                f"--prefix-cache 0 turns off what --prefix-cache-dir {self.prefix_cache_dir} would keep",
                "leave one of them out; what a folder keeps passes through memory",
            )
        if self.compress_scorer != "words" and self.compress is Compress.off:
            raise UsageError("--compress-scorer needs --compress auto, which uses it")
        return EngineConfig(
            device=self.device,
            max_ctx=self.max_ctx,
            vram_limit=self.vram_limit,
            experts_host=self.experts_host,
            prefill=self.prefill.value,
            threads=self.threads,
            cpu_backend=self.cpu_backend.value,
            cpu_activations=self.cpu_activations.value,
            prefix_cache=self.prefix_cache,
            prefix_cache_exact=self.prefix_cache_exact,
            prefix_cache_dir=self.prefix_cache_dir,
            prefix_cache_dir_size=self.prefix_cache_dir_size,
            kv_k=(cache.kv_k or cache.kv).value,
            kv_v=(cache.kv_v or cache.kv).value,
            window=cache.window,
            effort=self.effort and self.effort.value,
            break_loops=self.break_loops,
            compress=CompressConfig(self.compress.value, self.compress_above, self.compress_to),
        )


def check_remote(engine: EngineOptions, cache: KVCacheOptions) -> None:
    """Refuse options of the engine together with --url, which loads no model here."""
    if engine.config(cache) != EngineConfig():
        raise UsageError(
            "--url excludes options of the device, its memory and the KV cache: the server has its own",
            "give them to bough serve",
        )


class EngineCommand(Command):
    """A command that loads a model; it accepts other programs' spellings of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [each for each in self.params if each.param_type_name == "option"]
        known = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        valued = {name for each in options for name in each.opts if not getattr(each, "is_flag", False)}
        return super().parse_args(ctx, aliases.spelled(args, known, valued))
