"""Drafts on the hub, with the real client."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.errors import ModelNotFound, UnsupportedModel
from bough.hub.cache import of_repo
from bough.hub.download import Silent, fetch
from bough.hub.drafts import cached_draft, fetch_draft
from bough.hub.names import RepoName
from tests.hub.fake_hub import FakeHub
from tests.hub.fake_pairs import use_hub

REPO = RepoName("z-lab/Some-DFlash")
CONFIG = json.dumps({"architectures": ["DFlashDraftModel"]}).encode()
WEIGHTS = bytes(range(256)) * 4000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain_client: None) -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.repos[REPO.repo] = {
        ".gitattributes": b"x",
        "README.md": b"hello",
        "assets/picture.png": b"x" * 100,
        "config.json": CONFIG,
        "dflash.py": b"raise SystemExit",
        "model.safetensors": WEIGHTS,
    }
    use_hub(monkeypatch, tmp_path, hub.endpoint)
    with contextlib.closing(hub):
        yield hub


def fetched(hub: FakeHub) -> list[str]:
    return sorted({path.rpartition("/")[2] for method, path, _ in hub.requests if "/resolve/" in path})


def test_downloads_only_the_config_and_the_weights(hub, tmp_path):
    path = fetch_draft(REPO)
    assert path.name == "model.safetensors" and path.read_bytes() == WEIGHTS
    assert (path.parent / "config.json").read_bytes() == CONFIG
    assert fetched(hub) == ["config.json", "model.safetensors"]
    assert sorted(each.name for each in path.parent.iterdir()) == ["config.json", "model.safetensors"]
    asked = len(hub.requests)
    assert cached_draft(REPO) == path == fetch_draft(REPO, offline=True)
    assert len(hub.requests) == asked
    assert fetch_draft(REPO) == path and len(hub.downloads()) == 1


def test_a_draft_that_is_not_cached(hub):
    assert cached_draft(REPO) is None
    with pytest.raises(ModelNotFound, match="not in the cache"):
        fetch_draft(REPO, offline=True)
    assert not hub.requests


def test_an_interrupted_download_is_resumed(hub):
    hub.break_off = [300_000]
    assert fetch_draft(REPO).read_bytes() == WEIGHTS
    assert [headers["Range"] for headers in hub.downloads()] == ["bytes=0-", "bytes=300000-"]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "EagleDraftModel"])
def test_weights_of_other_models_are_not_downloaded(hub, architecture):
    hub.repos[REPO.repo]["config.json"] = json.dumps({"architectures": [architecture]}).encode()
    with pytest.raises(UnsupportedModel, match=f"is '{architecture}', needed DFlashDraftModel or DFlash2"):
        fetch_draft(REPO)
    assert not hub.downloads()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config.json": None}, ModelNotFound, "found 1 .safetensors files and no config.json"),
        ({"model.safetensors": None}, ModelNotFound, "found 0 .safetensors files"),
        ({"more.safetensors": b"x"}, ModelNotFound, "found 2 .safetensors files"),
        ({"mask_embedding.pt": b"x"}, UnsupportedModel, "brings mask_embedding.pt"),
    ],
)
def test_repositories_that_hold_no_draft(hub, change, error, message):
    files = hub.repos[REPO.repo] | change
    hub.repos[REPO.repo] = {name: data for name, data in files.items() if data is not None}
    with pytest.raises(error, match=message):
        fetch_draft(REPO)
    assert not hub.downloads()


def test_drafts_in_gguf(hub):
    hub.repos["me/Some-DFlash-GGUF"] = {"d-Q8_0.gguf": b"eight", "d-Q4_K_M.gguf": b"four", "README.md": b"x"}
    repo = "me/Some-DFlash-GGUF"
    assert fetch_draft(RepoName(repo, "Q8_0")).read_bytes() == b"eight"
    assert fetch_draft(RepoName(repo)).read_bytes() == b"four"
    assert cached_draft(RepoName(repo, "q8_0")).name == "d-Q8_0.gguf"


def test_a_draft_beside_its_target(hub):
    repo = "me/Some-GGUF"
    files = {"m-Q8_0.gguf": b"target", "dflash-m-Q8_0.gguf": b"draft", "mtp-m-Q4_K_M.gguf": b"other"}
    hub.repos[repo] = files
    assert fetch_draft(RepoName(repo)).read_bytes() == b"draft"
    assert fetch(RepoName(repo)).read_bytes() == b"target"
    assert fetch_draft(RepoName(repo, file="dflash-m-Q8_0.gguf")).read_bytes() == b"draft"
    assert {path.name for path in (each.path for each in of_repo(repo))} == {
        "m-Q8_0.gguf",
        "dflash-m-Q8_0.gguf",
    }


def test_a_draft_beside_the_target_is_offered(hub):
    class Notices(Silent):
        def __init__(self):
            self.texts = []

        def notice(self, text):
            self.texts.append(text)

    hub.repos["me/Some-GGUF"] = {"m-Q8_0.gguf": b"target", "dflash-m-Q8_0.gguf": b"draft"}
    notices = Notices()
    fetch(RepoName("me/Some-GGUF"), progress=notices)
    assert notices.texts == ["The repository has a draft too (0.0 MB): hf://me/Some-GGUF/dflash-m-Q8_0.gguf"]


def test_a_sharded_draft(hub):
    files = hub.repos[REPO.repo]
    del files["model.safetensors"]
    for number in (1, 2):
        files[f"model-0000{number}-of-00002.safetensors"] = bytes([number]) * 1000
    path = fetch_draft(REPO)
    assert path.name == "model-00001-of-00002.safetensors" and len(hub.downloads()) == 2
    assert cached_draft(REPO) == path and [each.path for each in of_repo(REPO.repo)] == [path]
    del files["model-00002-of-00002.safetensors"]
    files["other.safetensors"] = b"x"
    with pytest.raises(ModelNotFound, match=r"found 2 .safetensors files"):
        fetch_draft(REPO)


def test_gated(hub, monkeypatch):
    hub.gated.add(REPO.repo)
    with pytest.raises(ModelNotFound, match="is gated") as caught:
        fetch_draft(REPO)
    assert f"{hub.endpoint}/{REPO.repo}" in caught.value.hint and "HF_TOKEN" in caught.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetch_draft(REPO).read_bytes() == WEIGHTS
