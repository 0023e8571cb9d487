"""A benchmark is a function, and its parameters are the options of `python -m workshop NAME`.

    @case(seconds=150)
    def main(report: Report, *, model: Path, sizes: Sequence[int] = (1, 8)) -> None: ...

`python -m workshop gpu.users --users 1 8` calls `main` of workshop/gpu/users.py. Parameters before
the star are positional; a sequence takes several values; a dataclass's fields are options, too; Annotated
adds a help text. --out, --seconds and --device are the report's; a parameter's own default counts before
`case`'s. The exit code is what the function returns, or 1 if a check failed.
"""

import argparse
import dataclasses
import inspect
import os
import signal
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from workshop.report import Report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TARGET, DRAFT = (ROOT / "src/bough/pair" / f"{name}.gguf" for name in ("target", "draft"))


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    hint: Any
    default: Any
    positional: bool = False

    @property
    def required(self) -> bool:
        return self.default in (inspect.Parameter.empty, MISSING)

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser."""
        hint, keywords = self.hint, dict[str, Any]()
        if get_origin(hint) is Annotated:
            hint, keywords["help"] = get_args(hint)
        if get_origin(hint) in (Union, types.UnionType):
            [hint] = (part for part in get_args(hint) if part is not type(None))
        if get_origin(hint) is Sequence:
            [hint], keywords["nargs"] = get_args(hint), "*" if self.positional else "+"
        if get_origin(hint) is Literal:
            hint, keywords["choices"] = str, get_args(hint)
        if hint is bool:
            keywords["action"] = argparse.BooleanOptionalAction if self.default else "store_true"
        else:
            keywords["type"] = hint
        if self.positional:
            name, optional = self.name, not self.required and "nargs" not in keywords
            keywords |= {"nargs": "?"} if optional else {}
        else:
            name = "--" + self.name.replace("_", "-")
            keywords["required"] = self.required
        parser.add_argument(name, default=None if self.required else self.default, **keywords)


@dataclass(frozen=True, slots=True)
class Case:
    function: Callable[..., Any]
    of_report: tuple[Option, ...]

    def run(self, name: str, arguments: list[str]) -> int:
        """Call the function with the options in `arguments`, and return the exit code."""
        parser = argparse.ArgumentParser(
            prog=f"python -m workshop {name}",
            description=sys.modules[self.function.__module__].__doc__,
            formatter_class=argparse.RawTextHelpFormatter,
        )
        groups = self._groups()
        own = {option.name: option for group in groups.values() for option in group}
        options = {option.name: option for option in self.of_report} | own
        for option in options.values():
            option.add(parser)
        values = vars(parser.parse_args(arguments))
        settings = {key: value for key, value in values.items() if isinstance(value, int | str)}
        shared = {name: values[name] for name in options if name not in own}
        report = Report(**{"out": None, **shared}, settings=settings)
        call = {}
        for parameter, hint in get_type_hints(self.function).items():
            if hint is Report:
                call[parameter] = report
            elif dataclasses.is_dataclass(hint):
                call[parameter] = hint(**{option.name: values[option.name] for option in groups[parameter]})
            elif parameter != "return":
                call[parameter] = values[parameter]
        return int(self.function(**call) or report.failed)

    def _groups(self) -> dict[str, list[Option]]:
        """Return the options of each parameter: one, none for the report, or a dataclass's fields."""
        hints, groups = get_type_hints(self.function, include_extras=True), {}
        for parameter in inspect.signature(self.function).parameters.values():
            hint, positional = hints[parameter.name], parameter.kind is not parameter.KEYWORD_ONLY
            if dataclasses.is_dataclass(hint):
                groups[parameter.name] = list(_fields(hint))
            elif hint is not Report:
                groups[parameter.name] = [Option(parameter.name, hint, parameter.default, positional)]
        return groups


def case(
    *, out: Path | None = None, seconds: float = float("inf"), device: str = "cuda"
) -> Callable[[Callable[..., Any]], Case]:
    """Make a case of a function; `out`, `seconds` and `device` are the defaults of its report's options."""
    of_report = (
        Option("out", Annotated[Path | None, "file for the results, one JSON object a line"], out),
        Option("seconds", Annotated[float, "no part begins after them"], seconds),
        Option("device", str, device),
    )
    return lambda function: Case(function, of_report)


def prompt_lists() -> dict[str, Any]:
    """Return the lists of prompts.toml, by name."""
    return tomllib.loads(Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8"))


def command(name: str, *arguments: object) -> list[str]:
    """Return the command line of a case, to be run in ROOT with `environment`."""
    return [sys.executable, "-m", "workshop", name, *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return this process's environment for a process that imports what this one imports."""
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1"}


def output_of(
    process: subprocess.Popen[str], seconds: float, to_end_s: float
) -> tuple[str, str | None, bool]:
    """Return a process's output and errors, and whether it was late: then it was interrupted."""
    try:
        return *process.communicate(timeout=seconds), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return *process.communicate(timeout=to_end_s), True
    except subprocess.TimeoutExpired:
        process.kill()
        return *process.communicate(), True


def _fields(record: Any) -> Iterator[Option]:
    hints = get_type_hints(record, include_extras=True)
    for field in dataclasses.fields(record):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Option(field.name, hints[field.name], default)
