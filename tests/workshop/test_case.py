"""`python -m workshop`: a function's parameters are its options."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest

from workshop import __main__ as runner
from workshop.case import case
from workshop.report import Report


@dataclass(frozen=True)
class Shape:
    layers: int
    kind: Literal["wide", "deep"] = "wide"


def run(function, *arguments: object) -> int:
    return case(seconds=5)(function).run("name", [str(each) for each in arguments])


def test_options_of_every_kind(tmp_path):
    seen = {}

    def measure(
        report: Report,
        texts: Sequence[Path],
        shape: Shape,
        *,
        data: Path,
        sizes: Annotated[Sequence[int], "rows"] = (1, 8),
        rate: float | None = None,
        plain: bool = True,
        quick: bool = False,
    ) -> None:
        seen.update({name: value for name, value in locals().items() if name != "seen"})
        report.line(sizes=list(sizes), **report.head("command"))

    out = tmp_path / "out.jsonl"
    flags = ["--data", "d", "--sizes", 2, 3, "--no-plain", "--layers", 4, "--kind", "deep"]
    assert run(measure, "a", "b", *flags, "--out", out, "--rate", 0.5) == 0
    report = seen.pop("report")
    assert seen == {
        "texts": [Path("a"), Path("b")], "shape": Shape(4, "deep"), "data": Path("d"), "sizes": [2, 3],
        "rate": 0.5, "plain": False, "quick": False,
    }  # fmt: skip
    assert report.left < 5 and report.settings["layers"] == 4
    [line] = map(json.loads, out.read_text().splitlines())
    assert line["sizes"] == [2, 3] and line["command"].startswith("python -m workshop")


def test_a_parameter_counts_before_the_reports():
    def measure(report: Report, *, out: Path, seconds: float = 2.5) -> None:
        assert (out, seconds, report.out) == (Path("folder"), 2.5, None)

    assert run(measure, "--out", "folder") == 0


def test_exit_codes(capsys):
    def failing(report: Report) -> None:
        report.check("it holds", False)

    def stopped(report: Report, count: int) -> int:
        return count

    assert run(failing) == 1 and run(stopped, 3) == 3
    with pytest.raises(SystemExit):
        run(stopped)
    assert "required: count" in capsys.readouterr().err


@pytest.mark.parametrize("name", runner.names())
def test_every_case_has_a_main_with_options(name, monkeypatch):
    """Only its source: the imports of all cases take a minute."""
    source = (runner.FOLDER / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert f"python -m workshop {name}" in source and source.count("\n@case(") == 1
    assert "\ndef main(" in source and '"__main__"' not in source


def test_the_list_of_cases(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["workshop"])
    assert runner.main() == 2 and "gpu.exact" in capsys.readouterr().out
    assert isinstance(runner, ModuleType)
