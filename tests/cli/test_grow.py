"""`bough grow`, and running what it wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bough as package
from bough.gguf.types import QuantType
from tests.workshop.test_grow import specification, tiny_draft


@pytest.fixture
def draft(tmp_path, tiny_model):
    return tiny_draft(tiny_model(), tmp_path / "draft.gguf", QuantType.F32)


def test_grows_and_runs(bough, tmp_path, tiny_model, draft):
    target, folder = tiny_model(), tmp_path / "grown"
    arguments = ("grow", "--preset", "double", "--from", target, "--draft", draft, "-o", folder)
    result = bough(*arguments)
    assert result.exit_code == 0, result.output
    assert "16 layers, 128 wide, 640 tokens" in result.stdout
    assert specification(folder / "target.gguf").width == 128

    prompt = ("the", "-n", 12, "--greedy", "--no-think", "--json")
    small = json.loads(bough("run", target, *prompt, "--draft", draft).stdout)
    grown = json.loads(bough("run", folder / "target.gguf", *prompt, "--draft", folder / "draft.gguf").stdout)
    assert grown["text"] == small["text"] != ""

    again = bough(*arguments)
    assert again.exit_code == 2 and "exist" in again.stderr and "--force" in again.stderr
    assert bough(*arguments, "--force", "--random").exit_code == 0


def test_what_contradicts_itself(bough, tmp_path, tiny_model, draft):
    both = bough("grow", "-o", tmp_path / "x", "--preset", "27b", "--like", tiny_model())
    assert both.exit_code == 2 and "needed: one of them" in both.stderr
    alone = bough("grow", "-o", tmp_path / "x", "--draft", draft)
    assert alone.exit_code == 2 and "--from" in alone.stderr
    nowhere = bough("grow")
    assert nowhere.exit_code == 2 and "--output" in nowhere.stderr
    missing = bough("grow", "-o", tmp_path / "x", "--from", tmp_path / "none.gguf")
    assert missing.exit_code == 3 and "no such file" in missing.stderr
    assert not (tmp_path / "x").exists()


def test_an_installed_bough_says_that_it_needs_a_checkout(tmp_path):
    site = tmp_path / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "bough").symlink_to(Path(package.__file__).parent)
    command = [sys.executable, "-m", "bough", "grow", "-o", str(tmp_path / "grown")]
    result = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(site)}, cwd=tmp_path
    )
    assert result.returncode == 2 and f"installed in {site}" in result.stderr and "git clone" in result.stderr
