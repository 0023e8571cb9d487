"""`bough grow`, a tool of the workshop: its code is in a checkout of the repository, not in the wheel."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from bough.errors import UsageError

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[1]


def command() -> tuple[Callable[..., None], dict[str, bool]]:
    """Return the command of the checkout that this package is in, else one that takes anything, to refuse."""
    if not (ROOT / "workshop" / "grow").is_dir():
        return refuse, {"ignore_unknown_options": True, "allow_extra_args": True}
    sys.path.append(str(ROOT))
    return importlib.import_module("workshop.grow.command").grow, {}


def refuse(ctx: typer.Context) -> None:
    """Write a model of a larger shape; it works from a checkout of the repository."""
    raise UsageError(
        f"`bough grow` needs a checkout of the repository; this Bough is installed in {PACKAGE.parent}",
        "`git clone` it, then `pip install -e .` in its folder",
    )
