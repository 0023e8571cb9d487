"""`bough bench --fixed` for machines that have torch but not the command line's packages.

    python workshop/acceptance.py --data FOLDER --model FILE --draft PATH [--temperature 0.8]

FOLDER holds humaneval/test.jsonl.gz and so on. Appends every prompt's result to --lines; a file bench-*.jsonl
in benchmarks/results becomes a part of docs/benchmarks.md (workshop/make_page.py). Prints a JSON line per
suite, which is also appended to --results, by default benchmarks/results/acceptance.jsonl.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from bough.bench import machine, report
from bough.bench.measure import LocalEndpoint, Settings
from bough.bench.runner import PLAIN, Key, Result, ResultFile, cases, key_of, measure
from bough.bench.suites import Prompt, load
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.prefix_cache.files import identity
from bough.session.loading import load_session

RESULTS = Path(__file__).parents[1] / "benchmarks/results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--suites", default="humaneval,gsm8k,math500", help="a,b or a:164,b:50 (prompts)")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--n-gen", type=int, help="default: 256, or 640 where answers are scored")
    parser.add_argument("--budget", type=int, nargs="+", default=[22])
    parser.add_argument("--label", default="", help="of the draft, for the results")
    parser.add_argument(
        "--adaptive", action="store_true", help="let the row policy choose the number of rows"
    )
    parser.add_argument("--no-lookup", dest="lookup", action="store_false", help="the draft alone")
    parser.add_argument("--no-plain", action="store_true", help="tree decoding only, no baseline")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-ctx", type=int, default=4096)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lines", type=Path, default=Path("acceptance-lines.jsonl"))
    parser.add_argument("--results", type=Path, default=RESULTS / "acceptance.jsonl")
    parser.add_argument("--show", type=int, default=0, help="outputs to print from each suite")
    options = parser.parse_args()
    config = EngineConfig(
        device=options.device,
        max_ctx=options.max_ctx,
        speculation=SpecConfig(budget=max(options.budget), adaptive=options.adaptive, lookup=options.lookup),
        draft=DraftConfig(options.draft) if options.draft else None,
    )
    session = load_session(options.model, config)
    facts = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    facts |= {"model": options.model.stem, "draft": options.draft.name if options.draft else None}
    facts |= {"files": identity([options.model, *([options.draft] if options.draft else [])])[:12]}
    command = shlex.join(["python", *sys.argv])
    head = machine.head(facts, command) | machine.of_session(session)
    thinking = False if session.template.supports_thinking else None
    settings = Settings(n_gen=options.n_gen, seed=options.seed, thinking=thinking)
    budgets = options.budget if options.no_plain else [PLAIN, *options.budget]
    warm_up = Prompt("", "", [{"role": "user", "content": "Count to ten."}])
    short = LocalEndpoint(session, Settings(n_gen=16, thinking=thinking), lambda: False)
    for budget in budgets:
        short.generate(warm_up, warm_up.messages, budget=budget, temperature=0.0)
    endpoint = LocalEndpoint(session, settings, lambda: False)
    file = ResultFile(options.lines)
    found = file.resume(head["settings"])  # of a run that was stopped
    file.begin(head)
    for line in found.values():
        file.add(line)
    for entry in options.suites.split(","):
        suite, _, count = entry.partition(":")
        prompts = load(suite, int(count or options.prompts), data=options.data)
        planned = cases(prompts, budgets, options.temperature)
        for line in measure(endpoint, planned, found):
            file.add(line)
            found[key_of(line)] = line
        results: dict[Key, Result] = {
            key: found[key] for case in planned for key in case.keys if key in found
        }
        for line in [each for each in results.values() if each["budget"] != PLAIN][: options.show]:
            print("-" * 80, line.get("text"), sep="\n", flush=True)
        for row in report.rows(list(results.values())):
            known = {name: head[name] for name in ("date", "commit", "device", "torch")}
            text = json.dumps(known | ({"label": options.label} if options.label else {}) | row)
            print(text, flush=True)
            with options.results.open("a") as log:
                log.write(text + "\n")


if __name__ == "__main__":
    main()
