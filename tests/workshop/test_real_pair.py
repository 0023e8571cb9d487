"""The script that trains and measures a draft of a real model, on a tiny one: every stage, and going on."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from workshop.case import command, environment
from workshop.gpu import real_pair


def suites(folder: Path) -> Path:
    for name, line in (
        ("humaneval/test", {"prompt": "def one():\n", "test": "", "entry_point": "one"}),
        ("gsm8k/test", {"question": "What is 3 + 4?", "answer": "#### 7"}),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / f"{name}.jsonl").write_text(json.dumps(line | {"task_id": name}) + "\n")
    return folder


def run(*arguments: object) -> list[dict]:
    process = subprocess.run(
        command("gpu.real_pair", *arguments),
        env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def named(lines: list[dict], what: str) -> list[dict]:
    return [line for line in lines if line["what"] == what]


def test_parts_are_joined_and_checked(tmp_path):
    model, work = tmp_path / "model.gguf", tmp_path / "work"
    model.write_bytes(os.urandom(5000))

    def stage(**more: Any) -> real_pair.Pair:
        return real_pair.Pair(real_pair.Options(work=work, out=tmp_path / "out", **more))

    assert real_pair.split(stage(model=model, part_mib=0.002))
    parts = sorted((work / "parts").glob("*/part"))
    assert [path.stat().st_size for path in parts] == [2097, 2097, 806]
    kept = parts[1].read_bytes()
    parts[1].unlink()
    assert not real_pair.join(stage())
    parts[1].write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert not real_pair.join(stage())
    (work / "target.gguf").unlink()
    parts[1].write_bytes(kept)
    assert real_pair.join(stage())
    assert (work / "target.gguf").read_bytes() == model.read_bytes() and not parts[0].exists()


@pytest.mark.slow
def test_every_stage_and_going_on_elsewhere(tiny_model, tmp_path):
    model, data = tiny_model("qwen35", layers=4), suites(tmp_path / "data")
    options = ["--toy", "--data", data, "--answer-seconds", 40, "--train-seconds", 6, "--processes", 2]
    first = ["--work", tmp_path / "one", "--out", tmp_path / "out"]
    run("split", "--model", model, "--part-mib", 0.4, *first, *options)
    lines = run("join", "answers", "train", *first, *options)
    assert named(lines, "join")[0]["checked"]
    assert named(lines, "answered")[0]["new_answers"] == 16
    [trained] = named(lines, "trained")
    assert trained["steps"] > 0 and trained["parity"] < 1e-3 and trained["curve"]
    came_back = {path.name for path in (tmp_path / "out").iterdir()}
    assert came_back >= {"results.jsonl", "facts.tar.xz", "draft-q8_0.gguf", "tokens-00000.npz.xz"}
    assert any(name.startswith("portable-") for name in came_back)

    # On another machine: nothing is answered again, training goes on, and the draft is measured.
    second = ["--work", tmp_path / "two", "--out", tmp_path / "back", "--carried", tmp_path / "out"]
    more = ["--toy", "--data", data, "--train-seconds", 12, "--model", model]
    lines = run("join", "answers", "train", *second, *more)
    assert named(lines, "answered")[0]["new_answers"] == 0
    assert named(lines, "trained")[0]["steps"] > trained["steps"]
    lines = run("measure", *second[:4], *more)
    rows = named(lines, "measured")
    assert {row["run"] for row in rows} >= {"plain", "lookup", "draft", "both", "draft-fixed", "both-fixed"}
    assert all(row["identical"] in (None, 1.0) for row in rows)
    assert {row["temperature"] for row in rows} == {0.0, 0.8}
