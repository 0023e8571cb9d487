"""Pairs of large shapes as files that are all header: their weights are holes, which take no disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from workshop.grow import grow, write


@pytest.fixture(scope="session")
def pair_27b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grow.Growth]:
    yield from _grown(tmp_path_factory, "27b")


@pytest.fixture(scope="session")
def pair_35b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grow.Growth]:
    yield from _grown(tmp_path_factory, "35b-a3b")


def _grown(tmp_path_factory: pytest.TempPathFactory, shape: str) -> Iterator[grow.Growth]:
    def leave_holes(writer, file, noise):
        for plan in file.plans:
            writer.written(plan.name)
        yield file.data_bytes

    folder: Path = tmp_path_factory.mktemp("grown")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_write_tensors", leave_holes)
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 50))
        grown = grow.grow(folder, shape, random=True)
    # not within the patch: it would last as long as the fixture, and leave holes in every later test's files
    yield grown
    shutil.rmtree(folder)
