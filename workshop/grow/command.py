"""`bough grow`: the built-in pair, or another, extended to a larger shape; cli/grow.py finds it here."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bough.cli import view
from bough.cli.interrupt import held
from bough.errors import UsageError


class Preset(StrEnum):
    large = "27b"
    sparse = "35b-a3b"
    double = "double"


def grow(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where target.gguf and draft.gguf go.")
    ],
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="The shape: Qwen3.5-27B (the default), Qwen3.5-35B-A3B (with --random), "
            "or all of the pair's sizes doubled."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take shape and types from this GGUF file of a Qwen3.5 model."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Grow this target, not the built-in pair.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(metavar="PATH", help="The draft of --from.")] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Random weights instead, for timing: zeros compute faster.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Write over existing files.")] = False,
) -> None:
    """Write a model of a larger shape that answers as the built-in pair does.

    It shows what a shape costs, with real text and real acceptance, and needs no download. It is a tool of
    the workshop: it works from a checkout of the repository.

    bough grow --preset double -o grown
    """
    if like is not None and preset is not None:
        raise UsageError(f"--preset {preset} and --like {like} both name a shape, needed: one of them")
    if draft is not None and source is None:
        raise UsageError(f"--draft is {draft}, but the built-in pair has its own", "--from names its target")
    screen = view.Screen()
    with screen.waiting("Starting PyTorch"), held():
        from workshop.grow.grow import grow as write_pair
    with screen.loading("Writing") as bar:
        grown = write_pair(
            output,
            preset.value if preset else None,
            as_file=like,
            target=source,
            draft=draft,
            random=random,
            force=force,
            progress=bar.update,
        )
    target = grown.shape.target
    rows = [
        ("target", str(grown.target)),
        ("draft", str(grown.draft) if grown.draft else "none"),
        ("size", f"{view.amount(grown.bytes)}, {view.count(grown.parameters)} parameters"),
        ("shape", f"{target.layers} layers, {target.width} wide, {target.vocab_size:,} tokens"),
    ]
    if random:
        rows.append(("weights", "random: for timing, the text is meaningless"))
    else:
        rows.append(("real layers", ", ".join(map(str, grown.layer_indices)) + "; others: identity"))
    if grown.draft:
        rows.append(("taps", ", ".join(map(str, grown.taps))))
        rows.append(("try it", _example(grown.target)))
    view.sections(f"Grown to {grown.shape.name}", {"Result": rows})


def _example(target: Path) -> str:
    """Return a command that runs as it is; the draft beside the target is found."""
    return f'bough run {shlex.quote(str(target))} -p "def fibonacci(n):"'
