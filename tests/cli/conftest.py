"""Running the program inside the test process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from treeflash.cli.main import app


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The defaults of a fresh machine, whoever runs the tests."""
    for name in (
        "DFLASH_TARGET",
        "DFLASH_DRAFT",
        "TREEFLASH_DEBUG",
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "NO_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def treeflash() -> Callable[..., Any]:
    def invoke(*arguments: Any, stdin: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)

    return invoke
