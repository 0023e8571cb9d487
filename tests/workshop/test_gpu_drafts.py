"""The script that trains and compares drafts on a GPU: what can go wrong before it is there."""

import argparse
from pathlib import Path

from tests.gpu.texts import embedded_pair
from workshop.gpu.drafts import FULL, Run, parameters


def test_both_block_drafts_have_as_many_parameters() -> None:
    made = parameters(embedded_pair()[0])
    assert abs(made["dflash2"] / made["dflash"] - 1) < 0.02


def test_parts_run_one_after_the_other_in_a_trial_and_failures_are_told(tmp_path: Path) -> None:
    files = {"data": tmp_path, "out": tmp_path, "prompts": None}
    options = argparse.Namespace(toy=True, device="cuda", seconds=100.0, no_times=False, **files)
    run = Run(options)
    assert run.device == "cpu" and run.sizes != FULL
    assert run.together({"one": ["-c", "print(1)"], "two": ["-c", "print(2)"]}, reserve=0)
    assert not run.failed
    assert not run.together({"bad": ["-c", "raise SystemExit(3)"], "three": ["-c", "pass"]}, reserve=0)
    assert run.failed and (tmp_path / "two.log").read_text() == "2\n"
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4 and '"code": 3' in lines[2]
