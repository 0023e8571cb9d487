"""Names to paths on this machine."""

import pytest

from treeflash.errors import ModelNotFound
from treeflash.hub.resolve import resolve


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


def test_what_is_on_disk_wins_over_a_repository(folder):
    touch(folder / "user/repo/model-Q4_0.gguf")
    assert resolve("user/repo").samefile(folder / "user/repo/model-Q4_0.gguf")


def test_home_is_known(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    touch(folder / "models/a.gguf")
    assert resolve("~/models/a.gguf").samefile(folder / "models/a.gguf")


def test_folders(folder):
    touch(folder / "split/m-00002-of-00002.gguf")
    touch(folder / "split/m-00001-of-00002.gguf")
    touch(folder / "split/mmproj-F16.gguf")
    assert resolve("split").name == "m-00001-of-00002.gguf"
    touch(folder / "two/a.gguf")
    touch(folder / "two/b.gguf")
    with pytest.raises(ModelNotFound, match=r"two holds 2 models: a.gguf \(0.0 MB\), b.gguf") as caught:
        resolve("two")
    assert caught.value.hint == "name one: two/a.gguf"
    touch(folder / "hf/config.json")
    touch(folder / "hf/model.safetensors")
    with pytest.raises(ModelNotFound, match="holds a Hugging Face model") as caught:
        resolve("hf")
    assert caught.value.hint == "treeflash convert hf"
    (folder / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"holds no .gguf file"):
        resolve("empty")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("qwen-Q4_K_N.gguf", "qwen-Q4_K_N.gguf: no such file", "did you mean qwen-Q4_K_M.gguf?"),
        ("./qwen-Q4_K_N.gguf", "no such file", "did you mean qwen-Q4_K_M.gguf?"),
        ("away/model.gguf", "away/model.gguf: no such file, and no folder away", ""),
        ("qwen", "qwen: no such file", "USER/REPO[:QUANT]"),
        ("Why is the sky blue?", "neither a file nor USER/REPO", "--prompt"),
        ("a\0b", "no such file", ""),
        ("x" * 5000, "is not a file name", ""),
    ],
)
def test_names_of_nothing(folder, name, message, hint):
    touch(folder / "qwen-Q4_K_M.gguf")
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert message in caught.value.message
    assert hint in caught.value.hint
