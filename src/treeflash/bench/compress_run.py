"""Running the benchmark of compression: contexts of several lengths, all rules, a row for each task."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from treeflash.bench.compress import KEEP, Outcome, RandomScorer, aggregation, contexts, measure
from treeflash.compress.scorer import MixedScorer, Query, Scorer, never
from treeflash.compress.words import WordScorer
from treeflash.session.attention_scorer import AttentionScorer

Row = dict[str, Any]


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
    path: Path, lengths: Sequence[int], texts: int, *, device: torch.device, seed: int = 0
) -> Iterator[tuple[int, list[Row]]]:
    """Yield the rows of each length, of `texts` texts, with the attention of the model in `path`."""
    attention = AttentionScorer.load(path, device=device)
    tokenizer, words = attention.tokenizer, WordScorer()
    for length in lengths:
        model = Remembered(attention, "attention")
        scorers = [Remembered(MixedScorer(model, words), "attention + words"), model, words, RandomScorer()]
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
        }
        for (rule, task), by_keep in sorted(groups.items())
    ]


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
    """Write curves of facts kept over the share that is read, and a map of rules and tasks at 0.1."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["task"] != "aggregation"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        if row["task"] == "all":
            kept = [100 * row["kept"][str(keep)] / row["questions"] for keep in KEEP]
            left.plot([100 * row["read"][str(keep)] for keep in KEEP], kept, marker="o", label=row["rule"])
    left.set(xlabel="% of the prompt read", ylabel="% of questions with all facts kept", title=title)
    left.legend(fontsize=8)
    rules, tasks = (sorted({row[name] for row in rows} - {"all"}) for name in ("rule", "task"))
    cells = {(row["rule"], row["task"]): 100 * row["kept"]["0.1"] / row["questions"] for row in rows}
    values = [[cells[rule, task] for task in tasks] for rule in rules]
    right.imshow(values, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    right.set(title="% kept at 0.1", yticks=range(len(rules)), yticklabels=rules)
    right.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            right.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=8)
    figure.savefig(path)
