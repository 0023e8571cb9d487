"""Summaries of a run's results: means and standard deviations over prompts, tables, comparisons, markdown."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bough.bench import measure
from bough.bench.runner import PLAIN, Result
from bough.hub.catalog import named
from bough.old_name import NAME, OLD_NAME

Figure = dict[str, float]  # mean, sd and n
Row = dict[str, Any]
NOISE = 2.0  # standard errors that a change must exceed
LEAST = 0.01  # and the share of the old value that it must exceed
CUT = 0.05  # share of cut answers above which a score is not to be believed
BUSY = 0.5  # load per CPU above which times are unreliable

DEFINITIONS = """\
- Every prompt is rendered with the model's chat template, and end tokens end the output. Plain and tree
  decoding run in the same process on the same prompts, after a warm-up; which one runs first alternates.
- tok/s: decode throughput, tokens after the first over the time since the first, mean over prompts; ± is the
  standard deviation over prompts. Speed-up: mean over prompts of the ratio. TTFT: time from the request to
  the first token; the prefix cache is cleared between prompts, except between the turns of one conversation.
  (A server's prefix cache cannot be cleared.)
- Acceptance length: tokens committed per step, 1 for plain decoding, counted up to where an output starts to
  loop (the third occurrence of a 12-gram). Loops: share of outputs that loop; their tok/s is too favourable.
- Rows: verified rows per step, the root included. Draft, verify, other: milliseconds per step. Memory: peak
  of the GPU, or of the process on a CPU.
- Sweep 16/658: trees of 16 nodes, all verified regardless of cost; a prompt of 658 tokens.
- Identical: share of outputs that are identical to plain decoding.
- Score: pass@1 for code, run in a process with limits; the exact answer for mathematics; valid JSON. Prose is
  not scored.
"""


def figure(values: Sequence[float]) -> Figure | None:
    if not values:
        return None
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "sd": spread, "n": len(values)}


def rows(lines: Sequence[Result]) -> list[Row]:
    """Return a row for each suite, temperature, budget and context, in the order of the run."""
    measured = [line for line in lines if "skipped" not in line]
    plain = {_key(line): line for line in measured if line["budget"] == PLAIN}
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for line in measured:
        # Only a sweep has several budgets and contexts; a run with plain decoding alone has rows too.
        groups.setdefault((line["suite"], line["temperature"], line["context"], line["budget"]), []).append(
            line
        )
    shown = {key: group for key, group in groups.items() if key[3] != PLAIN}
    alone = {key: group for key, group in groups.items() if not any(k[:3] == key[:3] for k in shown)}
    return [_row(key, group, plain) for key, group in (shown | alone).items()]


def overall(lines: Sequence[Result]) -> Row | None:
    """Return a row for all suites except the sweep, every prompt with the same weight."""
    measured = [line for line in lines if "skipped" not in line and line["suite"] != "sweep"]
    plain = {_key(line): line for line in measured if line["budget"] == PLAIN}
    tree = [line for line in measured if line["budget"] != PLAIN]
    if len({line["suite"] for line in tree}) < 2 or len({line["temperature"] for line in tree}) > 1:
        return None
    return _row(("overall", tree[0]["temperature"], 0, tree[0]["budget"]), tree, plain)


def _key(line: Result) -> tuple[str, float]:
    return line["prompt"], line["temperature"]


def _row(key: tuple[Any, ...], group: Sequence[Result], plain: Mapping[Any, Result]) -> Row:
    pairs = [(plain[_key(line)], line) for line in group if _key(line) in plain]
    timed = [(old, new) for old, new in pairs if old["tok_s"] and new["tok_s"]]
    # A server may have cached the prompt by its second request: TTFT counts the one with fewer cached tokens.
    fresh = [min(line, plain.get(_key(line), line), key=lambda each: each["cached_tokens"]) for line in group]
    suite, temperature, context, budget = key

    def of(name: str, share: Callable[[Result], float] = lambda line: 1.0) -> Figure | None:
        return figure([line[name] * share(line) for line in group if line.get(name) is not None])

    def per_step(line: Result) -> float:
        return 1000 / line["steps"] if line["steps"] else 0.0

    return {
        "suite": suite,
        "temperature": temperature,
        "context": context,
        "budget": budget,
        "prompts": len(group),
        "prompt_tokens": of("prompt_tokens"),
        "tokens": of("tokens"),
        "plain_tok_s": figure([old["tok_s"] for old, _ in timed]),
        "tok_s": figure([line["tok_s"] for line in group if line["tok_s"]]),
        "speedup": figure([new["tok_s"] / old["tok_s"] for old, new in timed]) if budget != PLAIN else None,
        "acceptance_length": of("acceptance_length"),
        "rows_per_step": of("rows_per_step"),
        "draft_ms": of("draft_s", per_step),
        "verify_ms": of("verify_s", per_step),
        "rest_ms": of("rest_s", per_step),
        "ttft_s": figure([line["ttft_s"] for line in fresh]),
        "cached_tokens": of("cached_tokens"),
        "memory": max((line["memory"] for line in group if line.get("memory")), default=None),
        "identical": figure([float(old["text"] == new["text"]) for old, new in pairs])
        if budget != PLAIN
        else None,
        "score": of("right"),
        "cut": figure([float(line["finish"] == "length") for line in group if line.get("right") is not None]),
        "plain_score": figure([float(old["right"]) for old, _ in pairs if old["right"] is not None]),
        "loops": of("loops"),
    }


def document(head: Result, lines: Sequence[Result]) -> dict[str, Any]:
    """Return the whole run as JSON data; `lines` without the outputs' texts."""
    entries = [{name: value for name, value in line.items() if name != "text"} for line in lines]
    return summary(head, lines) | {"lines": entries}


def summary(head: Result, lines: Sequence[Result]) -> dict[str, Any]:
    skipped = sum("skipped" in line for line in lines)
    return {"run": head, "suites": rows(lines), "overall": overall(lines), "skipped": skipped}


SPEED = (
    *("suite", "prompts", "plain tok/s", "tree tok/s", "speed-up", "acceptance length", "identical", "score"),
)
STEPS = ("suite", "rows", "draft ms", "verify ms", "other ms", "TTFT s", "tokens", "loops", "memory")


def tables(lines: Sequence[Result]) -> dict[tuple[str, ...], list[list[str]]]:
    """Return the throughput table and the step table as text, by their columns; overall rows come last."""
    temperatures = sorted({line["temperature"] for line in lines if "skipped" not in line})
    totals = [overall([line for line in lines if line.get("temperature") == each]) for each in temperatures]
    figures = [*rows(lines), *(total for total in totals if total)]
    return {SPEED: [_speed(row) for row in figures], STEPS: [_steps(row) for row in figures]}


BESIDE = ("suite", "acceptance length", "published", "share")


def published(head: Result, lines: Sequence[Result]) -> tuple[str, list[list[str]]]:
    """Return who published acceptance lengths with this model's draft, and a table of both."""
    found = named(head["settings"]["model"]) if head["settings"].get("draft") else None
    if found is None:
        return "", []
    table = []
    for row in rows(lines):
        theirs, ours = found[0].published.get(row["suite"]), row["acceptance_length"]
        if theirs is not None and ours is not None and row["budget"] != PLAIN:
            table.append([name_of(row), spread(ours, 2), f"{theirs:.2f}", f"{ours['mean'] / theirs:.0%}"])
    return found[0].published_by, table


def _speed(row: Row) -> list[str]:
    return [
        name_of(row),
        str(row["prompts"]),
        spread(row["plain_tok_s"], 1),
        spread(row["tok_s"], 1) if row["budget"] != PLAIN else "–",
        spread(row["speedup"], 2),
        spread(row["acceptance_length"], 2),
        percent(row["identical"]),
        _score(row),
    ]


def _steps(row: Row) -> list[str]:
    return [
        name_of(row),
        spread(row["rows_per_step"], 1),
        *(spread(row[name], 1) for name in ("draft_ms", "verify_ms", "rest_ms")),
        spread(row["ttft_s"], 2),
        spread(row["tokens"], 0),
        percent(row["loops"]),
        f"{row['memory'] / 2**30:.2f} GiB" if row["memory"] else "–",
    ]


def name_of(row: Row) -> str:
    heat = f" T={row['temperature']:g}" if row["temperature"] else ""
    if row["suite"] != "sweep":
        return row["suite"] + heat
    tokens = f"/{row['prompt_tokens']['mean']:.0f}" if row["prompt_tokens"] else ""
    return f"sweep {row['budget']}{tokens}{heat}"


def spread(figure: Figure | None, digits: int) -> str:
    if figure is None:
        return "–"
    return f"{figure['mean']:.{digits}f}" + (f" ± {figure['sd']:.{digits}f}" if figure["n"] > 1 else "")


def _score(row: Row) -> str:
    """Return a score with the number of its answers that were cut."""
    cut = round(row["cut"]["mean"] * row["cut"]["n"]) if row["cut"] else 0
    return percent(row["score"]) + (f", {cut} of {row['cut']['n']} cut" if cut else "")


def percent(figure: Figure | None) -> str:
    return "–" if figure is None else f"{100 * figure['mean']:.0f}%"


def markdown(head: Result, lines: Sequence[Result], pictures: Mapping[str, str] | None = None) -> str:
    """Return a run as markdown: settings, tables, command, bandwidth bound, plots (title to file)."""
    sections = [f"## {title(head)}\n", _machine(head) + "\n"]
    sections += [markdown_table(columns, cells) + "\n" for columns, cells in tables(lines).items()]
    source, beside = published(head, lines)
    if beside:
        sections.append(f"Published by {source}:\n\n{markdown_table(BESIDE, beside)}\n")
    sections.append(f"Command: `{head['command']}`\n")
    skipped = [f"{line['prompt']} was skipped: {line['skipped']}." for line in lines if "skipped" in line]
    remarks = [floor(head), mismatch(head), disturbance(head), cut_short(lines), *skipped[:3]]
    sections += [" ".join(each for each in remarks if each) + "\n"] if any(remarks) else []
    sections += [f"![{name}]({path})\n" for name, path in (pictures or {}).items()]
    return "\n".join(sections)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows))


def title(head: Result) -> str:
    trees = ", always the whole budget" if head["settings"].get("fixed") else ""
    return f"{subject(head)}: {head['settings']['suites']}{trees}"


def subject(head: Result) -> str:
    return f"{head['settings']['model']} on {head['device']}"


def _version(head: Result) -> str:
    return head.get(NAME) or head[OLD_NAME]


def _machine(head: Result) -> str:
    settings = head["settings"]
    if "url" in settings:
        return (
            f"{head['date'][:10]}, measured at the client by Bough {_version(head)} "
            f"({head['commit']}), {_limit(settings)}, seed {settings['seed']}."
        )
    draft = f", draft {settings['draft']}" if settings.get("draft") else ", no draft"
    return (
        f"{head['date'][:10]}, Bough {_version(head)} ({head['commit']}), torch {head['torch']}, "
        f"{head['threads']} CPU threads{draft}, {_limit(settings)}, seed {settings['seed']}."
    )


def _limit(settings: Mapping[str, Any]) -> str:
    if settings["n_gen"]:
        return f"at most {settings['n_gen']} tokens"
    return f"at most {measure.SPEED} tokens, {measure.SCORED} where answers are scored"


def floor(head: Result) -> str:
    """Return the bandwidth bound of plain decoding: every weight is read once per token."""
    weights, speed = head.get("weights_bytes"), head.get("read_bandwidth")
    if not weights or not speed:
        return ""
    return (
        f"Bandwidth bound: plain decoding reads {weights / 1e6:,.0f} MB of weights per token; at the "
        f"measured {speed / 1e9:.1f} GB/s that takes {1000 * weights / speed:.2f} ms, so its throughput is "
        f"at most {speed / weights:.1f} tok/s."
    )


def cut_short(lines: Sequence[Result]) -> str:
    """Return a warning if the limit cut so many scored answers that the score says little."""
    scored = [line for line in lines if line.get("right") is not None]
    cut = sum(line["finish"] == "length" for line in scored)
    if cut <= CUT * len(scored):
        return ""
    return (
        f"**{cut} of {len(scored)} scored answers were cut** by the limit of tokens: the scores are too low. "
        "A larger `-n` leaves room."
    )


def mismatch(head: Result) -> str:
    """Return what is wrong with the draft; nothing where it fits."""
    return f"**The draft does not fit**: {head['draft_problem']}." if head.get("draft_problem") else ""


def disturbance(head: Result) -> str:
    """Return a warning if other programs were busy when the run began."""
    load, cpus = head.get("load") or 0.0, head.get("cpus") or 1
    if load <= BUSY * cpus:
        return ""
    return (
        f"**Other programs were busy** when the run began (load {load:.1f} on {cpus} CPUs): times and "
        "speed-ups are unreliable. Outputs and scores do not depend on it, nor does the acceptance length of "
        "a run with `fixed`."
    )


METRICS = {
    "tree tok/s": ("tok_s", 1),
    "plain tok/s": ("plain_tok_s", 1),
    "speed-up": ("speedup", 2),
    "acceptance length": ("acceptance_length", 2),
    "TTFT s": ("ttft_s", 3),
    "score": ("score", 2),
}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the settings and facts that differ between two documents, as sentences."""
    facts = [
        document["run"]["settings"] | {name: document["run"].get(name) for name in ("device", "threads")}
        for document in (old, new)
    ]
    names = [name for name in facts[1] if facts[0].get(name) != facts[1][name] and name != "suites"]
    return [f"{name} was {facts[0].get(name)}, is {facts[1][name]}" for name in names]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str, str, str, bool]]:
    """Return (suite, figure, old, new, change, beyond noise) for every figure that both documents have.

    The comparison is paired by prompt, so that the spread between prompts is not counted as noise.
    """
    before, after = (_by_prompt(document["lines"]) for document in (old, new))
    rows = []
    for group in after:
        for label, (name, digits) in METRICS.items():
            ours, theirs = after[group].get(name, {}), before.get(group, {}).get(name, {})
            both = [prompt for prompt in ours if prompt in theirs]
            if not both:
                continue
            first, second = ([values[prompt] for prompt in both] for values in (theirs, ours))
            mean, changes = statistics.fmean(first), [b - a for a, b in zip(first, second, strict=True)]
            change = statistics.fmean(changes)
            share = change / mean if mean else (math.inf if change else 0.0)
            suite, heat, context = group
            where = suite + (f" T={heat:g}" if heat else "") + (f" context {context}" if context else "")
            rows.append(
                (
                    where,
                    label,
                    f"{mean:.{digits}f}",
                    f"{statistics.fmean(second):.{digits}f}",
                    f"{share:+.1%}" if math.isfinite(share) else "new",
                    _beyond_noise(changes, share),
                )
            )
    return rows


def _beyond_noise(changes: Sequence[float], share: float) -> bool:
    if len(changes) < 3 or abs(share) < LEAST:
        return False
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    return abs(statistics.fmean(changes)) > NOISE * error


def _by_prompt(lines: Sequence[Result]) -> dict[tuple[str, float, int], dict[str, dict[Any, float]]]:
    prompts: dict[tuple[str, float, int], dict[str, dict[Any, float]]] = {}
    for group, prompt, name, number in _figures(lines):
        prompts.setdefault(group, {}).setdefault(name, {})[prompt] = number
    return prompts


def _figures(lines: Sequence[Result]) -> Iterator[tuple[tuple[str, float, int], Any, str, float]]:
    measured = [line for line in lines if "skipped" not in line]
    plain = {_key(line): line["tok_s"] for line in measured if line["budget"] == PLAIN}
    for line in measured:
        group = (line["suite"], line["temperature"], line["context"])
        prompt = (line["prompt"], line["budget"] if line["suite"] == "sweep" else None)
        if line["budget"] == PLAIN:
            yield group, prompt, "plain_tok_s", line["tok_s"]
            continue
        yield group, prompt, "tok_s", line["tok_s"]
        yield group, prompt, "ttft_s", line["ttft_s"]
        if line["acceptance_length"] is not None:
            yield group, prompt, "acceptance_length", line["acceptance_length"]
        if line["right"] is not None:
            yield group, prompt, "score", float(line["right"])
        if plain.get(_key(line)):
            yield group, prompt, "speedup", line["tok_s"] / plain[_key(line)]
