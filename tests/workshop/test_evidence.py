"""Parts of a commit's evidence: run once, again where they failed, not begun without time."""

import json
from pathlib import Path

import pytest

from workshop import evidence
from workshop.__main__ import names
from workshop.evidence import PARTS, EvidencePart, filled
from workshop.report import Report


def test_every_part_is_a_command_that_exists(tmp_path: Path):
    places = {"pair": tmp_path / "pair", "data": tmp_path}
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
        assert run(report, folder=folder, pair=tmp_path, data=tmp_path, only="good,bad,long") == 1
    lines = [json.loads(line) for line in (folder / "evidence.jsonl").read_text().splitlines()]
    assert [(line["part"], line["passed"]) for line in lines] == [
        ("good", True),
        ("bad", False),
        ("bad", False),
    ]
    assert all(line["commit"] and line["command"] and line["date"] for line in lines)
    assert "too little time is left" in capsys.readouterr().out
    bad.write_text("def test_one(): pass\n")
    assert run(Report(None, seconds=120), folder=folder, pair=tmp_path, data=tmp_path, only="good,bad") == 0
