"""A client of the hub that is the same wherever the tests run."""

from pathlib import Path

import pytest

from bough.hub import download
from tests.hub.fake_pairs import use_hub


@pytest.fixture(autouse=True)
def plain_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_hub(monkeypatch, tmp_path)
    monkeypatch.setattr(download.time, "sleep", lambda _: None)
