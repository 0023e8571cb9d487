"""The script that trains and compares drafts on a GPU: what can go wrong before it is there."""

from pathlib import Path

from workshop.gpu.drafts import FULL, Options, Run, size_of, specs


def test_all_block_drafts_have_as_many_parameters(tmp_path: Path) -> None:
    made = {kind: size_of(spec) for kind, spec in specs(Run(Options(data=tmp_path, out=tmp_path))).items()}
    assert made.keys() == {"dflash2", "dflash", "mlp"} and max(made.values()) < 1.02 * min(made.values())


def test_parts_run_one_after_the_other_in_a_trial_and_failures_are_told(tmp_path: Path) -> None:
    run = Run(Options(data=tmp_path, out=tmp_path, seconds=100.0, toy=True))
    assert run.device == "cpu" and run.sizes != FULL
    assert run.together({"one": ["python_door", "--help"], "two": ["python_door", "--help"]}, reserve=0)
    assert not run.failed
    assert not run.together({"bad": ["no_such_case"], "three": ["python_door", "--help"]}, reserve=0)
    assert run.failed and "--repeats" in (tmp_path / "two.log").read_text()
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4 and '"code": 2' in lines[2]
