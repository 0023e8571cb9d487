"""Which facts compression keeps with the attention of a model: several lengths, all rules, a row for a task.

python -m workshop compression.run model.gguf [--prompts 8] [--context 2k,8k] [--figures FOLDER]
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

from bough.cli.values import size
from bough.compress.scorer import MixedScorer, Query, Scorer, never
from bough.compress.words import WordScorer
from bough.gguf.reader import GGUFFile
from bough.memory.device import pick_device
from bough.session.attention_scorer import AttentionScorer
from bough.text.tokenizer import Tokenizer
from workshop.case import RESULTS, case
from workshop.compression.measure import DEPTHS, KEEP, Outcome, RandomScorer, measure
from workshop.compression.texts import aggregation, contexts
from workshop.report import Report

Row = dict[str, Any]
OURS = "attention + words"


class Remembered:
    """A scorer that does not score the same units for the same question twice: ratios share them."""

    any_thread = True

    def __init__(self, scorer: Scorer, name: str):
        self.name, self._scorer = name, scorer
        self._found: dict[tuple[Any, ...], list[float]] = {}

    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        key = (hash(tuple(units)), *queries)
        if key not in self._found:
            self._found[key] = self._scorer.score(units, queries, cancelled)
        return self._found[key]


def run(
    path: Path, lengths: Sequence[int], texts: int, *, device: torch.device, seed: int, attend: bool = True
) -> Iterator[tuple[int, list[Row]]]:
    """Yield the rows of each length, of `texts` texts; `attend`: with the attention of a model."""
    attention = AttentionScorer.load(path, device=device) if attend else None
    with GGUFFile.open(path) as file:
        tokenizer, words = Tokenizer.from_metadata(file.metadata), WordScorer()
    for length in lengths:
        scorers: list[Scorer] = [words, RandomScorer()]
        model = None if attention is None else Remembered(attention, "attention")
        if model is not None:
            scorers = [Remembered(MixedScorer(model, words), OURS), model, *scorers]
        found: list[Outcome] = []
        for context in contexts(texts, length, tokenizer, seed=seed):
            found += measure(context, scorers, tokenizer, chunks=model)
        # Attention over such a text says no more than words do, and takes as long as all others.
        found += measure(aggregation(length, tokenizer), [words, RandomScorer()], tokenizer)
        yield length, summary(found, length)


def summary(found: Sequence[Outcome], length: int) -> list[Row]:
    """Return a row for each rule and task: how many questions have their facts kept, and what is read."""
    groups: dict[tuple[str, str], dict[float, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        groups[each.rule, each.task][each.keep].append(each)
        if each.task != "aggregation":
            groups[each.rule, "all"][each.keep].append(each)
    return [
        {
            "tokens": length,
            "rule": rule,
            "task": task,
            "questions": len(next(iter(by_keep.values()))),
            "kept": {str(keep): sum(each.kept for each in outcomes) for keep, outcomes in by_keep.items()},
            "read": {
                str(keep): round(sum(each.read for each in outcomes) / len(outcomes), 3)
                for keep, outcomes in by_keep.items()
            },
            **({"by_depth": _by_depth(by_keep)} if task == "all" else {}),
        }
        for (rule, task), by_keep in sorted(groups.items())
    ]


def _by_depth(by_keep: Mapping[float, Sequence[Outcome]]) -> dict[str, list[list[int]]]:
    """Return questions kept, and all, by the depth of their first fact."""
    return {
        str(keep): [
            [sum(each.kept for each in of), len(of)]
            for of in ([each for each in found if each.depth == depth] for depth in range(DEPTHS))
        ]
        for keep, found in by_keep.items()
    }


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows for a screen: percent kept, and in the last column percent read at 0.1."""
    columns = ["rule", "task", "questions", *(f"kept at {keep}" for keep in KEEP), "read at 0.1"]
    return columns, [
        [
            row["rule"],
            row["task"],
            str(row["questions"]),
            *(f"{row['kept'][str(keep)] / row['questions']:.0%}" for keep in KEEP),
            f"{row['read']['0.1']:.0%}",
        ]
        for row in rows
    ]


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write curves of facts kept over the share read, and maps of tasks by rule and depths by share."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["task"] != "aggregation"]
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    left, right, last = figure.subplots(1, 3, width_ratios=(1, 1.1, 0.9))
    for row in rows:
        if row["task"] == "all":
            kept = [100 * row["kept"][str(keep)] / row["questions"] for keep in KEEP]
            left.plot([100 * row["read"][str(keep)] for keep in KEEP], kept, marker="o", label=row["rule"])
    left.set(xlabel="% of the prompt read", ylabel="% of questions with all facts kept", title=title)
    left.legend(fontsize=8)
    rules, tasks = (sorted({row[name] for row in rows} - {"all"}) for name in ("rule", "task"))
    cells = {(row["rule"], row["task"]): 100 * row["kept"]["0.1"] / row["questions"] for row in rows}
    _map(right, [[cells[rule, task] for task in tasks] for rule in rules])
    right.set(title="% kept at 0.1", yticks=range(len(rules)), yticklabels=rules)
    right.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    ours = next(row for row in rows if row["task"] == "all" and row["rule"] == OURS)
    _map(
        last,
        [
            [100 * kept / count if count else math.nan for kept, count in ours["by_depth"][str(keep)]]
            for keep in KEEP
        ],
    )
    last.set(title=f"% kept by {OURS}", yticks=range(len(KEEP)), yticklabels=KEEP, ylabel="share to keep")
    last.set_xticks(range(DEPTHS), [f"{10 * depth}%" for depth in range(DEPTHS)], rotation=30, ha="right")
    last.set_xlabel("depth of the first fact")
    figure.savefig(path)


def _map(axes: Any, values: Sequence[Sequence[float]]) -> None:
    axes.imshow(values, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            axes.text(x, y, "" if math.isnan(value) else f"{value:.0f}", ha="center", va="center", fontsize=8)


@case(out=RESULTS / "compress.jsonl", device="auto")
def main(
    report: Report,
    model: Path,
    *,
    prompts: Annotated[int, "texts of each length"] = 8,
    context: Annotated[str, "tokens of a text: 2k,8k"] = "4k",
    seed: int = 0,
    attend: Annotated[bool, "words alone are fast, and need the model's tokenizer only"] = True,
    figures: Annotated[Path | None, "folder for plots"] = None,
) -> None:
    device, head = pick_device(report.device), report.head()
    lengths = list(map(size, context.split(",")))
    for length, rows in run(model, lengths, prompts, device=device, seed=seed, attend=attend):
        columns, cells = table(rows)
        print(f"Facts kept of {length:,} tokens, {model.stem}")
        for cell in (columns, *cells):
            print("  ".join(f"{text:16s}" for text in cell))
        for row in rows:
            report.write(**head, **row)
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            plot(rows, figures / f"compress-{length}.svg", f"{model.stem}, {length:,} tokens")
