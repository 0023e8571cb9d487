"""Running the program inside the test process."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bough.cli.program import app
from bough.hub import download
from tests.hub.fake_hub import FakeHub
from tests.hub.fake_pairs import add_pair, use_hub


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The defaults of a fresh machine, whoever runs the tests."""
    for name in (
        "BOUGH_MODEL",
        "BOUGH_DRAFT",
        "DFLASH_TARGET",
        "DFLASH_DRAFT",
        "BOUGH_DEBUG",
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "NO_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    use_hub(monkeypatch, tmp_path / "hf/hub")


@pytest.fixture
def bough() -> Callable[..., Any]:
    def invoke(*arguments: Any, stdin: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)

    return invoke


@pytest.fixture
def hub(
    own_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Callable[..., Path]
) -> Iterator[FakeHub]:
    """A hub with tiny models under the names of qwen3.6-27b and its draft, and a cache that is empty."""
    hub = FakeHub()
    add_pair(hub, tiny_model(), tmp_path / "made")
    use_hub(monkeypatch, tmp_path / "hf/hub", hub.endpoint)
    monkeypatch.setattr(download.time, "sleep", lambda _: None)
    with contextlib.closing(hub):
        yield hub
