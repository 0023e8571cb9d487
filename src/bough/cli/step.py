"""`bough step` and `bough share`: where the time of one step goes, and what an issue about a card needs."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bough.cli import speculation, view
from bough.cli.interrupt import held
from bough.cli.loading import LoadingBar, choose
from bough.cli.options import (
    EngineOptions,
    MeasuredDraft,
    MeasuredEngine,
    Model,
    Quiet,
    SpeculationOptions,
    grouped,
    panel,
)
from bough.cli.speculation import Chosen
from bough.config import EngineConfig, environment
from bough.errors import UsageError
from bough.session.folders import cache_folder

_measured, _output = panel("What is measured"), panel("Output")


@grouped
def step(
    *,
    model: Model = None,
    predict: str | None = _measured("Estimate another card's, such as 3090; runs nothing.", "CARD"),
    speculating: MeasuredDraft,
    engine: MeasuredEngine,
    lines: Path | None = _output(
        "The figures, appended as a JSON line. Default: bench.jsonl in the cache folder.", "FILE"
    ),
    json_file: Path | None = _output("All figures.", "--json FILE"),
    quiet: Quiet = False,
) -> None:
    """Measure single steps of a model by their number of rows, and by part where it says.

    bough step model.gguf

    bough step model.gguf --predict 3090
    """
    if predict is not None and (model or environment().target) is None:
        raise UsageError(f"--predict {predict} needs the model that is to run", "bough step MODEL")
    screen = view.Screen(quiet=quiet)
    target, config = _chosen(model, speculating, engine, screen)
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
    speculating: MeasuredDraft,
    engine: MeasuredEngine,
    markdown: Path = _output("The page.", "FILE", default=Path("bough-share.md")),
    json_file: Path | None = _output("All figures.", "--json FILE"),
    quiet: Quiet = False,
) -> None:
    """Write a page about this machine, ready for an issue: steps by rows, bandwidth, settings, versions.

    bough share model.gguf --markdown my-card.md
    """
    screen = view.Screen(quiet=quiet)
    target, config = _chosen(model, speculating, engine, screen)
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


def _chosen(
    model: str | None,
    speculating: SpeculationOptions,
    engine: EngineOptions,
    screen: view.Screen,
) -> tuple[Chosen, EngineConfig]:
    speculation.check(speculating)
    with screen.waiting("Starting PyTorch"), held():
        import torch  # noqa: F401
    choice = choose(model, speculating, engine, screen, costs=False)
    return choice.target, choice.engine


def _predict(target: Chosen, config: EngineConfig, card: str, json_file: Path | None) -> None:
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
