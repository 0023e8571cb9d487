"""A model's file is read ahead as a whole, unless it is too large, and errors are left to loading."""

import os
from pathlib import Path

import pytest

from bough.gguf import read_ahead as module
from bough.gguf.read_ahead import read_ahead


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: found.append((start, size)))
    return found


def finished(path: Path) -> None:
    thread = read_ahead(path)
    assert thread is not None
    thread.join()


def test_the_whole_file_is_asked_for(
    tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 100)
    (tmp_path / "model.gguf").write_bytes(bytes(250))
    finished(tmp_path / "model.gguf")
    assert asked == [(0, 100), (100, 100), (200, 100)]


def test_a_missing_file_and_one_as_large_as_the_memory(
    tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "none.gguf")
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    (tmp_path / "model.gguf").write_bytes(bytes(51))
    finished(tmp_path / "model.gguf")
    assert asked == []
