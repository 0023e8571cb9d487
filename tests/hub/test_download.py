"""Downloads with the real client against a hub on this machine."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.errors import DownloadFailed, ModelNotFound, ResourceError
from bough.hub import download
from bough.hub.names import RepoName
from tests.hub.fake_hub import COMMIT, FakeHub

MODEL = os.urandom(3_000_000)
REPO = RepoName("someone/Model-GGUF")


class Recorder:
    def __init__(self) -> None:
        self.done: list[int] = []
        self.notices: list[str] = []
        self.checked: list[str] = []

    def downloading(self, name: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.done.append(done)

    def checking(self, name: str, done: int, total: int) -> None:
        self.checked.append(name)

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.repos[REPO.repo] = {
        "README.md": b"hello",
        "mmproj-F16.gguf": b"eyes",
        "model-Q4_K_M.gguf": MODEL,
        "model-Q8_0.gguf": b"eight",
        "UD-Q2_K_XL/model-UD-Q2_K_XL-00001-of-00002.gguf": b"first",
        "UD-Q2_K_XL/model-UD-Q2_K_XL-00002-of-00002.gguf": b"second",
    }
    with contextlib.closing(hub):
        yield hub


def get(hub: FakeHub, cache: Path, name: RepoName = REPO, **options) -> Path:
    return download.fetch(name, endpoint=hub.endpoint, cache=cache, **options)


def test_fetches_the_default_quantisation_into_the_shared_cache(hub, tmp_path):
    seen = Recorder()
    path = get(hub, tmp_path, progress=seen)
    assert path.read_bytes() == MODEL
    assert path == tmp_path / "models--someone--Model-GGUF/snapshots" / COMMIT / "model-Q4_K_M.gguf"
    assert (tmp_path / "models--someone--Model-GGUF/refs/main").read_text() == COMMIT
    assert seen.done == sorted(seen.done) and seen.done[-1] == len(MODEL)
    assert seen.checked and not list(tmp_path.rglob("*.incomplete"))
    # The client of the hub finds it without asking anyone.
    from huggingface_hub import hf_hub_download

    found = hf_hub_download(REPO.repo, path.name, cache_dir=tmp_path, local_files_only=True)
    assert found == str(path)


def test_second_call_downloads_nothing_and_works_offline(hub, tmp_path):
    first = get(hub, tmp_path)
    count = len(hub.downloads())
    assert get(hub, tmp_path) == first
    assert len(hub.downloads()) == count == 1
    asked = len(hub.requests)
    assert get(hub, tmp_path, offline=True) == first
    assert len(hub.requests) == asked


def test_offline_without_a_copy(hub, tmp_path):
    with pytest.raises(ModelNotFound, match="not in the cache") as caught:
        get(hub, tmp_path, offline=True)
    assert "bough pull someone/Model-GGUF" in caught.value.hint
    get(hub, tmp_path, RepoName(REPO.repo, "Q8_0"))
    with pytest.raises(ModelNotFound, match=r"has no Q6_K; it has Q8_0"):
        get(hub, tmp_path, RepoName(REPO.repo, "Q6_K"), offline=True)


def test_without_a_network_the_cached_copy_is_used_with_a_notice(hub, tmp_path):
    path = get(hub, tmp_path)
    seen = Recorder()
    nowhere = {"endpoint": "http://127.0.0.1:9", "cache": tmp_path}
    assert download.fetch(REPO, progress=seen, **nowhere) == path
    assert "using the copy in the cache" in seen.notices[0]
    with pytest.raises(DownloadFailed, match="cannot be reached") as caught:
        download.fetch(RepoName("someone/else"), **nowhere)
    assert "HF_HUB_OFFLINE=1" in caught.value.hint
    hub.failing = 503
    assert get(hub, tmp_path) == path
    with pytest.raises(DownloadFailed, match="answered 503"):
        get(hub, tmp_path, RepoName("someone/else"))


def test_a_broken_transfer_is_resumed(hub, tmp_path):
    hub.break_off = [1_200_000, 700_000]
    assert get(hub, tmp_path).read_bytes() == MODEL
    ranges = [headers["Range"] for headers in hub.downloads()]
    assert ranges[0] == "bytes=0-" and len(ranges) == 3
    starts = [int(each.removeprefix("bytes=").removesuffix("-")) for each in ranges]
    assert starts == [0, 1_200_000, 1_900_000]


def test_a_new_run_resumes_the_download(hub, tmp_path):
    class Impatient(Recorder):
        def downloading(self, name: str, done: int, total: int) -> None:
            if done > 1_500_000:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(hub, tmp_path, progress=Impatient())
    (partial,) = tmp_path.rglob("*.incomplete")
    kept = partial.stat().st_size
    assert kept > 1_000_000
    assert get(hub, tmp_path).read_bytes() == MODEL
    assert hub.downloads()[-1]["Range"] == f"bytes={kept}-"


def test_a_server_that_ignores_ranges_starts_again(hub, tmp_path):
    hub.break_off = [1_200_000]
    hub.ignore_ranges = True
    assert get(hub, tmp_path).read_bytes() == MODEL


def test_fails_after_several_tries_without_progress(hub, tmp_path):
    hub.break_off = [0] * 50
    with pytest.raises(DownloadFailed, match="cannot be reached"):
        get(hub, tmp_path)
    assert len(hub.downloads()) == download.TRIES


def test_damaged_bytes_never_enter_the_cache(hub, tmp_path):
    hub.spoil = True
    with pytest.raises(DownloadFailed, match=r"arrived damaged: it has SHA-256 .*, needed"):
        get(hub, tmp_path)
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.spoil = False
    assert get(hub, tmp_path).read_bytes() == MODEL


def test_split_files_are_all_fetched(hub, tmp_path):
    seen = Recorder()
    path = get(hub, tmp_path, RepoName(REPO.repo, "ud-q2_k_xl"), progress=seen)
    assert path.name == "model-UD-Q2_K_XL-00001-of-00002.gguf"
    assert path.read_bytes() == b"first"
    assert path.with_name("model-UD-Q2_K_XL-00002-of-00002.gguf").read_bytes() == b"second"
    assert seen.done[-1] == len(b"firstsecond")


def test_gated_repository(hub, tmp_path, monkeypatch):
    hub.gated.add(REPO.repo)
    with pytest.raises(ModelNotFound, match="is gated") as caught:
        get(hub, tmp_path)
    assert f"{hub.endpoint}/{REPO.repo}" in caught.value.hint
    assert "HF_TOKEN" in caught.value.hint and "hf auth login" in caught.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert get(hub, tmp_path).read_bytes() == MODEL
    assert all("Authorization" not in headers for headers in hub.downloads())  # another host


def test_missing_repository_and_quantisation(hub, tmp_path):
    with pytest.raises(ModelNotFound, match="someone/nothing was not found"):
        get(hub, tmp_path, RepoName("someone/nothing"))
    with pytest.raises(ModelNotFound, match=r"has no Q6_K; it has .*Q8_0 .*Q4_K_M \(3.0 MB\)"):
        get(hub, tmp_path, RepoName(REPO.repo, "Q6_K"))
    hub.repos["someone/plain"] = {"model.safetensors": b"x", "mmproj-F16.gguf": b"x"}
    with pytest.raises(ModelNotFound, match="holds no GGUF file"):
        get(hub, tmp_path, RepoName("someone/plain"))
    assert not hub.downloads()


def test_a_full_disk_is_an_error_before_the_download(hub, tmp_path, monkeypatch):
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=1000))
    with pytest.raises(ResourceError, match=r"needs 3.0 MB, 0.0 MB are free in") as caught:
        get(hub, tmp_path)
    assert "HF_HOME" in caught.value.hint
    assert not hub.downloads()
