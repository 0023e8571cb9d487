"""The measuring of `bough bench`: suites at several budgets and temperatures, here or on a server."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn

from bough.cli import view
from bough.cli.interrupt import Interrupt
from bough.cli.loading import Choice
from bough.cli.loading import load as load_session
from bough.cli.values import size
from bough.errors import UsageError

if TYPE_CHECKING:
    from bough.bench.measure import BenchSettings, Endpoint
    from bough.bench.runner import BenchCase, Key, Result, ResultFile
    from bough.bench.suites import SuitePrompt
    from bough.session.session import Session

SWEEP = "sweep"
SWEEP_BUDGETS = (4, 8, 16, 22, 32, 48, 63)
SWEEP_TEMPERATURES = (0.0, 0.8)
SWEEP_CONTEXTS = (0, 1024, 4096)
WARM_UP = [{"role": "user", "content": "Count from one to twenty."}]
WARM_UP_TOKENS = 24
EXAMINED = 40  # tokens of an answer on which a draft is tried with other settings


@dataclass(frozen=True, slots=True)
class Grid:
    """Budgets, temperatures and contexts as given on the command line; None: not given."""

    temperatures: list[float] | None
    budgets: list[int] | None
    contexts: list[int]

    @classmethod
    def parse(
        cls, suites: Sequence[str], *, temperature: str | None, budget: str | None, context: str | None
    ) -> "Grid":
        """Return the lists in the options; refuse those that do not go with the suites."""
        _check_suites(suites)
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

    def cases(
        self,
        loaded: "Mapping[str, Sequence[SuitePrompt]]",
        suite: str,
        trees: Sequence[int | None],
        *,
        plain: bool,
    ) -> "list[BenchCase]":
        """Return the cases of a suite at these budgets (0: plain; None: the server's own choice)."""
        from bough.bench import runner

        heats = self.temperatures or (SWEEP_TEMPERATURES if suite == SWEEP else (0.0,))
        return runner.cases(loaded[suite], [*([0] if plain else []), *trees], heats)


def _check_suites(suites: Sequence[str]) -> None:
    if not suites:
        raise UsageError("no suite was named", "bough bench builtin")
    if len(set(suites)) < len(suites):
        raise UsageError(f"a suite is named twice in {','.join(suites)}, needed once")
    for command in ("step", "share"):
        if command in suites:
            raise UsageError(f"{command} is no suite, but a command of its own", f"bough {command} MODEL")


def numbers(flag: str, text: str, kind: type, *, low: float, high: float) -> list[Any]:
    """Return the numbers of a list with commas; whole numbers may end in k."""
    try:
        parts = [part.strip() for part in text.split(",")]
        values = [size(part) if kind is int and part != "0" else kind(part) for part in parts]
    except (ValueError, typer.BadParameter):
        values = [low - 1]
    if not all(low <= each <= high for each in values):
        raise UsageError(f"{flag} is {text!r}, needed numbers from {low:g} to {high:g} with commas between")
    return list(dict.fromkeys(values))


class BenchRun:
    """Measures prompts; results go into `found` and, one by one, into the file. Ctrl-C ends it."""

    def __init__(
        self, file: "ResultFile", head: "Result", settings: "BenchSettings", *, resume: bool, quiet: bool
    ):
        self.head, self.settings = head, settings
        self.found: dict[Key, Result] = {}
        self._interrupt = Interrupt()
        self._file, self._resume = file, resume
        self._shown = not quiet and sys.stderr.isatty()

    def cancelled(self) -> bool:
        return self._interrupt.requested

    def interruptible(self) -> Interrupt:
        """Return what makes Ctrl-C end the run, for the time of a `with`."""
        self._interrupt = Interrupt()
        return self._interrupt

    def measure(self, cases: "Sequence[BenchCase]", make: "Callable[[BenchSettings], Endpoint]") -> None:
        """Measure the cases; results in the file are taken over with --resume."""
        from bough.bench import runner

        self.interruptible()
        earlier = self._file.resume(self.head["settings"]) if self._resume else {}
        keys = {key for case in cases for key in case.keys}
        results = {key: line for key, line in earlier.items() if key in keys}

        def measured(line: "Result") -> None:
            self.found[runner.key_of(line)] = line
            way = "plain" if line["budget"] == runner.PLAIN else "tree"
            speed = f"{line['tok_s']:.1f} tok/s" if "tok_s" in line else "left out"
            bar.update(len(results), len(keys), label=f"{line['prompt']} {way} {speed}")

        columns = [BarColumn(), MofNCompleteColumn()]
        with view.Bar("Measuring", columns, shown=self._shown) as bar, self._interrupt:
            bar.update(len(results), len(keys))
            with contextlib.suppress(KeyboardInterrupt):
                if len(results) < len(keys):
                    _warm_up(make(replace(self.settings, n_gen=WARM_UP_TOKENS)), cases)
                lines = runner.measure(make(self.settings), cases, dict(results))
                runner.record(self._file, self.head, results, lines, measured)
        self.found |= results


def _warm_up(endpoint: "Endpoint", cases: "Sequence[BenchCase]") -> None:
    from bough.bench.suites import SuitePrompt

    for budget in dict.fromkeys(case.budget for case in cases):
        endpoint.generate(SuitePrompt("", "", WARM_UP), WARM_UP, budget=budget, temperature=0.0)
    endpoint.clear_cache()


def measure_server(
    run: BenchRun,
    loaded: "Mapping[str, Sequence[SuitePrompt]]",
    grid: Grid,
    url: str,
    *,
    key: str | None,
    model: str | None,
) -> None:
    from bough.bench.remote import RemoteEndpoint
    from bough.session.remote import RemoteSession

    session = RemoteSession.connect(url, key=key, model=model)
    run.head["settings"] |= {"model": session.name, "draft": None, "url": session.url}
    run.head |= {"device": f"the server {session.url}", "torch": "", "threads": 0}
    trees = (grid.budgets if session.ours else None) or [None]
    cases = [case for suite in loaded for case in grid.cases(loaded, suite, trees, plain=session.ours)]
    run.measure(cases, lambda settings: RemoteEndpoint(session, settings, run.cancelled))


def _speed(run: BenchRun, session: "Session", screen: view.Screen) -> dict[str, Any]:
    from bough.bench import speed

    with screen.waiting("Measuring prompt and decode speed"), run.interruptible():
        return speed.measure(session, run.cancelled)


def _draft_problem(run: BenchRun, session: "Session") -> str | None:
    """Return what is wrong with the draft, by trying other settings of it on the answers."""
    from torch import OutOfMemoryError

    texts = {line.get("text", "") for line in run.found.values()}
    tokens = session.tokenizer.encode("\n\n".join(sorted(texts, key=len)))
    if len(tokens) < EXAMINED:
        return None
    try:
        return session.engine.drafter.examine(tokens)
    except OutOfMemoryError:
        return None


def measure_local(
    run: BenchRun,
    loaded: "Mapping[str, Sequence[SuitePrompt]]",
    grid: Grid,
    choice: Choice,
    screen: view.Screen,
) -> None:
    """Measure the suites with a model that is loaded here; the sweep has a session of its own."""
    from bough.bench import machine
    from bough.bench.measure import LocalEndpoint
    from bough.prefix_cache.files import identity

    target, config = choice.target, choice.engine
    run.head["settings"] |= {
        "model": target.card.name if target.card else target.path.stem,
        "draft": config.draft.path.name if config.draft else None,
        # A draft that was trained again has the same name.
        "files": identity([target.path, *([config.draft.path] if config.draft else [])])[:12],
    }
    trees = {
        suite: grid.trees(suite, config.speculation.budget) if config.speculation else [] for suite in loaded
    }
    for sweeping in (False, True):
        suites = [suite for suite in loaded if (suite == SWEEP) == sweeping]
        if not suites or run.cancelled():
            continue
        speculation = config.speculation
        if speculation is not None:
            # A sweep measures what each size costs, so the policy may not choose another one.
            speculation = replace(
                speculation,
                budget=max(trees[suites[0]]),
                adaptive=not (sweeping or run.head["settings"]["fixed"]),
            )
        session = load_session(target.path, replace(config, speculation=speculation), screen)
        run.head |= machine.of_session(session)
        if not sweeping:
            run.head["speed"] = _speed(run, session, screen)
        if not session.template.supports_thinking:
            run.settings = replace(run.settings, thinking=None)
        cases = [each for suite in suites for each in grid.cases(loaded, suite, trees[suite], plain=True)]
        if run.cancelled():
            return
        run.measure(cases, lambda settings, s=session: LocalEndpoint(s, settings, run.cancelled))
        if config.draft is not None and not run.cancelled():
            run.head["draft_problem"] = _draft_problem(run, session)
        del session  # the next one needs its memory
