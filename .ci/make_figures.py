"""Writes the tables of measured figures in README and docs from lines of benchmarks/results.

A new figure is a line first, which names its commit, and then a function here.

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`, and what is under it says whose lines
these are: all of them name one commit. --check reports pages that differ.
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
Line = dict[str, Any]


@cache
def results(file: str) -> list[Line]:
    """Return all lines of a file of results, each with its number."""
    path = RESULTS / f"{file}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line | {"file": file, "number": number} for number, line in enumerate(lines, 1)]


@cache
def old_lines() -> dict[str, dict[str, set[int]]]:
    """Return the numbers of the lines whose commit is lost, and of those of a tree with changes, by file."""
    kinds = tomllib.loads((RESULTS / "old-lines.toml").read_text(encoding="utf-8"))
    return {
        kind: {file: numbers_of(ranges) for file, ranges in files.items()} for kind, files in kinds.items()
    }


def numbers_of(ranges: str) -> set[int]:
    """Return the numbers in `1-3,7`."""
    bounds = (part.partition("-") for part in ranges.split(","))
    return {number for first, _, last in bounds for number in range(int(first), int(last or first) + 1)}


class Source:
    """The lines of a table, which name one commit and one day."""

    def __init__(self, file: str, commit: str):
        self._lines = [line for line in results(file) if line.get("commit") == commit]
        self.used: list[Line] = []

    def one(self, **facts: Any) -> Line:
        """Return the newest line with these values."""
        line = next(line for line in reversed(self._lines) if facts.items() <= line.items())
        self.used.append(line)
        return line

    def all(self, **facts: Any) -> list[Line]:
        lines = [line for line in self._lines if facts.items() <= line.items()]
        assert lines, f"no line with {facts}"
        self.used += lines
        return lines

    def note(self) -> str:
        return note(self.used)


def note(lines: Sequence[Line]) -> str:
    """Return the sentence under a table: file, commit, day and machine of its lines."""
    [file] = {line["file"] for line in lines}
    [commit] = {line["commit"] for line in lines}
    [day] = {line["date"][:10] for line in lines}
    machine = lines[0].get("gpu") or lines[0].get("device") or "CPU"
    lost = {line["number"] for line in lines} & old_lines()["lost"].get(file, set())
    where = f"{commit} (no longer in the history)" if lost else commit
    machine = {"x86_64": "CPU", "cpu": "CPU"}.get(machine, machine)
    return f"Lines of `benchmarks/results/{file}.jsonl`, commit {where}, {day}, {machine}."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in body)


def with_note(text: str, source: Source) -> str:
    return f"{text}\n\n{source.note()}\n"


SUITES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "math500": "MATH-500"}


@cache
def bench(file: str) -> tuple[Line, list[Line]]:
    """Return the run and the prompts of a file of `bough bench`."""
    head, *lines = results(file)
    run = head["run"] | {"file": file, "number": 1}
    return run, lines


def suites() -> str:
    from bough.bench.report import rows

    run, lines = bench("bench-27b-h200-50")
    shown = [row for row in rows(lines) if not row["temperature"]]
    cells = [
        [
            SUITES[row["suite"]],
            *(f"{row[name]['mean']:.0f}" for name in ("plain_tok_s", "tok_s")),
            *(f"{row[name]['mean']:.1f}" for name in ("speedup", "acceptance_length")),
        ]
        for row in shown
    ]
    columns = ["prompts of", "plain tok/s", "tree tok/s", "speed-up", "tokens per step"]
    return f"{table(columns, cells)}\n\n{note([run])}\n"


def bench_27b() -> str:
    from bough.bench.report import tables

    run, lines = bench("bench-27b-h200-50")
    shown = [table(columns, rows) for columns, rows in tables(lines).items()]
    return "\n\n".join([*shown, f"Command: `{run['command']}`", note([run])]) + "\n"


def exact() -> str:
    source = Source("exact", "c68674d")
    lines = [line for line in source.all() if "check" in line]
    total = {name: sum(line[name] for line in lines) for name in ("texts", "same_texts", "rows")}
    merged: dict[str, Line] = {}
    for line in lines:
        first = merged.setdefault(line["check"], dict.fromkeys(total, 0) | {"different_rows": 0})
        for name in first:
            first[name] += line[name]
    rows = []
    for check, line in merged.items():
        pages, _, trees = check.partition(", ")
        kind = "of the draft" if trees.startswith("drafted") else "at random, 2 to 64 rows"
        figures = (line[name] for name in ("texts", "same_texts", "rows", "different_rows"))
        rows.append([pages, kind, *(f"{figure:,}" for figure in figures)])
    columns = ["KV cache", "trees", "texts", "identical", "positions", "with other bits"]
    rows.append(["**all**", "", *(f"{total[name]:,}" for name in total), "0"])
    assert not sum(line["different_rows"] for line in lines)
    return with_note(table(columns, rows), source)


def company() -> str:
    source = Source("exact", "6372736")
    rows = []
    for check in ("trees, 16 at once", "trees, alone"):
        line = source.one(check=check)
        figures = (line[name] for name in ("texts", "same_texts", "rows", "different_rows"))
        rows.append([check, *(f"{figure:,}" for figure in figures)])
    return with_note(table(["f16 cache", "texts", "identical", "positions", "with other bits"], rows), source)


def users() -> str:
    source = Source("server_load", "98ac1c0")
    numbers = (1, 2, 4, 8, 16)
    lines = [source.one(what="users", users=number, label="27B, trees") for number in numbers]
    chats = source.one(what="chatting users", users=8)
    rows = [
        ["tokens a second in all", *(f"{line['tok_s']:,.0f}" for line in lines)],
        ["first token, ms, median", *(f"{line['first_token_ms']['median']:.0f}" for line in lines)],
        ["chat prompts, tokens a second in all", "", "", "", f"{chats['tok_s']:,.0f}", ""],
    ]
    return with_note(table(["users", *map(str, numbers)], rows), source)


def steps_by_context() -> str:
    source = Source("long_context", "b1cc8cd")
    contexts = (256, 32768, 60000, 65536, 131072, 262144)
    rows = []
    for kind in ("f16", "q8_0", "q8_0/q5_0", "q4_0", "tq3_0"):
        for count in (1, 24):
            lines = [source.one(what="step", format=kind, context=at, rows=count) for at in contexts]
            cells = [f"{line['ms']:.1f} ({line['floor_ms']:.1f})" for line in lines]
            rows.append([kind, str(count), *cells])
    return with_note(table(["K/V", "rows", *(f"{at:,}" for at in contexts)], rows), source)


def kv_quality() -> str:
    source = newest("kv_quality")
    rows = []
    for line in source.all():
        window = f"`--window {line['window']}`, f32"
        name = window if line["window"] else f"{line['kv_k']} / {line['kv_v']}"
        rows.append([name, f"{line['kl']:.1e}", f"{line['kl_99']:.1e}", f"{line['same_top']:.1%}"])
    return with_note(table(["K / V", "mean KL", "99th percentile", "same likeliest token"], rows), source)


def prefill() -> str:
    source = Source("prefill", "92630cb with prompt chunks in parts (a first form of the next commit)")
    way = "exact, row scales fused, descriptors"
    lines = [source.one(what="prefill", way=way, tokens=tokens, chunk=8192) for tokens in (8192, 131072)]
    smaller = source.one(what="chunk size", way=way, chunk=4096)
    rows = [
        ["chunks of 8,192: tok/s", *(f"{line['tok_s']:,}" for line in lines)],
        ["share of the tensor cores' peak", *(f"{line['share']:.0%}" for line in lines)],
        ["chunks of 4,096, as the H200 has them: tok/s", f"{smaller['tok_s_at_8192']:,}", ""],
    ]
    return with_note(table(["tokens", "8,192", "131,072"], rows), source)


def int8_text() -> str:
    source = newest("prefill", what="cost of int8")
    names = {"target": "bough-40m", "qwen2.5-coder-0.5b-instruct-q4_k_m": "Qwen2.5-Coder-0.5B, Q4_K_M"}
    rows = []
    for line in source.all(what="cost of int8"):
        exact, rounded = line["perplexity"]
        cells = [f"{line['mean_kl']:.1e}", f"{line['top1']:.1%}", f"{exact:.2f}", f"{rounded:.2f}"]
        rows.append([f"{names[line['model']]}, {line['text']}", *cells])
    columns = ["", "mean KL divergence", "likeliest token the same", "perplexity, exact", "in int8"]
    return with_note(table(columns, rows), source)


TASKS = {
    "single": "one number",
    "multikey": "one of several codes",
    "chain": "chain of three lines",
    "paraphrase": "no word in common",
    "code-name": "constant by its name",
    "code-meaning": "function by its meaning",
    "all": "all",
}
LENGTHS = {2048: "2K", 8192: "8K", 30000: "30K"}
MIXED = "attention + words"


def share(line: Line, budget: str) -> str:
    return f"{100 * line['kept'][budget] / line['questions']:.0f}"


def compression() -> str:
    source = Source("compress", "4f59ea6")
    every = [(rule, tokens) for rule in (MIXED, "attention", "words") for tokens in LENGTHS]
    every += [("head + tail", 8192), ("random", 8192)]
    rows = []
    for task, name in TASKS.items():
        asked = [source.one(rule=MIXED, task=task, tokens=tokens)["questions"] for tokens in LENGTHS]
        cells = [share(source.one(rule=rule, task=task, tokens=tokens), "0.1") for rule, tokens in every]
        rows.append([f"{name}, {', '.join(map(str, asked))}", *cells])
    columns = ["task, questions of each length", *(f"{rule}, {LENGTHS[tokens]}" for rule, tokens in every)]
    return with_note(table(columns, rows), source)


def compression_budgets() -> str:
    source = Source("compress", "4f59ea6")
    budgets = ("0.3", "0.2", "0.1", "0.05")
    rows = []
    for task in ("all", "code-meaning", "paraphrase", "chain"):
        lines = [source.one(rule=MIXED, task=task, tokens=tokens) for tokens in LENGTHS]
        rows.append([TASKS[task], *("; ".join(share(line, budget) for line in lines) for budget in budgets)])
    return with_note(table(["budget", *budgets], rows), source)


def small_pair() -> str:
    source = newest("acceptance", budget=22)
    rows = []
    for suite, name in SUITES.items():
        cold, warm = (source.one(suite=suite, temperature=heat, budget=22) for heat in (0.0, 0.8))
        length = [f"{line['acceptance_length']['mean']:.2f}" for line in (cold, warm)]
        rows.append([name, *length, f"{cold['loops']['mean']:.0%}"])
    columns = ["", "tokens per step, greedy", "T = 0.8", "greedy outputs that loop"]
    return with_note(table(columns, rows), source)


def draft_kinds() -> str:
    source = Source("acceptance", "98ac1c0 with the changes of this day")
    return by_kind(source, ("dflash", "dflash2", "mtp"), (0.0, 0.8))


def mlp_head() -> str:
    return by_kind(Source("heads", "968dfd15"), ("dflash", "mlp"), (0.0, 0.8, 1.0))


def by_kind(source: Source, kinds: Sequence[str], heats: Sequence[float]) -> str:
    """Return tokens a step of drafts of each kind, by budget."""
    budgets = (8, 22, 63)
    rows = [["suite", "T", *kinds, *kinds, *kinds]]
    for suite, name in SUITES.items():
        for heat in heats:
            lines = [
                source.one(label=kind, suite=suite, temperature=heat, budget=budget)
                for budget in budgets
                for kind in kinds
            ]
            rows.append([name, f"{heat:g}", *(f"{line['acceptance_length']['mean']:.2f}" for line in lines)])
    more = [""] * (len(kinds) - 1)
    return with_note(table(["", "", "budget 8", *more, "22", *more, "63", *more], rows), source)


def replicas() -> str:
    source = Source("scale_out", "4a89fa5")
    speed, cost = source.one(what="throughput"), source.one(what="overhead")
    gone, left, killed = (source.one(what=name) for name in ("cancellation", "vanishing clients", "kill -9"))
    one, two = (" and ".join(f"{value:.0f}" for value in speed["tok_s"][count]) for count in "12")
    first, event = (
        [f"{cost[f'{what}_ms'][way]['median']:.1f}" for way in ("replica", "plain")]
        for what in ("first_token", "event")
    )
    ends = killed["ends"]
    rows = [
        [f"{speed['clients']} clients, tok/s, two replicas against one", f"{two} against {one}"],
        ["first token, ms, one replica against the plain server", " against ".join(first)],
        ["ms for each event of a stream, the same", " against ".join(event)],
        [
            "a cancelled request is gone from its replica",
            f"after {gone['gone_ms']['min']:.0f} to {gone['gone_ms']['max']:.0f} ms",
        ],
        [
            f"{left['clients']} clients that leave within two seconds",
            f"{left['requests_left']} requests left, {left['settled_ms']} ms after the last one left",
        ],
        [
            f"`kill -9` of a replica with {killed['clients']} requests",
            f"{ends['error unavailable in the text']} stream ended with `unavailable`; whole:"
            f" {ends['stream, length']} streams, {ends['whole answer, 200']} answers; a new replica after"
            f" {killed['new_replica_s']} s",
        ],
    ]
    return with_note(table(["", "two cores, one thread a replica"], rows), source)


WAYS = {
    "native plain": "Bough, plain",
    "native trees": "Bough, trees",
    "llama.cpp": "llama.cpp, plain",
    "llama.cpp lookup": "llama.cpp, its lookup",
}


def on_a_cpu() -> str:
    source = newest("cpu_native", model="target.gguf")
    line, rows = source.one(model="target.gguf", threads=1, suite="humaneval"), []
    for way, times in line["decode"].items():
        plain, prompt = way != "native trees", line["prefill"].get(way)
        step = "{median_ms:.2f}, {least_ms:.2f}".format(**times["step_wall"]) if plain else ""
        rows.append([WAYS[way], f"{times['tok_s']:.0f}", step, f"{prompt['tok_s']:,.0f}" if prompt else ""])
    columns = ["", "tokens per second", "ms per plain step: median, least", "prefill of 512 tokens, tok/s"]
    return with_note(table(columns, rows), source)


def trees_on_a_cpu() -> str:
    source = newest("cpu_native", model="target.gguf")
    rows = []
    for suite, name in {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mtbench": "MT-Bench"}.items():
        line = source.one(model="target.gguf", threads=1, suite=suite)
        ratio = line["ratios"]["native trees / native plain"]["wall"]
        steps = line["decode"]["native trees"]["tokens_per_step"]
        same = line["texts_as_the_first"]["native trees"]
        rows.append([name, "{all:.2f} ({low:.2f} to {high:.2f})".format(**ratio), f"{steps:.2f}", same])
    columns = ["", "trees, times plain decoding", "tokens per step", "texts that are plain decoding's"]
    return with_note(table(columns, rows), source)


def real_model_on_a_cpu() -> str:
    model, rows = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", []
    source = newest("cpu_native", model=model)
    for line in source.all(model=model, threads=1):
        asked = {"humaneval": "HumanEval", "edit": "edit of a file"}[line["suite"]]
        for way, name in WAYS.items():
            times, prompt = line["decode"][way], line["prefill"].get(way)
            cells = [f"{times['tok_s']:.1f}", f"{times['tokens_per_step']:.2f}"]
            cells.append(f"{prompt['tok_s']:.0f}" if prompt else "")
            rows.append([asked, name.replace("trees", "its lookup"), *cells])
    columns = ["", "", "tokens per second", "tokens per step", "prefill of 512 tokens, tok/s"]
    return with_note(table(columns, rows), source)


def newest(file: str, **facts: Any) -> Source:
    """Return the lines of the commit that last measured what these values say."""
    return Source(
        file, next(line for line in reversed(results(file)) if facts.items() <= line.items())["commit"]
    )


def compression_by_words() -> str:
    source = newest("compress", rule="words", tokens=40000)
    budgets = ("0.3", "0.2", "0.15", "0.1", "0.05")
    rows = []
    for task, name in TASKS.items():
        line = source.one(rule="words", task=task, tokens=40000)
        rows.append([f"{name}, {line['questions']}", *(share(line, budget) for budget in budgets)])
    return with_note(table(["words alone, 40,000 tokens, questions", *budgets], rows), source)


def compression_times() -> str:
    source = Source("compress", "92630cb with prompt chunks in parts (a first form of the next commit)")
    rows = []
    for length in (32768, 65536, 131072):
        facts = {"check": "faster than exact", "scorer": "qwen2.5-coder-0.5b", "length": length}
        tenth, twentieth = (source.one(**facts, keep=keep) for keep in (0.1, 0.05))
        times = (tenth["exact_s"], tenth["seconds"], twentieth["seconds"])
        rows.append([f"{length:,}", *(f"{time:.2f} s" for time in times)])
    columns = ["prompt tokens", "read exactly", "compressed to 0.1", "to 0.05"]
    return with_note(table(columns, rows), source)


TABLES: Mapping[str, Callable[[], str]] = {
    "suites": suites,
    "bench-27b": bench_27b,
    "exact": exact,
    "company": company,
    "users": users,
    "steps-by-context": steps_by_context,
    "kv-quality": kv_quality,
    "prefill": prefill,
    "int8-text": int8_text,
    "compression": compression,
    "compression-budgets": compression_budgets,
    "compression-by-words": compression_by_words,
    "compression-times": compression_times,
    "small-pair": small_pair,
    "draft-kinds": draft_kinds,
    "mlp-head": mlp_head,
    "replicas": replicas,
    "cpu": on_a_cpu,
    "cpu-trees": trees_on_a_cpu,
    "cpu-real": real_model_on_a_cpu,
}


def written(text: str) -> str:
    """Return a page with its tables made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}{block[4]}", text)


def main() -> int:
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv[1:]:
                page.write_text(new, encoding="utf-8")
    if "--check" in sys.argv[1:] and stale:
        print(f"{', '.join(stale)}: run python .ci/make_figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
