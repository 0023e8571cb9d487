"""Plots of a run's results. Needs matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from bough.bench.report import Row, rows
from bough.bench.runner import PLAIN, Result
from bough.errors import UsageError

COLOURS = ("#0b6e99", "#d1603d", "#2a8f5b", "#7b5ea7", "#b58900", "#4c566a", "#c2528b")
GREY = "#9aa0a6"
SIZE = (6.4, 3.7)  # inches
DOTS = 200  # an inch
POSITIONS = 15
FEW_STEPS = 3  # step sizes that occur less often in an output are too noisy to plot


def render(lines: Sequence[Result], folder: Path, *, title: str) -> dict[str, Path]:
    """Write the plots for which there are results; return their files by title."""
    require()
    folder.mkdir(parents=True, exist_ok=True)
    figures, measured = rows(lines), [line for line in lines if "skipped" not in line]
    suites = [row for row in figures if row["suite"] != "sweep"]
    sweep = [row for row in figures if row["suite"] == "sweep" and row["budget"] != PLAIN]
    plots = {
        "Speed-up by suite": _speedup(suites, title),
        "Accepted tokens by position": _positions(measured, title),
        "Cost of a step by rows": _cost(measured, title),
        "Speed-up by tree budget": _budget(sweep, title),
        "Speed by context": _context(sweep, title),
    }
    written = {}
    for name, figure in plots.items():
        if figure is not None:
            path = folder / f"{name.lower().replace(' ', '-')}.png"
            figure.savefig(path, dpi=DOTS)
            written[name] = path
    return written


def require() -> None:
    """Raise if matplotlib is not installed; called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib, which is not installed", "pip install matplotlib")


def _axes(heading: str, title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    figure.suptitle(heading, x=0.01, ha="left", fontsize=13, fontweight="bold")
    # The subtitle starts at the figure's left edge, not the axes', so that long machine names fit.
    axes.set_title(" ", fontsize=9)  # reserves the subtitle's line
    coordinates = ("figure fraction", "axes fraction")
    line = axes.annotate(title, (0.01, 1.03), xycoords=coordinates, fontsize=9, color="#555555")
    line.set_in_layout(False)
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _mark(axes: Any, text: str, height: float, *, below: bool = False) -> None:
    """Label a horizontal line at its right end."""
    axes.annotate(
        text,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -12 if below else 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color="#555555",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _heat(temperature: float) -> str:
    return f"T = {temperature:g}" if temperature else "greedy"


def _speedup(figures: Sequence[Row], title: str) -> Any:
    figures = [row for row in figures if row["speedup"]]
    if not figures:
        return None
    temperatures = list(dict.fromkeys(row["temperature"] for row in figures))
    suites = list(dict.fromkeys(row["suite"] for row in figures))
    about = f"{title}; mean ± standard deviation over prompts"
    figure, axes = _axes("Speed-up of tree decoding", about, "", "speed-up over plain decoding")
    width = 0.72 / len(temperatures)
    for index, temperature in enumerate(temperatures):
        points = [row for row in figures if row["temperature"] == temperature]
        offset = (index - (len(temperatures) - 1) / 2) * width
        positions = [suites.index(row["suite"]) + offset for row in points]
        means, spreads = ([row["speedup"][name] for row in points] for name in ("mean", "sd"))
        axes.bar(positions, means, 0.92 * width, color=COLOURS[index], label=_heat(temperature))
        axes.errorbar(positions, means, spreads, fmt="none", ecolor="#333333", elinewidth=1, capsize=3)
        for position, mean, sd in zip(positions, means, spreads, strict=True):
            axes.annotate(
                f"{mean:.2f}",
                (position, mean + sd),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=10,
            )
    top = max(row["speedup"]["mean"] + row["speedup"]["sd"] for row in figures)
    axes.set_ylim(0, (1.15 if len(temperatures) == 1 else 1.35) * max(top, 1.0))
    axes.set_xlim(-0.6, len(suites) - 0.4)
    axes.axhline(1, color="#333333", linewidth=1, linestyle="--")
    _mark(axes, "plain", 1)
    axes.set_xticks(range(len(suites)), suites)
    if len(temperatures) > 1:
        axes.legend(frameon=False, fontsize=10, loc="upper right", ncols=len(temperatures))
    return figure


def _positions(lines: Sequence[Result], title: str) -> Any:
    """Plot the share of steps that accept at least n drafted tokens."""
    groups: dict[tuple[str, float], tuple[list[int], int]] = {}
    for line in lines:
        if line["budget"] == PLAIN or not line.get("steps") or line["suite"] == "sweep":
            continue
        key = line["suite"], line["temperature"]
        counts, steps = groups.get(key, ([0] * POSITIONS, 0))
        for position, count in enumerate(line["accepted_by_position"][:POSITIONS]):
            counts[position] += count
        groups[key] = counts, steps + line["steps"]
    if not groups:
        return None
    suites = list(dict.fromkeys(suite for suite, _ in groups))
    coolest = min(temperature for _, temperature in groups)
    figure, axes = _axes(
        "Accepted tokens per step", title, "at least this many accepted tokens", "share of all steps"
    )
    for (suite, temperature), (counts, steps) in groups.items():
        axes.plot(
            range(1, POSITIONS + 1),
            [count / steps for count in counts],
            marker="o",
            markersize=4,
            linewidth=1.8,
            linestyle="-" if temperature == coolest else "--",
            color=COLOURS[suites.index(suite) % len(COLOURS)],
            label=suite + (f", {_heat(temperature)}" if temperature else ""),
        )
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, POSITIONS + 1, 2))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    # Long enough to show a dashed line.
    axes.legend(frameon=False, fontsize=10 if len(groups) < 6 else 8, handlelength=3.5)
    return figure


def _cost(lines: Sequence[Result], title: str) -> Any:
    """Plot the step time by rows at the shortest context; the median over outputs."""
    shortest = min((line["context"] for line in lines), default=0)
    seconds: dict[int, list[float]] = {}
    for line in lines:
        if line["context"] == shortest:
            for size, (count, milliseconds) in line.get("steps_by_rows", {}).items():
                seconds.setdefault(int(size), []).extend([milliseconds / count] * (count >= FEW_STEPS))
    costs = {size: median(means) for size, means in sorted(seconds.items()) if means}
    if len(costs) < 3 or 1 not in costs:
        return None
    figure, axes = _axes(
        "Step time by verified rows", title, "verified rows per step", "milliseconds per step"
    )
    axes.plot(costs.keys(), costs.values(), marker="o", markersize=4, linewidth=1.8, color=COLOURS[0])
    axes.set_ylim(0, 1.15 * max(costs.values()))
    axes.set_xlim(0, max(costs) + 1)
    axes.axhline(costs[1], color=GREY, linewidth=1, linestyle="--")
    _mark(axes, f"one row: {costs[1]:.1f} ms", costs[1], below=True)
    return figure


def _budget(sweep: Sequence[Row], title: str) -> Any:
    """Plot the speed-up by tree budget at the smallest context."""
    if len({row["budget"] for row in sweep}) < 2:
        return None
    smallest = min(row["context"] for row in sweep)
    figure, axes = _axes("Speed-up by tree budget", title, "tree nodes", "speed-up over plain decoding")
    for index, temperature in enumerate(dict.fromkeys(row["temperature"] for row in sweep)):
        points = sorted(
            (row for row in sweep
             if row["temperature"] == temperature and row["context"] == smallest and row["speedup"]),
            key=lambda row: row["budget"],
        )  # fmt: skip
        budgets, means = [row["budget"] for row in points], [row["speedup"]["mean"] for row in points]
        axes.plot(
            budgets,
            means,
            marker="o",
            markersize=5,
            linewidth=1.8,
            color=COLOURS[index],
            label=_heat(temperature),
        )
    axes.axhline(1, color="#333333", linewidth=1, linestyle="--")
    _mark(axes, "plain", 1, below=True)
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({row["budget"] for row in sweep}))
    axes.legend(frameon=False, fontsize=10)
    return figure


def _context(sweep: Sequence[Row], title: str) -> Any:
    """Plot throughput by context at the lowest temperature, for the smallest context's fastest budget."""
    if len({row["context"] for row in sweep}) < 2:
        return None
    coolest = min(row["temperature"] for row in sweep)
    points = [row for row in sweep if row["temperature"] == coolest and row["tok_s"] and row["plain_tok_s"]]
    smallest = min(row["context"] for row in points)
    best = max((row for row in points if row["context"] == smallest), key=lambda row: row["tok_s"]["mean"])
    points = sorted(
        (row for row in points if row["budget"] == best["budget"]), key=lambda row: row["context"]
    )
    figure, axes = _axes("Throughput by context", title, "prompt tokens", "tokens per second")
    lengths = [row["prompt_tokens"]["mean"] for row in points]
    for name, label, colour in (
        ("tok_s", f"tree of {best['budget']} nodes", COLOURS[0]),
        ("plain_tok_s", "plain decoding", GREY),
    ):
        means = [row[name]["mean"] for row in points]
        axes.plot(lengths, means, marker="o", markersize=5, linewidth=1.8, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=10)
    return figure
