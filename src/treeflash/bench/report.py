"""Lines of a run to figures: means with their spread over prompts, tables, changes. Knows no screen."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from treeflash.bench.runner import PLAIN, Line

Figure = dict[str, float]  # mean, sd and n
Row = dict[str, Any]
NOISE = 2.0  # standard errors that a change must exceed
BUSY = 0.5  # of the CPUs, beyond which times are disturbed
LEAST = 0.01  # and the share of the old value

DEFINITIONS = """\
- Every prompt goes through the model's chat template, and end tokens end the answer. Plain and tree decoding
  run in the same process on the same prompts, behind a warm-up; which comes first changes with every prompt.
- tok/s: tokens after the first over the time since the first, mean over prompts; ± is the standard deviation
  over prompts. Speed-up: mean over prompts of the ratio. TTFT: from the request to the first token; nothing
  is remembered from prompt to prompt but in the turns of one conversation. (A server remembers as it likes.)
- Accepted: tokens committed a step, 1 is plain decoding, counted up to where an answer begins to loop (a run
  of twelve tokens for the third time). Loops: share of answers that do; their tok/s flatters, so it is shown.
- Rows: of a step, the root included. Draft, verify, rest: milliseconds of a step. Memory: the peak, of the
  GPU or else of the process.
- Sweep 16/658: trees of 16 nodes, all of them verified whether it pays or not; a prompt of 658 tokens.
- Same text: share of answers that are the same to the letter with plain and with tree decoding.
- Score: pass@1 for code, run in a process with limits; the exact answer for mathematics; sound JSON. Prose
  has none.
"""


def figure(values: Sequence[float]) -> Figure | None:
    if not values:
        return None
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "sd": spread, "n": len(values)}


def rows(lines: Sequence[Line]) -> list[Row]:
    """One for each suite, temperature, budget and context, in the order of the run."""
    measured = [line for line in lines if "skipped" not in line]
    plain = {_place(line): line for line in measured if line["budget"] == PLAIN}
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in measured:
        # Only a sweep has several budgets and contexts; a plain run on its own is shown too.
        groups.setdefault((line["suite"], line["temperature"], line["context"], line["budget"]), []).append(
            line
        )
    shown = {key: group for key, group in groups.items() if key[3] != PLAIN}
    alone = {key: group for key, group in groups.items() if not any(k[:3] == key[:3] for k in shown)}
    return [_row(key, group, plain) for key, group in (shown | alone).items()]


def overall(lines: Sequence[Line]) -> Row | None:
    """All suites but the sweep, every prompt with the same weight."""
    measured = [line for line in lines if "skipped" not in line and line["suite"] != "sweep"]
    plain = {_place(line): line for line in measured if line["budget"] == PLAIN}
    tree = [line for line in measured if line["budget"] != PLAIN]
    if len({line["suite"] for line in tree}) < 2 or len({line["temperature"] for line in tree}) > 1:
        return None
    return _row(("overall", tree[0]["temperature"], 0, tree[0]["budget"]), tree, plain)


def _place(line: Line) -> tuple[str, float]:
    return line["prompt"], line["temperature"]


def _row(key: tuple[Any, ...], group: Sequence[Line], plain: Mapping[Any, Line]) -> Row:
    pairs = [(plain[_place(line)], line) for line in group if _place(line) in plain]
    timed = [(old, new) for old, new in pairs if old["tok_s"] and new["tok_s"]]
    # A server may remember the prompt when it is asked for the second time: then the first time counts.
    fresh = [
        min(line, plain.get(_place(line), line), key=lambda each: each["cached_tokens"]) for line in group
    ]
    suite, temperature, context, budget = key

    def of(name: str, share: Callable[[Line], float] = lambda line: 1.0) -> Figure | None:
        return figure([line[name] * share(line) for line in group if line.get(name) is not None])

    def per_step(line: Line) -> float:
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
        "plain_score": figure([float(old["right"]) for old, _ in pairs if old["right"] is not None]),
        "loops": of("loops"),
    }


def document(head: Line, lines: Sequence[Line]) -> dict[str, Any]:
    """Everything; `lines` without the answers' texts."""
    kept = [{name: value for name, value in line.items() if name != "text"} for line in lines]
    return summary(head, lines) | {"lines": kept}


def summary(head: Line, lines: Sequence[Line]) -> dict[str, Any]:
    skipped = sum("skipped" in line for line in lines)
    return {"run": head, "suites": rows(lines), "overall": overall(lines), "skipped": skipped}


SPEED = ("suite", "prompts", "plain tok/s", "tree tok/s", "speed-up", "accepted", "same text", "score")
STEPS = ("suite", "rows", "draft ms", "verify ms", "rest ms", "TTFT s", "tokens", "loops", "memory")


def tables(lines: Sequence[Line]) -> dict[tuple[str, ...], list[list[str]]]:
    """Speed, and what steps are made of, as text: columns to rows, the last for all suites together."""
    temperatures = sorted({line["temperature"] for line in lines if "skipped" not in line})
    totals = [overall([line for line in lines if line.get("temperature") == each]) for each in temperatures]
    found = [*rows(lines), *(total for total in totals if total)]
    return {SPEED: [_speed(row) for row in found], STEPS: [_steps(row) for row in found]}


def _speed(row: Row) -> list[str]:
    return [
        name_of(row),
        str(row["prompts"]),
        spread(row["plain_tok_s"], 1),
        spread(row["tok_s"], 1) if row["budget"] != PLAIN else "–",
        spread(row["speedup"], 2),
        spread(row["acceptance_length"], 2),
        percent(row["identical"]),
        percent(row["score"]),
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


def spread(found: Figure | None, digits: int) -> str:
    if found is None:
        return "–"
    return f"{found['mean']:.{digits}f}" + (f" ± {found['sd']:.{digits}f}" if found["n"] > 1 else "")


def percent(found: Figure | None) -> str:
    return "–" if found is None else f"{100 * found['mean']:.0f}%"


def markdown(
    head: Line, lines: Sequence[Line], pictures: Mapping[str, str] | None = None, *, notes: str = ""
) -> str:
    """One run: what ran, notes, the table, the command, the floor, the pictures (title to file)."""
    parts = [f"## {title(head)}\n", _machine(head) + "\n", *([notes] if notes else [])]
    for columns, cells in tables(lines).items():
        table = [columns, ["---"] * len(columns), *cells]
        parts.append("\n".join("| " + " | ".join(each) + " |" for each in table) + "\n")
    parts.append(f"Command: `{head['command']}`\n")
    remarks = [floor(head), disturbance(head)]
    remarks += [f"{line['prompt']} was left out: {line['skipped']}." for line in lines if "skipped" in line][
        :3
    ]
    parts += [" ".join(each for each in remarks if each) + "\n"] if any(remarks) else []
    parts += [f"![{name}]({path})\n" for name, path in (pictures or {}).items()]
    return "\n".join(parts)


def title(head: Line) -> str:
    trees = ", trees of the whole budget" if head["settings"].get("fixed") else ""
    return f"{subject(head)}: {head['settings']['suites']}{trees}"


def subject(head: Line) -> str:
    return f"{head['settings']['model']} on {head['device']}"


def _machine(head: Line) -> str:
    settings = head["settings"]
    if "url" in settings:
        return (
            f"{head['date'][:10]}, from outside by TreeFlash {head['treeflash']} ({head['commit']}), "
            f"{settings['n_gen']} tokens at most, seed {settings['seed']}."
        )
    draft = f", draft {settings['draft']}" if settings.get("draft") else ", no draft"
    return (
        f"{head['date'][:10]}, TreeFlash {head['treeflash']} ({head['commit']}), torch {head['torch']}, "
        f"{head['threads']} CPU threads{draft}, {settings['n_gen']} tokens at most, seed {settings['seed']}."
    )


def floor(head: Line) -> str:
    """What plain decoding cannot beat: reading every weight once a token."""
    weights, speed = head.get("weights_bytes"), head.get("read_bandwidth")
    if not weights or not speed:
        return ""
    return (
        f"Floor: a token that is decoded plainly reads {weights / 1e6:,.0f} MB of weights; at the "
        f"{speed / 1e9:.1f} GB/s measured here that takes {1000 * weights / speed:.2f} ms: plain decoding "
        f"gives at most {speed / weights:.1f} tok/s."
    )


def disturbance(head: Line) -> str:
    """Said where other programs were busy when the run began."""
    load, cpus = head.get("load", 0.0), head.get("cpus") or 1
    if load <= BUSY * cpus:
        return ""
    return (
        f"**Other programs were busy** when it began (load {load:.1f} on {cpus} CPUs): times and speed-ups "
        "are worth little. Texts and scores do not depend on it, nor do accepted tokens where --fixed is set."
    )


METRICS = {
    "tree tok/s": ("tok_s", 1),
    "plain tok/s": ("plain_tok_s", 1),
    "speed-up": ("speedup", 2),
    "accepted": ("acceptance_length", 2),
    "TTFT s": ("ttft_s", 3),
    "score": ("score", 2),
}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What else changed between two documents, in words; figures that hang on it say little."""
    facts = [
        document["run"]["settings"] | {name: document["run"].get(name) for name in ("device", "threads")}
        for document in (old, new)
    ]
    names = [name for name in facts[1] if facts[0].get(name) != facts[1][name] and name != "suites"]
    return [f"{name} was {facts[0].get(name)}, is {facts[1][name]}" for name in names]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str, str, str, bool]]:
    """(suite, figure, old, new, change, beyond noise) for every figure that both documents have.

    Prompts that both measured are compared one by one, so that what differs from prompt to prompt is no
    noise.
    """
    before, after = (_by_prompt(document["lines"]) for document in (old, new))
    found = []
    for place in after:
        for label, (name, digits) in METRICS.items():
            ours, theirs = after[place].get(name, {}), before.get(place, {}).get(name, {})
            both = [prompt for prompt in ours if prompt in theirs]
            if not both:
                continue
            first, second = ([values[prompt] for prompt in both] for values in (theirs, ours))
            mean, changes = statistics.fmean(first), [b - a for a, b in zip(first, second, strict=True)]
            change = statistics.fmean(changes)
            share = change / mean if mean else (math.inf if change else 0.0)
            suite, heat, context = place
            where = suite + (f" T={heat:g}" if heat else "") + (f" context {context}" if context else "")
            found.append(
                (
                    where,
                    label,
                    f"{mean:.{digits}f}",
                    f"{statistics.fmean(second):.{digits}f}",
                    f"{share:+.1%}" if math.isfinite(share) else "new",
                    _beyond_noise(changes, share),
                )
            )
    return found


def _beyond_noise(changes: Sequence[float], share: float) -> bool:
    if len(changes) < 3 or abs(share) < LEAST:
        return False
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    return abs(statistics.fmean(changes)) > NOISE * error


def _by_prompt(lines: Sequence[Line]) -> dict[tuple[str, float, int], dict[str, dict[Any, float]]]:
    found: dict[tuple[str, float, int], dict[str, dict[Any, float]]] = {}
    for place, prompt, name, number in _figures(lines):
        found.setdefault(place, {}).setdefault(name, {})[prompt] = number
    return found


def _figures(lines: Sequence[Line]) -> Iterator[tuple[tuple[str, float, int], Any, str, float]]:
    measured = [line for line in lines if "skipped" not in line]
    plain = {_place(line): line["tok_s"] for line in measured if line["budget"] == PLAIN}
    for line in measured:
        place = (line["suite"], line["temperature"], line["context"])
        prompt = (line["prompt"], line["budget"] if line["suite"] == "sweep" else None)
        if line["budget"] == PLAIN:
            yield place, prompt, "plain_tok_s", line["tok_s"]
            continue
        yield place, prompt, "tok_s", line["tok_s"]
        yield place, prompt, "ttft_s", line["ttft_s"]
        if line["acceptance_length"] is not None:
            yield place, prompt, "acceptance_length", line["acceptance_length"]
        if line["right"] is not None:
            yield place, prompt, "score", float(line["right"])
        if plain.get(_place(line)):
            yield place, prompt, "speedup", line["tok_s"] / plain[_place(line)]
