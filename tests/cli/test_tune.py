"""`bough tune` where there is no GPU, and what it says of results."""

import json
from pathlib import Path

import pytest
import torch

from bough.bench.tuning import Found
from bough.cli import view
from bough.cli.tune import show
from bough.errors import ResourceError
from bough.kernels.quant_matmul.tiling import Tiling
from bough.kernels.quant_matmul.tuned import TunedFile

KIND = "NVIDIA H200, 9.0, 132 SMs"
BUILT_IN, BETTER = Tiling(4, halfway=True), Tiling(5, halfway=False)
FOUND = [
    Found(8, BUILT_IN, BUILT_IN, 0.0002, 0.0002, ()),
    Found(16, BUILT_IN, BETTER, 0.0002, 0.00015, ()),
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def test_without_a_gpu_there_is_one_clear_error(bough, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = bough("tune")
    assert result.exit_code == ResourceError.exit_code and not result.stdout
    assert result.stderr.splitlines() == [
        "error: tuning needs an NVIDIA GPU, none was found",
        "hint: bough doctor says what this machine has",
    ]


def test_reset_removes_what_was_kept(bough, tmp_path):
    file = TunedFile.default()
    assert file.path.is_relative_to(tmp_path)
    file.save(KIND, {16: BETTER})
    result = bough("tune", "--reset")
    assert result.exit_code == 0 and result.stdout == f"{file.path} is removed.\n"
    assert not file.path.exists() and file.load(KIND) == {}
    result = bough("tune", "--reset")
    assert result.exit_code == 0 and result.stdout.startswith("Nothing was saved")


def test_reset_takes_no_model(bough):
    result = bough("tune", "model.gguf", "--reset")
    assert result.exit_code == 2 and "hint: bough tune --reset" in result.stderr


def test_what_is_better_is_shown_and_kept(capsys):
    file = TunedFile.default()
    show(FOUND, file, KIND, view.Screen())
    shown = capsys.readouterr()
    eight, sixteen = (line.split() for line in shown.out.splitlines() if line.startswith(("  8 ", "  16 ")))
    assert eight == ["8", "0.2000", "0.2000", "as", "built", "in"]
    assert (
        sixteen[:3] == ["16", "0.2000", "0.1500"] and " ".join(sixteen[3:]) == "5 stages, filled at the start"
    )
    assert KIND in shown.out and not shown.err
    assert shown.out.splitlines()[-1] == (
        f"Saved in {file.path} for every later start; `bough tune --reset` undoes it."
    )
    assert file.load(KIND) == {16: BETTER}
    assert json.loads(file.path.read_text())["kinds"][KIND]["16"]["stages"] == 5


def test_where_nothing_is_better_what_was_kept_goes(capsys):
    file = TunedFile.default()
    file.save(KIND, {16: BETTER})
    show(FOUND[:1], file, KIND, view.Screen())
    assert "nothing was saved" in capsys.readouterr().out and not file.path.exists()


def test_other_sums_are_said(capsys):
    show([Found(8, BUILT_IN, BUILT_IN, 1.0, 1.0, (BETTER,))], TunedFile.default(), KIND, view.Screen())
    assert "8 rows, 5 stages, filled at the start: different sums, not used" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_said_after_the_table(capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match="cannot be written") as error:
        show(FOUND, TunedFile(tmp_path / "file" / "tilings.json"), KIND, view.Screen())
    assert "TRITON_CACHE_DIR" in error.value.hint and "0.1500" in capsys.readouterr().out
