"""`treeflash bench`: plain and tree decoding on the same prompts, as tables, lines, JSON and pictures."""

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn

from treeflash.cli import bench_flags as given
from treeflash.cli import cache_flags, view
from treeflash.cli import run_flags as flags
from treeflash.cli.command import INTERRUPTED
from treeflash.cli.interrupt import Interrupt, held
from treeflash.cli.loading import LoadingBar, find
from treeflash.cli.loading import load as load_session
from treeflash.cli.speculation import Chosen, Speculation, Wishes, decide
from treeflash.config import EngineConfig, environment
from treeflash.errors import UsageError

if TYPE_CHECKING:
    from treeflash.bench.measure import Endpoint, Settings
    from treeflash.bench.runner import Case, Key, Result, ResultFile
    from treeflash.bench.suites import Prompt

WARM_UP = [{"role": "user", "content": "Count from one to twenty."}]
WARM_UP_TOKENS = 24


def bench(
    suites: given.Suites = "builtin",
    model: flags.Model = None,
    prompts: given.Prompts = None,
    n_gen: given.MaxTokens = 256,
    seed: given.Seed = 0,
    temperature: given.Temperature = None,
    budget: given.Budget = None,
    context: given.Context = None,
    fixed: given.Fixed = False,
    thinking: given.Thinking = False,
    data: given.Data = None,
    draft: flags.Draft = None,
    no_draft: flags.NoDraft = False,
    kv: cache_flags.KV = cache_flags.KeyValues.auto,
    kv_k: cache_flags.Keys = None,
    kv_v: cache_flags.Values = None,
    window: cache_flags.Window = None,
    max_ctx: flags.MaxContext = None,
    vram_limit: flags.VramLimit = None,
    device: flags.Where = "auto",
    offline: flags.Offline = False,
    url: given.Url = None,
    api_key: given.ApiKey = None,
    lines: given.Lines = given.LINES,
    resume: given.Resume = False,
    json_file: given.JsonFile = None,
    markdown: given.Markdown = None,
    plot: given.Plot = None,
    compare: given.Compare = None,
    quiet: flags.Quiet = False,
) -> None:
    """Measure plain and tree decoding in one process, on the same prompts.

    Chat template on, end tokens honoured, time to first token apart. Each result is written as it comes;
    Ctrl-C keeps what there is and `--resume` goes on. The last line of the output is the summary as JSON.

    treeflash bench builtin --prompts 2 -n 24

    treeflash bench builtin,agent model.gguf --json now.json --markdown now.md --plot pictures

    treeflash bench builtin --url http://127.0.0.1:8000 --prompts 2
    """
    chosen = [each.strip() for each in suites.split(",") if each.strip()]
    wanted = given.Wanted.read(chosen, temperature, budget, context)
    settings = environment()
    cache = cache_flags.cache(kv, kv_k, kv_v, window)
    if url is not None:
        cache_flags.check_remote(EngineConfig(device=device, max_ctx=max_ctx, vram_limit=vram_limit, **cache))
    offline = offline or settings.offline
    before = _document(compare) if compare is not None else None
    screen = view.Screen(quiet=quiet)
    with screen.waiting("Starting PyTorch"), held():
        from treeflash.bench import machine, plots, report
        from treeflash.bench.measure import Settings
        from treeflash.bench.runner import ResultFile
        from treeflash.bench.suites import load
    if plot is not None:
        plots.require()
    if chosen == [given.STEP]:
        target, speculation = _model(model, draft, no_draft, offline, screen)
        config = _config(speculation, wanted, device=device, max_ctx=max_ctx, vram_limit=vram_limit, **cache)
        return _step(target, config, screen, lines=lines, json_file=json_file)
    loaded = {
        suite: load(suite, prompts, data=data, offline=offline, contexts=wanted.contexts) for suite in chosen
    }
    facts: dict[str, Any] = {
        "suites": ",".join(chosen),
        "prompts": prompts,
        "n_gen": n_gen,
        "seed": seed,
        "thinking": thinking,
        "temperature": temperature,
        "budget": budget,
        "context": context,
        "fixed": fixed,
        **cache,
        "max_ctx": max_ctx,
    }
    head = machine.head(facts, shlex.join(["treeflash", *sys.argv[1:]]))
    run = _Run(ResultFile(lines), head, Settings(n_gen, seed, thinking), resume=resume, quiet=quiet)
    if url is not None:
        _serve(run, loaded, wanted, url, key=api_key or settings.api_key, model=model)
    else:
        target, speculation = _model(model, draft, no_draft, offline, screen)
        config = _config(speculation, wanted, device=device, max_ctx=max_ctx, vram_limit=vram_limit, **cache)
        _decode(run, loaded, wanted, target, config, screen)
    found = list(run.found.values())
    if found:
        _tell(head, found, screen, lines, interrupted=run.cancelled())
        if before is not None:
            _changes(before, report.document(head, found))
        _write(head, found, json_file=json_file, markdown=markdown, plot=plot, screen=screen)
        view.print_json(report.summary(head, found))
    if run.cancelled():
        raise typer.Exit(INTERRUPTED)


def _config(speculation: Speculation, wanted: given.Wanted, **settings: Any) -> EngineConfig:
    """Without costs of earlier runs: every run learns its own."""
    chosen = speculation.config
    if chosen is not None and wanted.budgets:
        chosen = replace(chosen, budget=max(wanted.budgets))
    return EngineConfig(speculation=chosen, draft=speculation.draft, **settings)


def _step(
    target: Chosen, config: EngineConfig, screen: view.Screen, *, lines: Path, json_file: Path | None
) -> None:
    """Where the time of single steps goes, by their size."""
    from treeflash.bench import step as bench_step

    with LoadingBar(target.path.name, screen) as bar:
        result = bench_step.bench_step(
            target.path, config, save=lines, progress=bar.reading, warming=bar.warming
        )
    columns, *cells = bench_step.lines(result)
    view.table(f"Steps of {target.path.name}", columns, cells)
    if parts := bench_step.part_lines(result):
        view.table("Milliseconds of verify and what decides behind it, by part", parts[0], parts[1:])
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")
    view.print_json(result)


def _serve(
    run: "_Run",
    loaded: "Mapping[str, Sequence[Prompt]]",
    wanted: given.Wanted,
    url: str,
    *,
    key: str | None,
    model: str | None,
) -> None:
    from treeflash.bench.remote import RemoteEndpoint
    from treeflash.cli import chat_remote

    backend = chat_remote.RemoteBackend.connect(url, key=key, model=model)
    base = chat_remote.address(url)
    run.head["settings"] |= {"model": backend.name, "draft": None, "url": base}
    run.head |= {"device": f"the server {base}", "torch": "", "threads": 0}
    trees = (wanted.budgets if backend.ours else None) or [None]
    plan = [(loaded[suite], wanted.ways(suite, trees, plain=backend.ours)) for suite in loaded]

    def connected(settings: "Settings") -> "Endpoint":
        return RemoteEndpoint(
            chat_remote.client(base, key),
            base,
            model=backend.name,
            ours=backend.ours,
            settings=settings,
            cancelled=run.cancelled,
        )

    run.measure(plan, connected)


def _decode(
    run: "_Run",
    loaded: "Mapping[str, Sequence[Prompt]]",
    wanted: given.Wanted,
    target: Chosen,
    config: EngineConfig,
    screen: view.Screen,
) -> None:
    from treeflash.bench import machine
    from treeflash.bench.measure import LocalEndpoint

    run.head["settings"] |= {
        "model": target.card.name if target.card else target.path.stem,
        "draft": config.draft.path.name if config.draft else None,
    }
    trees = {
        suite: wanted.trees(suite, config.speculation.budget) if config.speculation else []
        for suite in loaded
    }
    for sweeping in (False, True):
        part = [suite for suite in loaded if (suite == given.SWEEP) == sweeping]
        if not part or run.cancelled():
            continue
        speculation = config.speculation
        if speculation is not None:
            # A sweep shows what sizes cost, so that nothing may choose others; the rest what users get.
            speculation = replace(
                speculation,
                budget=max(trees[part[0]]),
                adaptive=not (sweeping or run.head["settings"]["fixed"]),
            )
        session = load_session(target.path, replace(config, speculation=speculation), screen)
        run.head |= machine.of_session(session, target.path)
        if not session.template.supports_thinking:
            run.settings = replace(run.settings, thinking=None)
        plan = [(loaded[suite], wanted.ways(suite, trees[suite], plain=True)) for suite in part]
        run.measure(plan, lambda settings, s=session: LocalEndpoint(s, settings, run.cancelled))
        del session  # the next one needs its memory


class _Run:
    """What is measured goes into `found` and, as it comes, into the file; Ctrl-C ends it."""

    def __init__(
        self, file: "ResultFile", head: "Result", settings: "Settings", *, resume: bool, quiet: bool
    ):
        self.head, self.settings = head, settings
        self.found: dict[Key, Result] = {}
        self._interrupt = Interrupt()
        self._file, self._resume = file, resume
        self._shown = not quiet and sys.stderr.isatty()

    def cancelled(self) -> bool:
        return self._interrupt.requested

    def measure(
        self, plan: "Sequence[tuple[Sequence[Prompt], given.Ways]]", make: "Callable[[Settings], Endpoint]"
    ) -> None:
        from treeflash.bench import runner

        self._interrupt = Interrupt()
        known = self._file.resume(self.head["settings"]) if self._resume else {}
        cases = [
            case for prompts, ways in plan for case in runner.cases(prompts, ways.budgets, ways.temperatures)
        ]
        keys = {key for case in cases for key in case.keys}
        found = {key: line for key, line in known.items() if key in keys}

        def told(line: "Result") -> None:
            self.found[runner.key_of(line)] = line
            way = "plain" if line["budget"] == runner.PLAIN else "tree"
            speed = f"{line['tok_s']:.1f} tok/s" if "tok_s" in line else "left out"
            bar.update(len(found), len(keys), label=f"{line['prompt']} {way} {speed}")

        columns = [BarColumn(), MofNCompleteColumn()]
        with view.Bar("Measuring", columns, shown=self._shown) as bar, self._interrupt:
            bar.update(len(found), len(keys))
            with contextlib.suppress(KeyboardInterrupt):
                if len(found) < len(keys):
                    _warm_up(make(replace(self.settings, n_gen=WARM_UP_TOKENS)), cases)
                lines = runner.measure(make(self.settings), cases, dict(found))
                runner.record(self._file, self.head, found, lines, told)
        self.found |= found


def _warm_up(endpoint: "Endpoint", cases: "Sequence[Case]") -> None:
    from treeflash.bench.suites import Prompt

    for budget in dict.fromkeys(case.budget for case in cases):
        endpoint.generate(Prompt("", "", WARM_UP), WARM_UP, budget=budget, temperature=0.0)
    endpoint.clear_cache()


def _model(
    name: str | None, draft: str | None, no_draft: bool, offline: bool, screen: view.Screen
) -> tuple[Chosen, Speculation]:
    settings = environment()
    wishes = Wishes(
        draft=draft,
        no_draft=no_draft,
        chain=False,
        budget=None,
        quant=flags.DraftQuant.auto,
        context=None,
        causal=None,
        default_draft=settings.draft,
    )
    wishes.check()
    offline = offline or settings.offline
    target = find(name if name is not None else settings.target, think=None, offline=offline, screen=screen)
    return target, decide(wishes, target, offline=offline, screen=screen)


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _ = found["run"], found["lines"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--compare {path} is not a file that `bench --json` wrote") from error
    return found


def _tell(
    head: "Result", found: "Sequence[Result]", screen: view.Screen, lines: Path, *, interrupted: bool
) -> None:
    from treeflash.bench import report

    headings = (report.title(head), "Steps")
    for heading, (columns, cells) in zip(headings, report.tables(found).items(), strict=True):
        view.table(heading, columns, cells)
    if disturbed := report.disturbance(head):
        screen.notice(disturbed.replace("**", ""))
    skipped = sum("skipped" in line for line in found)
    if skipped:
        screen.notice(f"{skipped} answers were left out: the prompt does not fit in the context.")
    if interrupted:
        screen.notice(
            f"Interrupted. {len(found)} results are in {lines}; the same command with --resume goes on."
        )
    else:
        screen.note(f"Every prompt's result is in {lines}.")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    from treeflash.bench import report

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
    head: "Result",
    found: "Sequence[Result]",
    *,
    json_file: Path | None,
    markdown: Path | None,
    plot: Path | None,
    screen: view.Screen,
) -> None:
    from treeflash.bench import plots, report

    pictures: dict[str, str] = {}
    if plot is not None:
        drawn = plots.render(found, plot, title=report.subject(head))
        pictures = {name: str(path) for name, path in drawn.items()}
        screen.note(f"{len(drawn)} pictures are in {plot}.")
    for path in (json_file, markdown):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json_file is not None:
        json_file.write_text(json.dumps(report.document(head, found), indent=1), encoding="utf-8")
    if markdown is not None:
        page = f"# Benchmark\n\n{report.markdown(head, found, pictures)}\n{report.DEFINITIONS}"
        markdown.write_text(page, encoding="utf-8")
