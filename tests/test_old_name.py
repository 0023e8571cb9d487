"""What was stored under the program's old name, TreeFlash, is still found."""

import logging
from pathlib import Path

import pytest

from bough.hub.catalog import named, recognise
from bough.kernels.runtime import nvrtc
from bough.old_name import folder_in
from bough.session import folders


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from triton import knobs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "triton"))
    return tmp_path


def test_new_folders_without_old_ones(homes: Path) -> None:
    assert folders.costs_file() == homes / "cache" / "bough" / "step-costs.json"
    assert folders.state_folder() == homes / "state" / "bough"
    assert nvrtc.cache_folder() == homes / "triton" / "bough"


def test_old_folders_are_used_with_one_line_each(homes: Path, caplog: pytest.LogCaptureFixture) -> None:
    for parent in ("cache", "state", "triton"):
        (homes / parent / "treeflash").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert folders.costs_file() == homes / "cache" / "treeflash" / "step-costs.json"
            assert folders.state_folder() == homes / "state" / "treeflash"
            assert nvrtc.cache_folder() == homes / "triton" / "treeflash"
    assert all(str(homes / parent / "treeflash") in caplog.text for parent in ("cache", "state", "triton"))
    assert len(caplog.messages) == 3 and "old name" in caplog.messages[0]


def test_new_folders_win(homes: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("bough", "treeflash"):
        (homes / "cache" / name).mkdir(parents=True)
    assert folder_in(homes / "cache") == homes / "cache" / "bough" and not caplog.messages


def test_the_small_pairs_old_name() -> None:
    card = named("bough-40m")
    assert card is not None and named("treeflash-40m") == card
    shape = {"architecture": "qwen35", "width": 512, "layers": 8}
    assert recognise(["TreeFlash-40M"], **shape) == card[0] == recognise(["Bough-40M"], **shape)
