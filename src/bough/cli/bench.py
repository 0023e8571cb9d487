"""`bough bench`: plain and tree decoding on the same prompts, as tables, lines, JSON and plots."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bough.cli import speculation, view
from bough.cli.bench_run import (
    BenchRun,
    Grid,
    measure_local,
    measure_server,
)
from bough.cli.command import INTERRUPTED
from bough.cli.interrupt import held
from bough.cli.loading import choose
from bough.cli.options import (
    MeasuredEngine,
    Model,
    Only,
    Quiet,
    SpeculationOptions,
    argument,
    check_remote,
    grouped,
    panel,
)
from bough.config import EngineConfig, environment
from bough.errors import UsageError
from bough.hub.catalog import named
from bough.hub.names import parse_repo
from bough.session.folders import cache_folder

if TYPE_CHECKING:
    from bough.bench.runner import Result

BUILTIN = "builtin"
SUITES = ("humaneval", "gsm8k", "math500", "mbpp", "mtbench", BUILTIN, "agent", "sweep")
_measured, _output, _server = panel("What is measured"), panel("Output"), panel("Server")

_SUITES = "Of humaneval, gsm8k, math500, mbpp, mtbench, builtin, agent, sweep, with commas between."


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    prompts: int | None = _measured(
        "Of each suite. Default: 10; all of builtin and agent; sweep: 1 of code and 1 of prose.", "N 1.."
    )
    n_gen: int | None = _measured(
        "Most tokens of an answer. Default: 256, and 640 where answers are scored.", "-n N 2.."
    )
    seed: int = _measured("Of sampling.", "0..", default=0)
    temperature: str | None = _measured("Default: 0; sweep: 0,0.8.", "-t X[,X]")
    budget: str | None = _measured(
        "Most proposed tokens in a tree; several for sweep. "
        "Default: as recommended for the model; sweep: 4,8,16,22,32,48,63.",
        "N[,N]",
    )
    context: str | None = _measured("In sweep: tokens before the prompt, 0,1k,4k.", "N[,N]")
    fixed: bool = _measured(
        "Verify trees of the whole budget, even if they do not pay; sweep always does.", default=False
    )
    thinking: bool = _measured(
        "Let models reason first, where they can.", "--think/--no-think", default=False, show_default=False
    )
    data: Path | None = _measured(
        "Has humaneval/test.jsonl[.gz] and so on; else the public suites come from the hub.",
        "FOLDER",
        exists=True,
        file_okay=False,
    )


@dataclass(frozen=True, slots=True)
class BenchServerOptions:
    url: str | None = _server("Measure an OpenAI-compatible server; MODEL is its name there.", "URL")
    api_key: str | None = _server("Sent to the server; else BOUGH_API_KEY.", "KEY")


@dataclass(frozen=True, slots=True)
class BenchOutputOptions:
    lines: Path | None = _output(
        "Every prompt's result, as it is measured. Default: bench.jsonl in the cache folder.", "FILE"
    )
    resume: bool = _output("Go on from what --lines has of the same settings.", default=False)
    json_file: Path | None = _output("All figures.", "--json FILE")
    markdown: Path | None = _output("The table as a page.", "FILE")
    plot: Path | None = _output("Plots; needs matplotlib.", "FOLDER")
    compare: Path | None = _output("Changes since a file of --json.", "OLD.json", exists=True, dir_okay=False)
    quiet: Quiet = False

    @property
    def path(self) -> Path:
        if self.lines is not None:
            return self.lines
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "bench.jsonl"


def in_order(suites: str, model: str | None) -> tuple[str, str | None]:
    """Return the suites and the model; a model may come first, as in the other commands, or alone."""
    if not _is_model(suites) or (model is not None and _is_model(model)):
        return suites, model
    return model or BUILTIN, suites


def _is_model(name: str) -> bool:
    on_disk = name.lower().endswith(".gguf") or (name not in SUITES and Path(name).exists())
    return on_disk or named(name) is not None or ("/" in name and parse_repo(name) is not None)


@grouped
def bench(
    *,
    suites: str = argument(_SUITES, "SUITES", default=BUILTIN),
    model: Model = None,
    measured: MeasureOptions,
    speculating: Annotated[SpeculationOptions, Only(("draft", "no_draft"))],
    engine: MeasuredEngine,
    remote: BenchServerOptions,
    output: BenchOutputOptions,
) -> None:
    """Measure plain and tree decoding in one process, on the same prompts.

    With the chat template and end tokens; time to first token is counted apart. Each result is written when
    it is measured: after Ctrl-C `--resume` goes on. In a pipe the last line is the summary as JSON.

    bough bench model.gguf

    bough bench builtin --prompts 2 -n 24

    bough bench builtin,agent model.gguf --json now.json --plot pictures

    bough bench builtin --url http://127.0.0.1:8000 --prompts 2
    """
    suites, model = in_order(suites, model)
    names = [each.strip() for each in suites.split(",") if each.strip()]
    grid = Grid.parse(
        names, temperature=measured.temperature, budget=measured.budget, context=measured.context
    )
    config = engine.config()
    if remote.url is not None:
        check_remote(engine)
    before = _document(output.compare) if output.compare is not None else None
    screen = view.Screen(quiet=output.quiet)
    with screen.waiting("Starting PyTorch"), held():
        from bough.bench import plots
    if output.plot is not None:
        plots.require()
    loaded = _prompts(names, measured, grid, offline=engine.offline or environment().offline)
    run = _run(names, measured, config, output)
    if remote.url is not None:
        key = remote.api_key or environment().api_key
        measure_server(run, loaded, grid, remote.url, key=key, model=model)
    else:
        speculation.check(speculating)
        choice = choose(model, speculating, engine, screen, costs=False)
        measure_local(run, loaded, grid, choice, screen)
    if run.found:
        _report(run, output, before, screen)
    if run.cancelled():
        raise typer.Exit(INTERRUPTED)


def _prompts(suites: Sequence[str], options: MeasureOptions, grid: Grid, *, offline: bool) -> dict[str, Any]:
    from bough.bench.suites import load

    return {
        suite: load(suite, options.prompts, data=options.data, offline=offline, contexts=grid.contexts)
        for suite in suites
    }


def _run(
    suites: Sequence[str], options: MeasureOptions, config: EngineConfig, output: BenchOutputOptions
) -> BenchRun:
    from bough.bench import machine
    from bough.bench.measure import BenchSettings
    from bough.bench.runner import ResultFile

    measured = ("prompts", "n_gen", "seed", "thinking", "temperature", "budget", "context", "fixed")
    facts: dict[str, Any] = {"suites": ",".join(suites)}
    facts |= {name: getattr(options, name) for name in measured}
    facts |= {name: getattr(config, name) for name in ("kv_k", "kv_v", "window", "max_ctx")}
    head = machine.head(facts, shlex.join(["bough", *sys.argv[1:]]))
    settings = BenchSettings(options.n_gen, options.seed, options.thinking)
    return BenchRun(ResultFile(output.path), head, settings, resume=output.resume, quiet=output.quiet)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        _ = document["run"], document["lines"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--compare {path} is not a file that `bench --json` wrote") from error
    return document


def _report(
    run: BenchRun, output: BenchOutputOptions, before: Mapping[str, Any] | None, screen: view.Screen
) -> None:
    """Show the results, what changed since an earlier run, and write the files that were asked for."""
    from bough.bench import report

    results = list(run.found.values())
    _show(run.head, results, screen, output.path, interrupted=run.cancelled())
    if before is not None:
        _changes(before, report.document(run.head, results))
    _write(run.head, results, output, screen)
    if not sys.stdout.isatty():
        view.print_json(report.summary(run.head, results))


def _show(
    head: "Result", results: "Sequence[Result]", screen: view.Screen, lines: Path, *, interrupted: bool
) -> None:
    from bough.bench import report

    if head.get("speed"):
        rows = [[name, report.spread(each, 1)] for name, each in head["speed"].items()]
        view.table("The target alone, as llama-bench measures it", ["test", "tok/s"], rows)
    headings = (report.title(head), "Steps")
    for heading, (columns, cases) in zip(headings, report.tables(results).items(), strict=True):
        view.table(heading, columns, cases)
    source, beside = report.published(head, results)
    if beside:
        view.table(f"Beside what is published, by {source}", report.BESIDE, beside)
    for remark in (report.mismatch(head), report.disturbance(head), report.cut_short(results)):
        if remark:
            screen.notice(remark.replace("**", ""))
    skipped = sum("skipped" in line for line in results)
    if skipped:
        screen.notice(f"{skipped} answers were left out: the prompt does not fit in the context.")
    if interrupted:
        screen.notice(
            f"Interrupted. {len(results)} results are in {lines}; the same command with --resume goes on."
        )
    else:
        screen.note(f"Every prompt's result is in {lines}.")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    from bough.bench import report

    changes = report.compare(before, after)
    real = [[*row[:5]] for row in changes if row[5]]
    if real:
        view.table(
            "Changes beyond noise", ("suite", "figure", "before", "now", "change"), real, texts=("figure",)
        )
    for difference in report.differences(before, after):
        view.plain(f"Not the same in both: {difference}.")
    view.plain(f"{len(changes) - len(real)} of {len(changes)} figures did not change beyond noise.")


def _write(
    head: "Result", results: "Sequence[Result]", output: BenchOutputOptions, screen: view.Screen
) -> None:
    from bough.bench import plots, report

    pictures: dict[str, str] = {}
    if output.plot is not None:
        plotted = plots.render(results, output.plot, title=report.subject(head))
        pictures = {name: str(path) for name, path in plotted.items()}
        screen.note(f"{len(plotted)} plots are in {output.plot}.")
    for path in (output.json_file, output.markdown):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if output.json_file is not None:
        output.json_file.write_text(json.dumps(report.document(head, results), indent=1), encoding="utf-8")
    if output.markdown is not None:
        page = f"# Benchmark\n\n{report.markdown(head, results, pictures)}\n{report.DEFINITIONS}"
        output.markdown.write_text(page, encoding="utf-8")
