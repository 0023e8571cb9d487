"""`treeflash grow`, and running what it wrote."""

import json

import pytest

from tests.convert.test_grow import specification, tiny_draft
from treeflash.gguf.types import QuantType


@pytest.fixture
def draft(tmp_path, tiny_model):
    return tiny_draft(tiny_model(), tmp_path / "draft.gguf", QuantType.F32)


def test_grows_and_runs(treeflash, tmp_path, tiny_model, draft):
    target, folder = tiny_model(), tmp_path / "grown"
    arguments = ("grow", "--preset", "double", "--from", target, "--draft", draft, "-o", folder)
    result = treeflash(*arguments)
    assert result.exit_code == 0, result.output
    assert "16 layers, 128 wide, 640 tokens" in result.stdout
    assert specification(folder / "target.gguf").width == 128

    prompt = ("the", "-n", 12, "--greedy", "--no-think", "--json")
    small = json.loads(treeflash("run", target, *prompt, "--draft", draft).stdout)
    grown = json.loads(
        treeflash("run", folder / "target.gguf", *prompt, "--draft", folder / "draft.gguf").stdout
    )
    assert grown["text"] == small["text"] != ""

    again = treeflash(*arguments)
    assert again.exit_code == 2 and "exist" in again.stderr and "--force" in again.stderr
    assert treeflash(*arguments, "--force", "--random").exit_code == 0


def test_what_contradicts_itself(treeflash, tmp_path, tiny_model, draft):
    both = treeflash("grow", "-o", tmp_path / "x", "--preset", "27b", "--like", tiny_model())
    assert both.exit_code == 2 and "needed: one of them" in both.stderr
    alone = treeflash("grow", "-o", tmp_path / "x", "--draft", draft)
    assert alone.exit_code == 2 and "--from" in alone.stderr
    nowhere = treeflash("grow")
    assert nowhere.exit_code == 2 and "--output" in nowhere.stderr
    missing = treeflash("grow", "-o", tmp_path / "x", "--from", tmp_path / "none.gguf")
    assert missing.exit_code == 3 and "no such file" in missing.stderr
    assert not (tmp_path / "x").exists()
