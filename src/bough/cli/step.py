"""`bough step` and `bough share`: where the time of one step goes, and what an issue about a card needs."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from bough.cli import speculation, view
from bough.cli.interrupt import held
from bough.cli.loading import LoadingBar, choose
from bough.cli.options import (
    HARDWARE,
    EngineOptions,
    KVCacheOptions,
    Model,
    Only,
    Quiet,
    SpeculationOptions,
    grouped,
    single,
)
from bough.cli.speculation import Chosen
from bough.config import EngineConfig, environment
from bough.errors import UsageError
from bough.session.folders import cache_folder

_output = single("Output")
Drafting = Annotated[SpeculationOptions, Only(("draft", "no_draft", "budget"))]
Engine = Annotated[EngineOptions, Only(("max_ctx", *HARDWARE))]
JSONFile = Annotated[Path | None, _output("--json", metavar="FILE", help="All figures.")]


@grouped
def step(
    *,
    model: Model = None,
    predict: Annotated[
        str | None,
        single("What is measured")(
            "--predict", metavar="CARD", help="Estimate another card's, such as 3090; runs nothing."
        ),
    ] = None,
    speculating: Drafting,
    cache: KVCacheOptions,
    engine: Engine,
    lines: Annotated[
        Path | None,
        _output(
            "--lines",
            metavar="FILE",
            help="The figures, appended as a JSON line. Default: bench.jsonl in the cache folder.",
        ),
    ] = None,
    json_file: JSONFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure single steps of a model by their number of rows, and by part where it says.

    bough step model.gguf

    bough step model.gguf --predict 3090
    """
    if predict is not None and (model or environment().target) is None:
        raise UsageError(f"--predict {predict} needs the model that is to run", "bough step MODEL")
    screen = view.Screen(quiet=quiet)
    target, config = _local(model, speculating, cache, engine, screen)
    if predict is not None:
        return _predict(target, config, predict, json_file)
    from bough.bench import step as bench_step

    if lines is None:
        lines = cache_folder() / "bench.jsonl"
        lines.parent.mkdir(parents=True, exist_ok=True)
    with LoadingBar(target.path.name, screen) as bar:
        result = bench_step.bench_step(
            target.path,
            config,
            save=lines,
            progress=bar.reading,
            compiling=bar.compiling,
            warming=bar.warming,
        )
    columns, *cases = bench_step.lines(result)
    view.table(f"Steps of {target.path.name}", columns, cases)
    if parts := bench_step.part_lines(result):
        view.table("Milliseconds of verify, sampling and accepting, by part", parts[0], parts[1:])
    _written(result, json_file)


@grouped
def share(
    *,
    model: Model = None,
    speculating: Drafting,
    cache: KVCacheOptions,
    engine: Engine,
    markdown: Annotated[Path, _output("--markdown", metavar="FILE", help="The page.")] = Path(
        "bough-share.md"
    ),
    json_file: JSONFile = None,
    quiet: Quiet = False,
) -> None:
    """Write a page about this machine, ready for an issue: steps by rows, bandwidth, settings, versions.

    bough share model.gguf --markdown my-card.md
    """
    screen = view.Screen(quiet=quiet)
    target, config = _local(model, speculating, cache, engine, screen)
    from bough.bench import share as page
    from bough.session.loading import load_session

    if config.speculation is not None:
        config = replace(config, speculation=replace(config.speculation, adaptive=False))
    with LoadingBar(target.path.name, screen) as bar:
        session = load_session(target.path, config, progress=bar.reading, warming=bar.warming)
    result = page.measure(session) | {"model": target.path.name}
    page.save(result, markdown)
    view.plain(page.page(result))
    screen.note(f"The same is in {markdown}; paste it into an issue.")
    _written(result, json_file)


def _local(
    model: str | None,
    speculating: SpeculationOptions,
    cache: KVCacheOptions,
    engine: EngineOptions,
    screen: view.Screen,
) -> tuple[Chosen, EngineConfig]:
    """Return the model and the engine's settings."""
    speculation.check(speculating)
    config = engine.config(cache)
    with screen.waiting("Starting PyTorch"), held():
        import torch  # noqa: F401
    target, proposing = choose(model, speculating, offline=engine.offline, screen=screen)
    return target, replace(config, speculation=proposing.config, draft=proposing.draft)


def _predict(target: Chosen, config: EngineConfig, card: str, json_file: Path | None) -> None:
    """Show what steps would take on another card."""
    from bough.bench import predict

    result = predict.predict(target.path, config, card)
    columns, *cases = predict.lines(result)
    view.table(f"Prediction for {result['card']}: {target.path.name}", columns, cases)
    view.plain(
        "Nothing was measured on such a card. From its bandwidth, SMs, clock and tensor cores, and what was "
        "measured on an H200; tok/s at an acceptance length, the draft included."
    )
    _written(result, json_file)


def _written(result: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if not sys.stdout.isatty():
        view.print_json(result)
