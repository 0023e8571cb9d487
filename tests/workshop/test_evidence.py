"""Parts of a commit's evidence: run once, again where they failed, not begun without time."""

import json
from pathlib import Path

import pytest

from workshop import evidence
from workshop.__main__ import names
from workshop.evidence import PARTS, EvidencePart, filled
from workshop.report import Report

COMMIT = "abc1234"


def test_every_part_is_a_command_that_exists(tmp_path: Path):
    places = {name: tmp_path / name for name in ("pair", "real", "data", "llama")}
    for part in PARTS.values():
        words = filled(part.command, tmp_path / "out.jsonl", places)
        assert not any("{" in word for word in words)
        if words[1:3] == ["-m", "workshop"]:
            assert words[3] in names()
            assert str(tmp_path / "out.jsonl") in words


def test_what_succeeded_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    good, bad = tmp_path / "test_good.py", tmp_path / "test_bad.py"
    good.write_text("def test_one(): pass\n")
    bad.write_text("def test_one(): assert False\n")
    parts = {
        "good": EvidencePart("passes", 20, f"pytest -q {good}"),
        "bad": EvidencePart("fails", 20, f"pytest -q {bad}"),
        "long": EvidencePart("takes long", 5000, f"pytest -q {good}"),
    }
    monkeypatch.setattr(evidence, "PARTS", parts)
    folder, run = tmp_path / "evidence", evidence.main.function
    for _ in range(2):
        report = Report(None, seconds=120, device="cpu")
        assert (
            run(report, folder=folder, pair=tmp_path, data=tmp_path, only="good,bad,long", commit=COMMIT) == 1
        )
    lines = [json.loads(line) for line in (folder / "evidence.jsonl").read_text().splitlines()]
    assert [(line["part"], line["passed"]) for line in lines] == [
        ("good", True),
        ("bad", False),
        ("bad", False),
    ]
    assert all(line["commit"] and line["command"] and line["date"] for line in lines)
    assert "too little time is left" in capsys.readouterr().out
    bad.write_text("def test_one(): pass\n")
    options = {"pair": tmp_path, "data": tmp_path, "only": "good,bad", "commit": COMMIT}
    assert run(Report(None, seconds=120), folder=folder, **options) == 0


def test_a_part_without_its_folder_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(evidence, "PARTS", {"real": EvidencePart("a model", 1, "pytest {real}/none.py")})
    options = {"folder": tmp_path, "real": tmp_path / "none", "only": "real", "commit": COMMIT}
    assert evidence.main.function(Report(None), **options) == 0
    assert f"no folder {tmp_path / 'none'}" in capsys.readouterr().out


@pytest.mark.parametrize("commit", ["installed", "5c20e6d-dirty", "the next one"])
def test_a_tree_that_cannot_be_checked_out_is_not_measured(tmp_path: Path, capsys, commit: str) -> None:
    assert evidence.main.function(Report(None), folder=tmp_path, only="tests", commit=commit) == 2
    assert commit in capsys.readouterr().out and not (tmp_path / "evidence.jsonl").exists()


def test_lines_name_where_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "suites.jsonl"
    run = {"run": {"date": "2026-11-15", "command": "bough bench", "commit": "installed"}}
    lines = [{"what": "step", "ms": 1.5}, run, {"suite": "humaneval", "prompt": "humaneval/0", "tokens": 9}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evidence.stamp(path, {"date": "2026-11-19", "commit": COMMIT, "command": "workshop steps"})
    step, suites, prompt = (json.loads(line) for line in path.read_text().splitlines())
    assert step == {"date": "2026-11-19", "commit": COMMIT, "command": "workshop steps", **lines[0]}
    assert suites == {"run": {**run["run"], "commit": COMMIT}} and prompt == lines[2]


def test_every_line_of_a_report_names_commit_date_and_command(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.jsonl")
    report.line(what="step", ms=1.5)
    report.write(**{"time": "matmul", "command": "its own"})
    step, matmul = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert step["commit"] and step["date"] and step["command"] and matmul["command"] == "its own"
