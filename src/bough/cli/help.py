"""The help page of a command: at most 80 columns, the options that matter most first."""

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

WIDTH = 80
LABEL = 26  # columns of an option's names and value; longer ones have their help below them
GENERAL = "Options"
MOST_USED = "Most used"
# By command; the rest follows by topic.
FIRST = {
    "run": ("prompt", "n_gen", "temperature", "draft", "max_ctx"),
    "chat": ("url", "system", "temperature", "draft", "max_ctx"),
    "serve": ("host", "port", "api_key", "draft", "max_ctx"),
    "bench": ("prompts", "n_gen", "draft", "json_file", "url"),
    "train": ("output", "prompts", "steps", "layers", "device"),
}


def page(command: Any, ctx: Any, *, width: int = WIDTH) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a page, and whether each is a heading."""
    width = min(width, WIDTH)
    parameters = [
        parameter for parameter in command.get_params(ctx) if not getattr(parameter, "hidden", False)
    ]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    usage = " ".join(
        ["Usage:", ctx.command_path, *(_usage(parameter) for parameter in arguments), "[OPTIONS]"]
    )
    yield from ((line, False) for line in ["", *_wrapped(usage, width, "")])
    yield from _prose(inspect.cleandoc(command.help or ""), width)
    for title, group in _groups(command.name, arguments, options):
        yield "", False
        yield title, True
        for parameter in group:
            yield from ((line, False) for line in _entry(_label(parameter), _help(parameter), width))
    yield "", False


def _prose(text: str, width: int) -> Iterator[tuple[str, bool]]:
    """Yield the paragraphs of a docstring; command lines are indented and not broken."""
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        example = words.startswith("bough ") or "| bough " in words
        yield "", False
        yield from ((line, False) for line in ([f"  {words}"] if example else _wrapped(words, width, "")))


def _groups(name: str, arguments: Sequence[Any], options: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    if arguments:
        yield "Arguments", list(arguments)
    order = FIRST.get(name, ())
    first = sorted((each for each in options if each.name in order), key=lambda each: order.index(each.name))
    if first:
        yield MOST_USED, first
    rest = [each for each in options if each.name not in order]
    panels = dict.fromkeys(getattr(each, "rich_help_panel", None) or GENERAL for each in rest)
    for panel in sorted(panels, key=lambda title: title == GENERAL):
        yield panel, [each for each in rest if (getattr(each, "rich_help_panel", None) or GENERAL) == panel]


def _usage(argument: Any) -> str:
    name = _value(argument) + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _label(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _value(parameter)
    names = ", ".join(str(each) for each in (*sorted(parameter.opts, key=len), *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {_value(parameter)}"


def _value(parameter: Any) -> str:
    if parameter.metavar:
        return parameter.metavar
    if parameter.param_type_name == "argument":
        return parameter.name.upper()
    kind = _kind(parameter)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(each.value) for each in kind)
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _kind(parameter: Any) -> Any:
    """Return the type of an option; where typer keeps it depends on its version."""
    if (described := getattr(parameter, "type_descriptor", None)) is not None:
        return described.annotation
    kinds = {"integer": int, "integer range": int, "float": float, "float range": float, "path": Path}
    return kinds.get(getattr(parameter.type, "name", ""), str)


def _help(parameter: Any) -> str:
    text = parameter.help or ""
    default = parameter.default
    shown = default.value if isinstance(default, Enum) else default
    shows_default = parameter.param_type_name == "option" and getattr(parameter, "show_default", True)
    if shows_default and shown not in (None, False, True) and not callable(shown) and "Default" not in text:
        text += f" Default: {shown}."
    return text


def _entry(label: str, text: str, width: int) -> list[str]:
    indent = " " * (LABEL + 2)
    lines = _wrapped(text, width - len(indent), "") or [""]
    if len(label) + 2 <= LABEL:
        head = [f"  {label:<{LABEL}}{lines[0]}"]
        lines = lines[1:]
    else:
        head = _wrapped(label, width - 2, "    ")
        head = [f"  {each}" for each in head]
    return [each.rstrip() for each in (*head, *(indent + line for line in lines))]


def _wrapped(text: str, width: int, later: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=later, break_on_hyphens=False)
