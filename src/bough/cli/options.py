"""Options that several commands share, each declared once, and how a command takes them in groups.

Options that belong together are the fields of a frozen dataclass, and a command takes that dataclass as one
parameter. What several groups share is an `Annotated` type. All are declared in the words of `panel`.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from dataclasses import field as dataclass_field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from bough.cli import aliases
from bough.cli.command import Command
from bough.cli.completion import model_names
from bough.cli.values import count_or_auto, kept, memory, memory_or_none, size
from bough.cli.values import device as device_name
from bough.config import EFFORTS, CompressConfig, EngineConfig
from bough.errors import UsageError

MODEL_HELP = "A .gguf file, a folder that holds one, a short name (`bough list`), or USER/REPO[:QUANT]"
DEFAULTS = EngineConfig()
DECLARED = "declared"
LIMITS = re.compile(r"(-?[0-9.]*[0-9])?\.\.(-?[0-9.]*[0-9])?")
COMPRESS = ("compress", "compress_above", "compress_to", "compress_scorer")
# Options that every engine has.
REASONING = ("effort", "break_loops")
IMAGES = ("mmproj", "no_images", "image_tokens")
KV_CACHE = ("kv", "kv_k", "kv_v", "window")
HARDWARE = ("vram_limit", "experts_host", "prefill", "device", "threads", "cpu_backend", "offline")


@dataclass(frozen=True, slots=True)
class Only:
    """In `Annotated[GROUP, Only(...)]`: fields that become options, in order; others keep their defaults."""

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
        group = _group(hints[name])
        if group is None:
            expanded.append(_parameter(name, hints[name], parameter.default))
        else:
            groups[name] = group[0], [option.name for option in group[1]]
            expanded += group[1]

    defaults = {each.name: each.default for each in expanded if each.default is not inspect.Parameter.empty}

    @functools.wraps(command)
    def call(**arguments: Any) -> None:
        arguments = defaults | arguments
        values = {
            name: kind(**{option: arguments.pop(option) for option in names})
            for name, (kind, names) in groups.items()
        }
        command(**arguments, **values)

    result: Any = call
    result.__signature__ = inspect.Signature(expanded)
    result.__annotations__ = {parameter.name: parameter.annotation for parameter in expanded}
    return result


def _group(hint: Any) -> tuple[type, list[inspect.Parameter]] | None:
    """Return a dataclass of options and its fields as parameters; None: the hint is of a single option."""
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return None
    types, group = get_type_hints(kind, include_extras=True), {field.name: field for field in fields(kind)}
    names = [name for extra in extras if isinstance(extra, Only) for name in extra.names]
    return kind, [_parameter(name, types[name], group[name]) for name in names or group]


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """Return a parameter of typer's; an option without a name of its own is named after its field."""
    if isinstance(default, Field):
        if DECLARED in default.metadata:
            declare, names, settings = default.metadata[DECLARED]
            if declare is typer.Option and not any(name.startswith("--") for name in names):
                names = (f"--{name.replace('_', '-')}", *names)
            kind = Annotated[kind, declare(*names, **settings)]
        default = inspect.Parameter.empty if default.default is MISSING else default.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _declaration(form: str, settings: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return names and settings of an option. form: names, metavar and limits: `-n N 1..64`."""
    names = []
    for word in form.split():
        if limits := LIMITS.fullmatch(word):
            low, high = (float(limit) if "." in limit else int(limit) for limit in limits.groups("0"))
            settings |= ({"min": low} if limits[1] else {}) | ({"max": high} if limits[2] else {})
        elif word.startswith("-"):
            names.append(word)
        else:
            settings["metavar"] = word
    return names, settings


def panel(title: str | None) -> Callable[..., Any]:
    """Return what declares a parameter or a field of a group as an option under this title of the help."""

    def option(help: str, form: str = "", *, default: Any = None, **settings: Any) -> Any:
        declared = (typer.Option, *_declaration(form, {"help": help, "rich_help_panel": title} | settings))
        return dataclass_field(default=default, metadata={DECLARED: declared})

    return option


def argument(help: str, metavar: str | None, *, default: Any = None, **settings: Any) -> Any:
    declared = (typer.Argument, (), {"help": help, "metavar": metavar} | settings)
    return dataclass_field(default=default, metadata={DECLARED: declared})


def shared_option(title: str, help: str, form: str, **settings: Any) -> Any:
    """Return the declaration of an option that several groups or commands have, for its `Annotated` type."""
    names, settings = _declaration(form, {"help": help, "rich_help_panel": title} | settings)
    return typer.Option(*names, **settings)


option = panel(None)
_speculation, _engine, _kv_cache = panel("Speculation"), panel("Engine"), panel("KV cache")
_compress, _reasoning = panel("Compression of long prompts"), panel("Reasoning")

ModelName = functools.partial(typer.Argument, metavar="MODEL", autocompletion=model_names)
Model = Annotated[str | None, ModelName(help=f"{MODEL_HELP}; else BOUGH_MODEL.")]
Models = Annotated[
    list[str] | None,
    ModelName(help=f"{MODEL_HELP}; else BOUGH_MODEL. Of several, requests name one.", show_default=False),
]
System = Annotated[
    str | None, shared_option("Prompt", "Instructions that come before the prompt.", "--system -s")
]
Think = Annotated[
    bool | None,
    shared_option(
        "Prompt",
        "Reason before answering; else as the model's template decides.",
        "--think/--no-think",
        show_default=False,
    ),
]
Seed = Annotated[
    int | None,
    shared_option("Sampling", "Same seed, same text. Random and shown when absent.", "--seed 0.."),
]
AsJson = Annotated[bool, shared_option("Output", "Print one JSON object, for errors too.", "--json")]
Quiet = Annotated[bool, shared_option("Output", "No progress, notices or statistics.", "--quiet -q")]
Draft = Annotated[
    str | None,
    shared_option(
        "Speculation",
        "What proposes tokens: a draft by path or repository, also a small model of the same "
        "family; the MTP block in the model's file; prompt lookup alone; nothing. auto: the draft listed for "
        "the model, else its MTP block. With ,mtp after it (auto,mtp) the draft and the block propose in one "
        "tree. Default: BOUGH_DRAFT, else auto.",
        "--draft auto|none|mtp|lookup|PATH|REPO",
    ),
]
MaxContext = Annotated[
    int | None,
    shared_option(
        "Engine",
        "Most tokens of the prompt, as the template writes it, and the answer together: 8192, 8k, 1m. "
        "Default: what the model was made for, up to 32k on a CPU and 256k on a GPU, as memory allows.",
        "--max-ctx TOKENS",
        parser=size,
    ),
]
Parallel = Annotated[
    int | None,
    shared_option(
        "Engine",
        "Requests that run at once; they share the memory for tokens. "
        "Default: on a GPU what fits, up to 8; on a CPU 1.",
        "--parallel N 1..64",
    ),
]
VramLimit = Annotated[
    int | None,
    shared_option(
        "Engine",
        "Let no more of the GPU's memory be in use than this, other programs' included: 24g. "
        "Default: all of it.",
        "--vram-limit SIZE",
        parser=memory,
    ),
]


DraftQuant = StrEnum("DraftQuant", "auto q8_0 q4_k none")
KVType = StrEnum("KVType", "auto f32 f16 bf16 q8_0 q5_0 q4_0 tq3_0")
Prefill = StrEnum("Prefill", "exact int8")
CPUBackend = StrEnum("CPUBackend", "auto native torch")
Compress = StrEnum("Compress", "off auto")
Effort = StrEnum("Effort", list(EFFORTS))


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How tokens are proposed; cli/speculation.py says what the options mean together."""

    draft: Draft = None
    draft_quant: DraftQuant = _speculation(
        "Quantise the draft while it is loaded. auto: q8_0 on a GPU, none on a CPU.", default=DraftQuant.auto
    )
    draft_head: Path | None = _speculation(
        "A Weaver head over the draft, as published (.pth) or in safetensors.", "FILE"
    )
    budget: int | None = _speculation(
        "Most proposed tokens in a tree. Default: as recommended for the model, else 22.", "N 1..63"
    )
    chain: bool = _speculation("Propose one path, no branches.", default=False)
    no_draft: bool = _speculation("Propose nothing: plain decoding. The same as --draft none.", default=False)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    max_ctx: MaxContext = None
    prefix_cache: int | None = _engine(
        "Memory for states of earlier prompts, so that a repeated prefix is not computed again: "
        "512m, 8g; 0 turns it off. Default: a quarter of the memory that is free, up to 8g.",
        "SIZE",
        parser=memory_or_none,
    )
    prefix_cache_dir: Path | None = _engine(
        "Keep states of prompts in this folder, too: later runs need not compute a repeated prefix again.",
        "PATH",
    )
    prefix_cache_dir_size: int = _engine(
        "Most bytes in that folder; the least recently used are deleted. Default: 32g.",
        "SIZE",
        default=DEFAULTS.prefix_cache_dir_size,
        parser=memory,
        show_default=False,
    )
    mmproj: Path | None = _engine(
        "The model's image encoder, a .gguf file. Default: the one beside the model, if there is one.", "FILE"
    )
    no_images: bool = _engine("Load no image encoder.", default=False)
    image_tokens: int = _engine(
        "Most tokens of an image; larger ones are made smaller.", "N 64..16384", default=DEFAULTS.image_tokens
    )
    vram_limit: VramLimit = None
    experts_host: int | None = _engine(
        "Keep the routed experts in host memory, and a cache on the GPU that has all but N of each layer. "
        "0: all are on the GPU. Default: auto, as many as do not fit.",
        "auto|N 0..",
        parser=count_or_auto,
    )
    prefill: Prefill = _engine(
        "Matmuls of prompts. int8: with 8 bits, on a GPU; approximate, and slower on an H200: "
        "docs/long-context.md has the figures.",
        default=Prefill.exact,
    )
    device: str = _engine("Where to compute.", "auto|cpu|cuda|cuda:N", default="auto", parser=device_name)
    threads: int | None = _engine(
        "Threads of a CPU. Default: one for each core; with PyTorch one for each idle core.", "N 1..256"
    )
    cpu_backend: CPUBackend = _engine(
        "What computes on a CPU: native code, with weights as small as in the file, or PyTorch. "
        "auto: native code where it runs the model.",
        default=CPUBackend.auto,
    )
    effort: Effort | None = _reasoning(
        "How much to reason: in the chat template's own words where it has them, else in tokens: "
        "minimal 512, low 2048, medium 8192. Default: as recommended for the model."
    )
    break_loops: bool = _reasoning(
        "End reasoning that repeats itself for the third time, as at the end of a budget, and answers of a "
        "chat by the recommended sampling. A small model's chats say no sentence a fourth time, either.",
        "--break-loops/--no-break-loops",
        default=True,
    )
    offline: bool = _engine("Use only what is on this machine.", default=False)
    compress: Compress = _compress(
        "Read only what the question needs of long documents and tool results: approximate, the "
        "answer may change. docs/compression.md says what is lost. off: every prompt is read whole.",
        default=Compress.off,
    )
    compress_above: int = _compress(
        "Leave shorter prompts as they are: 32k, 16384. Default: 32k.",
        "TOKENS",
        default=DEFAULTS.compress.above,
        parser=size,
        show_default=False,
    )
    compress_to: float = _compress(
        "Most tokens of the compressed prompt, everything included: 0.15, 10%, 16k. Default: 0.15.",
        "SHARE|TOKENS",
        default=DEFAULTS.compress.to,
        parser=kept,
        show_default=False,
    )
    compress_scorer: str = _compress(
        "A small model whose attention chooses, beside words in common; words: these alone.",
        "MODEL|words",
        default="words",
    )
    kv: KVType = _kv_cache(
        "The type it is stored in. auto: f32 on a CPU, which alone has it; on a GPU f16, "
        "or the most bits in which the context fits. Below 8 bits the text may change: "
        "docs/long-context.md.",
        default=KVType.auto,
        case_sensitive=False,
    )
    kv_k: KVType | None = _kv_cache("Keys alone; else as --kv says.", case_sensitive=False)
    kv_v: KVType | None = _kv_cache("Values alone; else as --kv says.", case_sensitive=False)
    window: int | None = _kv_cache(
        "While decoding attend only to this many of the last tokens and to the first 64: "
        "approximate. Default: to all.",
        "TOKENS",
        parser=size,
    )

    def config(self) -> EngineConfig:
        if self.prefix_cache == 0 and self.prefix_cache_dir is not None:
            raise UsageError(
                f"--prefix-cache 0 turns off what --prefix-cache-dir {self.prefix_cache_dir} would keep",
                "leave one of them out; what a folder keeps passes through memory",
            )
        if self.compress_scorer != "words" and self.compress is Compress.off:
            raise UsageError("--compress-scorer needs --compress auto, which uses it")
        return EngineConfig(
            **shared(self, EngineConfig, without=("compress", "kv_k", "kv_v")),
            compress=CompressConfig(self.compress.value, self.compress_above, self.compress_to),
            kv_k=(self.kv_k or self.kv).value,
            kv_v=(self.kv_v or self.kv).value,
        )


# Of commands that measure a model.
MeasuredEngine = Annotated[EngineOptions, Only((*KV_CACHE, "max_ctx", *HARDWARE))]
MeasuredDraft = Annotated[SpeculationOptions, Only(("draft", "budget", "no_draft"))]


def shared(options: Any, config: Any, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of the options that are settings under the same name; words as plain text."""
    names = {field.name for field in fields(options)} & {field.name for field in fields(config)} - {*without}
    values = {name: getattr(options, name) for name in names}
    return {name: value.value if isinstance(value, StrEnum) else value for name, value in values.items()}


def check_remote(engine: EngineOptions) -> None:
    """Refuse options of the engine together with --url, which loads no model here."""
    if engine.config() != EngineConfig():
        raise UsageError(
            "--url excludes options of the device, its memory and the KV cache: the server has its own",
            "give them to bough serve",
        )


class EngineCommand(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [each for each in self.params if each.param_type_name == "option"]
        known = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        valued = {name for each in options for name in each.opts if not getattr(each, "is_flag", False)}
        return super().parse_args(ctx, aliases.spelled(args, known, valued))
