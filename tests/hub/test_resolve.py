"""Names to paths on this machine."""

from pathlib import Path

import pytest

from bough.errors import ModelNotFound, UsageError
from bough.hub.names import RepoName
from bough.hub.resolve import here, meaning, resolve, resolve_draft


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


def test_a_file_is_itself(folder):
    touch(folder / "model.gguf")
    assert resolve("model.gguf").samefile(folder / "model.gguf")


def test_a_path_on_disk_takes_precedence_over_a_repository(folder):
    touch(folder / "user/repo/model-Q4_0.gguf")
    assert resolve("user/repo").samefile(folder / "user/repo/model-Q4_0.gguf")


def test_home_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    touch(folder / "models/a.gguf")
    assert resolve("~/models/a.gguf").samefile(folder / "models/a.gguf")


def test_folders(folder):
    touch(folder / "split/m-00002-of-00002.gguf")
    touch(folder / "split/m-00001-of-00002.gguf")
    touch(folder / "split/mmproj-F16.gguf")
    assert resolve("split").name == "m-00001-of-00002.gguf"
    touch(folder / "pair/dflash-m.gguf")
    touch(folder / "pair/m.gguf")
    assert resolve("pair").name == "m.gguf" and resolve_draft("pair").name == "dflash-m.gguf"
    touch(folder / "two/a.gguf")
    touch(folder / "two/b.gguf")
    with pytest.raises(ModelNotFound, match=r"two holds 2 models: a.gguf \(0.0 MB\), b.gguf") as caught:
        resolve("two")
    assert caught.value.hint == "name one: two/a.gguf"
    touch(folder / "hf/config.json")
    touch(folder / "hf/model.safetensors")
    with pytest.raises(ModelNotFound, match="holds a Hugging Face model") as caught:
        resolve("hf")
    assert caught.value.hint == "bough convert hf"
    (folder / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"holds no .gguf file"):
        resolve("empty")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("qwen-Q4_K_N.gguf", "qwen-Q4_K_N.gguf: no such file", "did you mean qwen-Q4_K_M.gguf?"),
        ("./qwen-Q4_K_N.gguf", "no such file", "did you mean qwen-Q4_K_M.gguf?"),
        ("away/model.gguf", "away/model.gguf: no such file, and no folder away", ""),
        ("mistral", "mistral: no such file", "USER/REPO[:QUANT]"),
        ("qwen3.6-72b", "qwen3.6-72b: no such file", "did you mean qwen3.6-27b"),
        ("qwen3.6-27b:", "qwen3.6-27b:: no such file", "did you mean qwen3.6-27b"),
        ("Why is the sky blue?", "neither a file nor USER/REPO", "`prompt`"),
        ("a\0b", "no such file", ""),
        ("x" * 5000, "is not a file name", ""),
    ],
)
def test_names_without_a_file_or_repository(folder, name, message, hint):
    touch(folder / "qwen-Q4_K_M.gguf")
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_broken_link_is_named(folder):
    for name in ("model.gguf", "user/repo", "qwen3.6-27b"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to("gone.gguf")
        for find in (resolve, resolve_draft):
            with pytest.raises(ModelNotFound) as caught:
                find(name)
            assert caught.value.message == f"{name} is a link to gone.gguf, which does not exist"
            assert caught.value.hint == ""


@pytest.mark.parametrize("name", ["br/abc.ggu", "br/abc.guff", "br/abd.GGU", "br/abc"])
def test_a_misspelt_file_of_a_folder_is_no_repository(folder, name):
    touch(folder / "br/abc.gguf")
    for find in (resolve, resolve_draft):
        with pytest.raises(ModelNotFound, match=f"{name}: no such file") as caught:
            find(name, offline=True)
        assert caught.value.hint == ("" if name.endswith("GGU") else "did you mean br/abc.gguf?")


@pytest.mark.parametrize("name", ["br/b", "br/Qwen3.5-GGUF", "elsewhere/a.ggu", "hf://br/abc"])
def test_a_folder_of_a_users_name_hides_no_repository(folder, name):
    touch(folder / "br/abc.gguf")
    assert meaning(name).repo == RepoName(name.removeprefix("hf://"))


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_this_folder(folder, name):
    touch(folder / "a.gguf")
    for find in (resolve, resolve_draft):
        with pytest.raises(UsageError, match="the name of the model is empty"):
            find(name)


def cache_file(cache, repo, name):
    touch(cache / f"models--{repo.replace('/', '--')}/snapshots/abc/{name}")


def test_short_names_use_the_cache(folder):
    repo = "unsloth/Qwen3.6-27B-GGUF"
    assert meaning("qwen3.6-27b").fetched == RepoName(repo, "Q4_K_M")
    assert meaning("qwen3.6-27b:Q8_0").fetched == RepoName(repo, "Q8_0")
    with pytest.raises(ModelNotFound, match=f"{repo}:Q4_K_M is not in the cache"):
        resolve("qwen3.6-27b", offline=True)
    cache_file(folder, repo, "q-Q8_0.gguf")
    assert resolve("Qwen3.6-27b").name == "q-Q8_0.gguf"  # without asking anyone
    cache_file(folder, repo, "q-Q5_K_M.gguf")
    assert here(meaning("qwen3.6-27b")) is None
    cache_file(folder, repo, "q-Q4_K_M.gguf")
    assert resolve("qwen3.6-27b").name == "q-Q4_K_M.gguf"
    assert resolve("qwen3.6-27b:q5_k_m").name == "q-Q5_K_M.gguf"
    touch(folder / "qwen3.6-27b")
    assert resolve("qwen3.6-27b").samefile(folder / "qwen3.6-27b")


def test_drafts(folder):
    config = '{"architectures": ["DFlashDraftModel"]}'
    touch(folder / "draft/model.safetensors")
    (folder / "draft/config.json").write_text(config)
    touch(folder / "gguf/draft-Q8_0.gguf")
    (folder / "nothing").mkdir()
    assert resolve_draft("draft") == Path("draft")
    assert resolve_draft("draft/model.safetensors").name == "model.safetensors"
    assert resolve_draft("gguf").name == "draft-Q8_0.gguf"
    with pytest.raises(ModelNotFound, match="nothing holds no draft"):
        resolve_draft("nothing")
    with pytest.raises(ModelNotFound, match="draft holds a draft, needed: a ") as caught:
        resolve("draft")
    assert caught.value.hint == "name the target, and set `draft` to draft"
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve_draft("qwen3.6-72b")
    with pytest.raises(UsageError, match=r"no draft is listed for qwen3.5-0.8b"):
        resolve_draft("qwen3.5-0.8b")
    cache_file(folder, "z-lab/Qwen3.6-27B-DFlash", "model.safetensors")
    cache_file(folder, "z-lab/Qwen3.6-27B-DFlash", "config.json")
    for name in ("qwen3.6-27b", "z-lab/Qwen3.6-27B-DFlash"):
        assert resolve_draft(name, offline=True).parent.name == "abc"
