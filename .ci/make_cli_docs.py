"""Writes docs/cli.md from the program itself; with --check reports whether the file is up to date."""

import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from bough import errors
from bough.cli.command import BROKEN_PIPE, INTERRUPTED, UNEXPECTED
from bough.cli.program import app
from bough.cli.streams import OUTPUT_FAILED
from bough.hub import catalog
from bough.old_name import OLD_NAME

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """\
<!-- Written by .ci/make_cli_docs.py: edit the program, not this file. -->
# The command line

A MODEL is a `.gguf` file, a folder that holds one, a [short name](#short-names), or `USER/REPO[:QUANT]` on
huggingface.co. Downloads go to the Hugging Face cache, which other programs share. Answers, tables and JSON
go to standard output, everything else to standard error; with `--json` errors are an object
`{"error": {"type", "message", "hint"}}` on standard output, mistakes on the command line too. `-h` after any
command shows its help; `bough --install-completion` teaches your shell to complete.
"""
TAIL = """\
## Environment

| variable | meaning |
|---|---|
| `BOUGH_MODEL` | the model when none is named; also `DFLASH_TARGET` |
| `BOUGH_DRAFT` | the draft when none is named; `none`: plain decoding; also `DFLASH_DRAFT` |
| `BOUGH_KERNELS` | `triton` or `torch`: a GPU computes without CUDA C++, or with the least of both |
| `HF_HOME`, `HF_HUB_CACHE` | where downloads are kept |
| `HF_TOKEN` | for gated and private repositories |
| `HF_HUB_OFFLINE` | like `--offline` |
| `NO_COLOR` | no colours |
| `BOUGH_API_KEY` | the key of the server: `serve` requires it, `chat --url` and `launch` send it |
| `BOUGH_DEBUG` | like `--debug` |
"""


def main() -> int:
    text = "\n".join([HEAD, *commands(), short_names(), TAIL, exit_codes()])
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/cli.md is out of date: run python .ci/make_cli_docs.py", file=sys.stderr)
    return 1


def commands() -> Iterator[str]:
    for command in app.registered_commands:
        assert command.callback is not None and command.name is not None
        yield describe(command.name, command.callback)
    assert app.registered_callback is not None and app.registered_callback.callback is not None
    everywhere = parameters(app.registered_callback.callback)
    yield f"## Before the command\n\n{table(everywhere)}\n"


def describe(name: str, callback: Callable[..., Any]) -> str:
    found = parameters(callback)
    arguments = [each for each in found if isinstance(each.info, ArgumentInfo)]
    options = [each for each in found if isinstance(each.info, OptionInfo)]
    usage = " ".join([f"bough {name}", *(each.usage for each in arguments), "[OPTIONS]"])
    parts = [f"## {usage}\n", prose(inspect.getdoc(callback) or "")]
    if arguments:
        parts += [table(arguments), ""]
    panels = dict.fromkeys(each.info.rich_help_panel for each in options)
    for panel in panels:
        parts += [f"**{panel}**\n"] if panel else []
        parts += [table([each for each in options if each.info.rich_help_panel == panel]), ""]
    return "\n".join(parts)


def prose(text: str) -> str:
    """Return paragraphs; those that are a command line as code."""
    parts = []
    for paragraph in text.split("\n\n"):
        is_command = paragraph.startswith("bough ") or "| bough " in paragraph
        parts.append(f"```\n{paragraph}\n```\n" if is_command else f"{paragraph}\n")
    return "\n".join(parts)


class Parameter:
    def __init__(self, name: str, hint: Any, default: Any):
        kind, self.info = typing.get_args(hint)
        assert isinstance(self.info, ParameterInfo)
        self.name, self.default = name, default
        self.required = default is inspect.Parameter.empty
        kinds = [each for each in typing.get_args(kind) if each is not type(None)]
        optional = type(None) in typing.get_args(kind)
        self.kind = kinds[0] if optional else kind

    @property
    def usage(self) -> str:
        label = self.info.metavar or self.name.upper()
        return label if self.required else f"[{label}]"

    @property
    def label(self) -> str:
        if isinstance(self.info, ArgumentInfo):
            return f"`{self.info.metavar or self.name.upper()}`"
        # Typer keeps the first name as the default until it has seen the annotation.
        first = [self.info.default] if isinstance(self.info.default, str) else []
        names = [*first, *(self.info.param_decls or ())] or [f"--{self.name.replace('_', '-')}"]
        value = self._value()
        shown = [f"`{each}{value if index == 0 else ''}`" for index, each in enumerate(names)]
        return ", ".join(shown).replace("/--", "`, `--")

    def _value(self) -> str:
        if self.kind is bool:
            return ""
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return " " + "|".join(each.value for each in self.kind)
        plain = {int: "N", float: "X", Path: "PATH"}.get(self.kind, "TEXT")
        return f" {self.info.metavar or plain}"

    @property
    def help(self) -> str:
        limits = [self.info.min, self.info.max]
        text = self.info.help or ""
        if None not in limits:
            text += f" From {limits[0]:g} to {limits[1]:g}."
        return text

    @property
    def shown_default(self) -> str:
        if self.required or self.default is None or self.default is False:
            return ""
        return f"`{self.default.value if isinstance(self.default, Enum) else self.default}`"


def parameters(callback: Callable[..., Any]) -> list[Parameter]:
    hints = typing.get_type_hints(callback, include_extras=True)
    signature = inspect.signature(callback).parameters
    return [Parameter(name, hints[name], each.default) for name, each in signature.items()]


def table(rows: list[Parameter]) -> str:
    lines = ["| | | default |", "|---|---|---|"]
    for row in rows:
        cells = (row.label, row.help, row.shown_default)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def short_names() -> str:
    lines = ["## Short names", "", "| name | target | draft |", "|---|---|---|"]
    for card in catalog.cards():
        names = ", ".join(f"`{name}`" for name in (card.name, *card.aliases) if OLD_NAME not in name)
        inside = "in the package" if card.pair else "none"
        lines.append(f"| {names} | {card.target or inside} | {card.draft or inside} |")
    lines += ["", "`NAME:QUANT` takes another quantisation: `qwen3.6-27b:Q8_0`.", ""]
    return "\n".join(lines)


def exit_codes() -> str:
    lines = ["## Exit codes", "", "| code | meaning |", "|---|---|", "| 0 | it worked |"]
    tree = {line.lstrip("│├└─ ").split(" ")[0]: line for line in (errors.__doc__ or "").splitlines()}
    for name, value in vars(errors).items():
        if isinstance(value, type) and "exit_code" in vars(value) and name in tree:
            meaning = tree[name].split(name, 1)[1].strip() or "any other error"
            lines.append(f"| {value.exit_code} | {meaning} |")
    lines += [
        f"| {UNEXPECTED} | a bug, please report it |",
        f"| {OUTPUT_FAILED} | the output cannot be written: a full disk, a closed stream |",
        f"| {INTERRUPTED} | Ctrl-C |",
        f"| {BROKEN_PIPE} | the reader of the output went away |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
