"""The arguments and options of `treeflash bench`, and what they mean together. Measures nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from treeflash.cli.options import size
from treeflash.errors import UsageError

SWEEP = "sweep"
STEP = "step"
SWEEP_BUDGETS = (4, 8, 16, 22, 32, 48, 63)
SWEEP_TEMPERATURES = (0.0, 0.8)
SWEEP_CONTEXTS = (0, 1024, 4096)
LINES = Path("treeflash-bench.jsonl")


def _what(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="What is measured", **options)


def _output(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Output", **options)


def _server(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Server", **options)


Suites = Annotated[
    str,
    typer.Argument(
        metavar="SUITES",
        help="Of humaneval, gsm8k, math500, mbpp, mtbench, builtin, agent, sweep, with commas between; "
        "or step: where the time of a single step goes.",
    ),
]
Prompts = Annotated[
    int | None,
    _what(
        "--prompts",
        min=1,
        metavar="N",
        help="Of each suite. Default: 10; all of builtin and agent; sweep: 1 of code and 1 of prose.",
    ),
]
MaxTokens = Annotated[int, _what("--n-gen", "-n", min=2, metavar="N", help="Most tokens of an answer.")]
Seed = Annotated[int, _what("--seed", min=0, help="Of drawn tokens.")]
Temperature = Annotated[
    str | None, _what("--temperature", "-t", metavar="X[,X]", help="Default: 0; sweep: 0,0.8.")
]
Budget = Annotated[
    str | None,
    _what(
        "--budget",
        metavar="N[,N]",
        help="Most proposed tokens in a tree; several for sweep. "
        "Default: as recommended for the model; sweep: 4,8,16,22,32,48,63.",
    ),
]
Context = Annotated[
    str | None,
    _what("--context", metavar="N[,N]", help="In sweep: tokens before the question. Default: 0,1k,4k."),
]
Fixed = Annotated[
    bool,
    _what("--fixed", help="Verify trees of the whole budget, whether they pay or not; sweep always does."),
]
Thinking = Annotated[
    bool,
    _what("--thinking/--no-thinking", help="Let models reason first, where they can.", show_default=False),
]
Data = Annotated[
    Path | None,
    _what(
        "--data",
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="Has humaneval/test.jsonl[.gz] and so on; else the public suites come from the hub.",
    ),
]
Url = Annotated[
    str | None,
    _server("--url", metavar="URL", help="Measure an OpenAI-compatible server; MODEL is its name there."),
]
ApiKey = Annotated[
    str | None, _server("--api-key", metavar="KEY", help="Sent to the server; else TREEFLASH_API_KEY.")
]
Lines = Annotated[Path, _output("--lines", metavar="FILE", help="Every prompt's result, added as it comes.")]
Resume = Annotated[bool, _output("--resume", help="Go on from what --lines has of the same settings.")]
JsonFile = Annotated[Path | None, _output("--json", metavar="FILE", help="All figures.")]
Markdown = Annotated[Path | None, _output("--markdown", metavar="FILE", help="The table as a page.")]
Plot = Annotated[Path | None, _output("--plot", metavar="FOLDER", help="Pictures; needs matplotlib.")]
Compare = Annotated[
    Path | None,
    _output(
        "--compare", metavar="OLD.json", exists=True, dir_okay=False, help="Changes since a file of --json."
    ),
]


@dataclass(frozen=True, slots=True)
class Ways:
    """How each prompt of a suite is answered."""

    budgets: list[int | None]  # 0: plain; None: as a server does by itself
    temperatures: list[float]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The lists among the options; None: not given."""

    temperatures: list[float] | None
    budgets: list[int] | None
    contexts: list[int]

    @classmethod
    def read(
        cls, suites: Sequence[str], temperature: str | None, budget: str | None, context: str | None
    ) -> "Wanted":
        if not suites:
            raise UsageError("no suite was named", "treeflash bench builtin")
        if len(set(suites)) < len(suites):
            raise UsageError(f"a suite is named twice in {','.join(suites)}, needed once")
        if STEP in suites and len(suites) > 1:
            raise UsageError(f"{STEP} measures steps, not prompts, and goes with no other suite")
        if context is not None and SWEEP not in suites:
            raise UsageError("--context is for the suite sweep")
        budgets = None if budget is None else numbers("--budget", budget, int, low=1, high=63)
        if budgets and len(budgets) > 1 and set(suites) != {SWEEP}:
            raise UsageError(f"--budget is {budget}, several are for the suite sweep alone")
        heats = None if temperature is None else numbers("--temperature", temperature, float, low=0, high=100)
        contexts = list(SWEEP_CONTEXTS)
        if context is not None:
            contexts = numbers("--context", context, int, low=0, high=1 << 22)
        return cls(heats, budgets, contexts)

    def trees(self, suite: str, recommended: int) -> list[int]:
        return self.budgets or (list(SWEEP_BUDGETS) if suite == SWEEP else [recommended])

    def ways(self, suite: str, trees: Sequence[int | None], *, plain: bool) -> Ways:
        heats = self.temperatures or (list(SWEEP_TEMPERATURES) if suite == SWEEP else [0.0])
        return Ways([*([0] if plain else []), *trees], heats)


def numbers(flag: str, text: str, kind: type, *, low: float, high: float) -> list[Any]:
    """A list with commas between; whole numbers may end in k."""
    try:
        parts = [part.strip() for part in text.split(",")]
        found = [size(part) if kind is int and part != "0" else kind(part) for part in parts]
    except (ValueError, typer.BadParameter):
        found = [low - 1]
    if not all(low <= each <= high for each in found):
        raise UsageError(f"{flag} is {text!r}, needed numbers from {low:g} to {high:g} with commas between")
    return list(dict.fromkeys(found))
