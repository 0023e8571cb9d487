"""What is in the cache, and taking some of it away."""

import json
import os
from pathlib import Path

import pytest

from bough.errors import BoughError
from bough.hub.cache import contents, of_repo, removal, unfinished

CONFIG = json.dumps({"architectures": ["DFlashDraftModel"]}).encode()


def add(cache: Path, repo: str, commit: str, files: dict[str, bytes], *, main: bool = True) -> Path:
    """Files of one commit, as the hub's client lays them out."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for name, data in files.items():
        blob = folder / "blobs" / f"{abs(hash(data)):x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs/main").write_text(commit)
    return snapshot


def names(cache: Path) -> set[str]:
    return {str(each) for each in contents(cache)}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    add(
        tmp_path,
        "me/Model-GGUF",
        "aaa",
        {
            "README.md": b"x",
            "m-Q4_K_M.gguf": b"four" * 100,
            "m-Q8_0.gguf": b"eight" * 100,
            "mmproj-F16.gguf": b"eyes",
            "big/m-F16-00001-of-00002.gguf": b"one",
            "big/m-F16-00002-of-00002.gguf": b"two",
            "half/m-F32-00001-of-00002.gguf": b"half",
        },
    )
    add(tmp_path, "z-lab/Model-DFlash", "aaa", {"config.json": CONFIG, "model.safetensors": b"w" * 50})
    add(tmp_path, "me/plain", "aaa", {"config.json": b"{}", "model.safetensors": b"p"})
    (tmp_path / "datasets--me--data").mkdir()
    return tmp_path


def test_contents(cache):
    assert names(cache) == {
        "me/Model-GGUF:Q4_K_M",
        "me/Model-GGUF:Q8_0",
        "me/Model-GGUF:F16",
        "z-lab/Model-DFlash",
    }
    found = {str(each): each for each in contents(cache)}
    assert found["me/Model-GGUF:F16"].size == 6
    assert found["me/Model-GGUF:F16"].path.read_bytes() == b"one"
    assert found["z-lab/Model-DFlash"].path.name == "model.safetensors"
    assert contents(cache / "nothing") == []


def test_a_newer_commit_hides_an_older_one(cache):
    add(cache, "me/Model-GGUF", "bbb", {"m-Q4_K_M.gguf": b"better"})
    (found,) = [each for each in of_repo("me/Model-GGUF", cache) if each.quant == "Q4_K_M"]
    assert found.path.read_bytes() == b"better" and found.folder.name == "bbb"


def test_removing_one_file_leaves_the_others(cache):
    (model,) = [each for each in contents(cache) if each.quant == "Q8_0"]
    plan = removal([model], cache)
    assert plan.size == 500 and names(cache) >= {"me/Model-GGUF:Q8_0"}
    before = {path for path in cache.rglob("*") if path.is_file()}
    plan.execute()
    gone = before - {path for path in cache.rglob("*") if path.is_file()}
    assert {path.name for path in gone if path.suffix} == {"m-Q8_0.gguf"} and len(gone) == 2
    assert names(cache) == {"me/Model-GGUF:Q4_K_M", "me/Model-GGUF:F16", "z-lab/Model-DFlash"}


def test_removing_a_whole_commit_leaves_other_repositories(cache):
    (draft,) = [each for each in contents(cache) if not each.quant]
    plan = removal([draft], cache)
    assert plan.size == 50 + len(CONFIG)
    plan.execute()
    # The commit has the same name everywhere.
    assert not (cache / "models--z-lab--Model-DFlash").exists()
    assert (cache / "models--me--plain/snapshots/aaa/config.json").exists()
    assert len(names(cache)) == 3


def test_older_commits_are_removed_and_shared_blobs_stay(cache):
    add(cache, "me/Model-GGUF", "bbb", {"m-Q4_K_M.gguf": b"better", "copy.gguf": b"four" * 100})
    (model,) = [each for each in of_repo("me/Model-GGUF", cache) if each.quant == "Q4_K_M"]
    removal([model], cache).execute()
    assert not list(cache.rglob("m-Q4_K_M.gguf"))
    assert (cache / "models--me--Model-GGUF/snapshots/bbb/copy.gguf").read_bytes() == b"four" * 100


def test_split_files_are_removed_together(cache):
    (model,) = [each for each in contents(cache) if each.quant == "F16"]
    removal([model], cache).execute()
    assert not list(cache.rglob("*F16-0000*")) and list(cache.rglob("mmproj-F16.gguf"))


def test_a_link_to_elsewhere_is_not_followed(cache, tmp_path_factory):
    own = tmp_path_factory.mktemp("own") / "mine-Q8_0.gguf"
    own.write_bytes(b"mine")
    snapshot = cache / "models--me--Mine/snapshots/aaa"
    snapshot.mkdir(parents=True)
    (snapshot / own.name).symlink_to(own)
    (model,) = of_repo("me/Mine", cache)
    with pytest.raises(BoughError, match="outside of the cache"):
        removal([model], cache)
    assert own.exists()


def test_a_damaged_cache_is_named(cache):
    (draft,) = of_repo("z-lab/Model-DFlash", cache)
    (cache / "models--z-lab--Model-DFlash/refs/main").write_text("ccc")
    with pytest.raises(BoughError, match="the cache of z-lab/Model-DFlash is damaged"):
        removal([draft], cache)


def test_unfinished_downloads(cache):
    blob = cache / "models--me--New/blobs/abc.bough.incomplete"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"half")
    assert unfinished("me/New", cache) == [blob] and unfinished("me/plain", cache) == []
    assert of_repo("me/New", cache) == []
