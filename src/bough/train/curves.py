"""A picture of a training run: loss, and acceptance by the number of answers. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CURVES = "training.png"
_COLOURS = ("#0b6e99", "#d1603d", "#2a8f5b")
_SIZE, _DOTS = (10.5, 3.6), 150  # inches, dots an inch


def draw_curves(history: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> bool:
    """Draw the evaluations of a run; return False if there are none, or matplotlib is not installed."""
    points = [each for each in history if "tokens" in each]
    if not points or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    loss, acceptance, positions = figure.subplots(1, 3)
    texts = [each["tokens"] / 1e6 for each in points]
    lines = (
        (loss, "train_loss", "training text", _COLOURS[1]),
        (loss, "loss", "held-out text", _COLOURS[0]),
        (acceptance, "tree_acceptance", "tree of 22 nodes", _COLOURS[0]),
        (acceptance, "acceptance", "likeliest chain", _COLOURS[2]),
    )
    for axes, key, label, colour in lines:
        axes.plot(texts, [each[key] for each in points], marker="o", markersize=3, color=colour, label=label)
    for axes, heading in ((loss, "Loss, nats a token"), (acceptance, "Tokens a step, estimated")):
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlabel("million tokens seen")
        axes.legend(fontsize=8, frameon=False)
    chances = [100 * each for each in points[-1]["top1"]]
    positions.bar(range(1, len(chances) + 1), chances, color=_COLOURS[0])
    positions.set_title("Right tokens by position, %", fontsize=10, loc="left")
    positions.set_xlabel("tokens after the anchor")
    positions.set_ylim(0, 100)
    for axes in (loss, acceptance, positions):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.7)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=_DOTS)
    return True
