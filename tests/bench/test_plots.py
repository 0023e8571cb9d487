"""Plots are rendered from the results, and only those that have data."""

from matplotlib.image import imread

from bough.bench import plots
from tests.bench.made import a_line


def sweep() -> list[dict]:
    lines = []
    for heat in (0.0, 0.8):
        for context in (0, 500):
            for budget in (0, 8, 16, 32):
                name = f"sweep/0@{context}"
                facts = {"context": context, "prompt_tokens": 20 + context, "temperature": heat}
                lines.append(a_line(name, budget, tok_s=50.0 + budget, **facts))
    return lines


def test_all_plots(tmp_path):
    lines = [
        a_line(f"{suite}/{n}", budget) for suite in ("builtin", "gsm8k") for n in (0, 1) for budget in (0, 22)
    ]
    written = plots.render([*lines, *sweep()], tmp_path / "pictures", title="a model on a machine")
    assert list(written) == [
        "Speed-up by suite",
        "Accepted tokens by position",
        "Cost of a step by rows",
        "Speed-up by tree budget",
        "Speed by context",
    ]
    for path in written.values():
        height, width = imread(path).shape[:2]
        assert (width, height) == (1280, 740)
        assert imread(path)[..., :3].std() > 0.05


def test_a_remote_run_has_no_plots(tmp_path):
    line = a_line("builtin/0", None, accepted_by_position=None, steps_by_rows={}, steps=None)
    assert plots.render([line], tmp_path, title="") == {}
