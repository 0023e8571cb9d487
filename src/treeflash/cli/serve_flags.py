"""The options of `treeflash serve` that no other command has: names, limits and help. Decides nothing."""

from pathlib import Path
from typing import Annotated, Any

import typer

from treeflash.cli.options import byte_count, size


def _server(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Server", **options)


def _answers(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Answers", **options)


def _background(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Background", **options)


Host = Annotated[
    str, _server("--host", metavar="ADDRESS", help="Where to listen; beyond this machine a key is needed.")
]
Port = Annotated[int, _server("--port", min=0, max=65535, help="0 takes any that is free.")]
ApiKey = Annotated[
    list[str] | None,
    _server(
        "--api-key",
        metavar="KEY",
        help="Needed for every route but /health; may be given several times; else TREEFLASH_API_KEY. "
        "Other users of this machine can see command lines: prefer a file.",
    ),
]
ApiKeyFile = Annotated[
    Path | None, _server("--api-key-file", metavar="PATH", help="A file with a key in each line.")
]
CorsOrigin = Annotated[
    list[str] | None,
    _server(
        "--cors-origin",
        metavar="ORIGIN",
        help="Pages of this origin may use the server, beside those of this machine: https://example.org; "
        "may be given several times; * means all.",
    ),
]
MaxQueue = Annotated[
    int, _server("--max-queue", min=1, max=10000, metavar="N", help="Most requests that wait; more get 429.")
]
MaxBody = Annotated[
    int, _server("--max-body", parser=byte_count, metavar="BYTES", help="Largest request: 33554432, 32m.")
]
ServedName = Annotated[
    str | None,
    _server(
        "--served-model-name",
        metavar="NAME",
        help="What the model is called; requests may use any name. Default: its short name or file.",
    ),
]
Think = Annotated[
    bool | None,
    _answers(
        "--think/--no-think",
        help="Reason before answering, for requests that do not say; else as the model's template decides.",
        show_default=False,
    ),
]
ThinkBudget = Annotated[
    int | None,
    _answers(
        "--think-budget",
        parser=size,
        metavar="TOKENS",
        help="Most tokens of reasoning, for requests that do not say: 2048, 2k. Default: no limit.",
    ),
]
Daemon = Annotated[
    bool, _background("--daemon", help="Go on in the background once the model is loaded; `treeflash stop`.")
]
LogFile = Annotated[
    Path | None,
    _background("--log-file", metavar="PATH", help="With --daemon: where the log goes. Default: shown."),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print what the server would be started with, as JSON.")
]
