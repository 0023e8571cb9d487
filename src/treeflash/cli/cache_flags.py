"""The options that say how keys and values are kept and read, for every command that answers.

Luce DFlash's spellings are understood, and not shown.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from treeflash.cli.command import Command
from treeflash.cli.options import size
from treeflash.config import EngineConfig
from treeflash.errors import UsageError

ALIASES = {"--kv-f16": "f16", "--kv-q8": "q8_0", "--kv-q4": "q4_0", "--kv-tq3": "tq3_0"}


class KeyValues(StrEnum):
    auto = "auto"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q5_0 = "q5_0"
    q4_0 = "q4_0"
    tq3_0 = "tq3_0"


def _cache(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Keys and values", **options)


KV = Annotated[
    KeyValues,
    _cache(
        "--kv",
        case_sensitive=False,
        help="How they are kept. auto: f32 on a CPU, which alone has it; on a GPU f16, "
        "or the most bits in which the context fits. Below 8 bits the text may change: docs/long-context.md.",
    ),
]
Keys = Annotated[
    KeyValues | None, _cache("--kv-k", case_sensitive=False, help="Keys alone; else as --kv says.")
]
Values = Annotated[
    KeyValues | None, _cache("--kv-v", case_sensitive=False, help="Values alone; else as --kv says.")
]
Window = Annotated[
    int | None,
    _cache(
        "--window",
        parser=size,
        metavar="TOKENS",
        help="Decode with a view of so many of the last tokens and of the first 64: approximate. "
        "Default: of all.",
    ),
]


def cache(
    kv: KeyValues, keys: KeyValues | None, values: KeyValues | None, window: int | None
) -> dict[str, Any]:
    """As an EngineConfig has it."""
    return {"kv_k": (keys or kv).value, "kv_v": (values or kv).value, "window": window}


def prefixes(memory: int | None, folder: Path | None, folder_size: int) -> dict[str, Any]:
    """As an EngineConfig has it."""
    if memory == 0 and folder is not None:
        raise UsageError(
            f"--prefix-cache 0 turns off what --prefix-cache-dir {folder} would keep",
            "leave one of them out; what a folder keeps passes through memory",
        )
    return {"prefix_cache": memory, "prefix_cache_dir": folder, "prefix_cache_dir_size": folder_size}


def check_remote(config: EngineConfig) -> None:
    """With --url nothing is loaded here that flags could shape."""
    if config != EngineConfig():
        raise UsageError(
            "--url excludes flags of the device, its memory, keys and values: the server has its own",
            "give them to treeflash serve",
        )


class CacheCommand(Command):
    """A command with these options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [f"--kv={ALIASES[arg]}" if arg in ALIASES else arg for arg in args])
