"""Image encoders: which of a folder's or a repository's belongs to a model, and fetching it."""

from pathlib import Path

import pytest

from bough.hub.download import fetch, fetch_encoder
from bough.hub.local import encoders_beside, model_in
from bough.hub.names import RepoName, encoders
from tests.hub.test_drafts import hub  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("files", "model", "first"),
    [
        (["mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf"], "m-Q4_K_M.gguf", "mmproj-BF16.gguf"),
        (["mmproj-Q8_0.gguf", "mmproj-F32.gguf"], "m-Q4_K_M.gguf", "mmproj-F32.gguf"),
        (["mmproj-A-27B-BF16.gguf", "B-27B-mmproj-Q8_0.gguf"], "B-27B-Q4_K_M.gguf", "B-27B-mmproj-Q8_0.gguf"),
        (["mmproj-F16.gguf"], "Q8_0/m-Q8_0-00001-of-00002.gguf", "mmproj-F16.gguf"),
        (["mmproj-F16.gguf", "Q8_0/mmproj-F16.gguf"], "Q8_0/m.gguf", "Q8_0/mmproj-F16.gguf"),
        (["other/mmproj-F16.gguf", "mmproj.txt", "model.gguf"], "m.gguf", None),
    ],
)
def test_the_likeliest_comes_first(files: list[str], model: str, first: str | None) -> None:
    assert next(iter(encoders(files, model)), None) == first


def test_those_in_a_models_folder(tmp_path: Path) -> None:
    for name in ("mmproj-F16.gguf", "m-Q4_K_M.gguf"):
        (tmp_path / name).touch()
    assert model_in(tmp_path).name == "m-Q4_K_M.gguf"
    assert encoders_beside(tmp_path / "m-Q4_K_M.gguf") == [tmp_path / "mmproj-F16.gguf"]


def test_one_is_fetched_from_the_repository(hub) -> None:  # noqa: F811
    repo = "me/Some-GGUF"
    hub.repos[repo] = {"m-Q8_0.gguf": b"target", "mmproj-F16.gguf": b"half", "mmproj-BF16.gguf": b"eyes"}
    path = fetch(RepoName(repo))
    assert encoders_beside(path) == []
    encoder = fetch_encoder(repo, path)
    assert encoder is not None and encoder.read_bytes() == b"eyes"
    assert encoders_beside(path) == [encoder]


def test_a_repository_without_one(hub) -> None:  # noqa: F811
    hub.repos["me/Some-GGUF"] = {"m-Q8_0.gguf": b"target"}
    assert fetch_encoder("me/Some-GGUF", fetch(RepoName("me/Some-GGUF"))) is None
