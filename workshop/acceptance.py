"""`bough bench --fixed` for machines that have torch but not the command line's packages.

    python -m workshop acceptance --data FOLDER --model FILE --draft PATH [--temperature 0.8]

FOLDER holds humaneval/test.jsonl.gz and so on. Appends every prompt's result to --lines. Prints a JSON line
per suite, which is also appended to --out, by default benchmarks/results/acceptance.jsonl.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from bough.bench import machine
from bough.bench.measure import BenchSettings, LocalEndpoint
from bough.bench.report import rows
from bough.bench.runner import PLAIN, Key, Result, ResultFile, cases, key_of, measure
from bough.bench.suites import SuitePrompt, load
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.prefix_cache.files import identity
from bough.session.loading import load_session
from workshop.case import RESULTS, case
from workshop.report import Report


@case(out=RESULTS / "acceptance.jsonl", device="auto")
def main(
    report: Report,
    *,
    data: Path | None = None,
    model: Path,
    draft: Path | None = None,
    suites: Annotated[str, "a,b or a:164,b:50 (prompts)"] = "humaneval,gsm8k,math500",
    prompts: int = 50,
    n_gen: Annotated[int | None, "default: 256, or 640 where answers are scored"] = None,
    budget: Sequence[int] = (22,),
    label: Annotated[str, "of the draft, for the results"] = "",
    adaptive: Annotated[bool, "let the row policy choose the number of rows"] = False,
    lookup: Annotated[bool, "prompt lookup beside the draft"] = True,
    plain: Annotated[bool, "the baseline, too"] = True,
    temperature: Sequence[float] = (0.0,),
    seed: int = 0,
    max_ctx: int = 4096,
    lines: Path = Path("acceptance-lines.jsonl"),
    show: Annotated[int, "outputs to print from each suite"] = 0,
) -> None:
    config = EngineConfig(
        device=report.device,
        max_ctx=max_ctx,
        speculation=SpecConfig(budget=max(budget), adaptive=adaptive, lookup=lookup),
        draft=DraftConfig(draft) if draft else None,
    )
    session = load_session(model, config)
    facts = report.settings | {"n_gen": n_gen, "budget": budget, "temperature": temperature}
    facts |= {"model": model.stem, "draft": draft.name if draft else None}
    facts |= {"files": identity([model, *([draft] if draft else [])])[:12]}
    head = report.head() | {"settings": facts} | machine.of_session(session)
    thinking = False if session.template.supports_thinking else None
    settings = BenchSettings(n_gen=n_gen, seed=seed, thinking=thinking)
    budgets = [PLAIN, *budget] if plain else budget
    warm_up = SuitePrompt("", "", [{"role": "user", "content": "Count to ten."}])
    short = LocalEndpoint(session, BenchSettings(n_gen=16, thinking=thinking), lambda: False)
    for each in budgets:
        short.generate(warm_up, warm_up.messages, budget=each, temperature=0.0)
    endpoint = LocalEndpoint(session, settings, lambda: False)
    file = ResultFile(lines)
    found = file.resume(head["settings"])  # of a run that was stopped
    file.begin(head)
    for line in found.values():
        file.add(line)
    for entry in suites.split(","):
        suite, _, count = entry.partition(":")
        items = load(suite, int(count or prompts), data=data)
        planned = cases(items, budgets, temperature)
        for line in measure(endpoint, planned, found):
            file.add(line)
            found[key_of(line)] = line
        results: dict[Key, Result] = {
            key: found[key] for case in planned for key in case.keys if key in found
        }
        for line in [each for each in results.values() if each["budget"] != PLAIN][:show]:
            print("-" * 80, line.get("text"), sep="\n", flush=True)
        for row in rows(list(results.values())):
            known = {name: head[name] for name in ("device", "torch")}
            report.line(**known, **({"label": label} if label else {}), **row)
