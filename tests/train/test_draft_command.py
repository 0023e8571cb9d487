"""`bough train` as a command: files, errors, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bough.cli.program import app
from bough.gguf.reader import GGUFFile
from tests.convert.hf_models import build_hf, save_hf

ROOT = Path(__file__).parents[2]
QUICK = ["--layers", 1, "--block", 4, "--batch", 2, "--anchors", 4, "--seq", 48, "--n-gen", 8, "-t", 0]
QUICK += ["--device", "cpu", "--offline"]


def bough(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def prompts(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "the other"}]
    lines = [{"prompt": f"the {number} and"} for number in range(5)] + [{"messages": chat}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def model(tiny_model) -> Path:
    return tiny_model("qwen35", layers=4)


def test_one_command_makes_a_draft(model, prompts, tmp_path):
    folder = tmp_path / "draft"
    result = bough("train", model, "--prompts", prompts, "-o", folder, "--steps", 3, "--gguf", *QUICK)
    assert result.exit_code == 0, result.output
    assert "tokens a step on held-out prompts" in result.stdout
    assert f"--draft {folder}" in " ".join(result.stdout.split())
    assert "step 3: held-out loss" in result.stderr
    made = {path.name for path in folder.iterdir()}
    assert made == {
        "checkpoint.pt",
        "config.json",
        "draft-q8_0.gguf",
        "model.safetensors",
        "tokens",
        "training.json",
        "training.png",
    }
    for draft in (folder, folder / "draft-q8_0.gguf"):
        result = bough("run", model, "hello", "--draft", draft, "-n", 5, "--device", "cpu", "--json")
        assert result.exit_code == 0, result.output
    again = bough("train", model, "--prompts", prompts, "-o", folder, "--steps", 3, *QUICK)
    assert again.exit_code == 2 and "exists from an earlier run" in again.stderr
    other = ["-o", tmp_path / "other", "--steps", 1, "--json", "--float32", *QUICK]
    other += ["--kv-heads", 2, "--feed-forward", 64, "--head-tokens", 260, "--portable", tmp_path / "carried"]
    other += ["--gguf", "--no-vocabulary"]
    result = bough("train", model, "--tokens", folder / "tokens", *other)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["steps"] == 1 and found["acceptance_length"] >= 1 and found["parity"] < 1e-3
    shape = json.loads((tmp_path / "other/config.json").read_text())
    assert (shape["num_attention_heads"], shape["intermediate_size"]) == (8, 64)
    assert list((tmp_path / "carried").iterdir())
    small, whole = (each / "draft-q8_0.gguf" for each in (tmp_path / "other", folder))
    with GGUFFile.open(small) as one, GGUFFile.open(whole) as two:
        assert "tokenizer.ggml.tokens" in two.metadata and "tokenizer.ggml.tokens" not in one.metadata
    result = bough("run", model, "hello", "--draft", small, "-n", 5, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output


def test_a_hugging_face_folder_is_converted_first(prompts, tmp_path):
    save_hf(*build_hf("qwen35"), tmp_path / "checkpoint")
    result = bough(
        "train", tmp_path / "checkpoint", "--prompts", prompts, "-o", tmp_path / "draft", "--steps", 1, *QUICK
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "draft/target-f16.gguf").exists()
    assert "Converted to" in result.stderr


def test_errors_have_exit_codes_and_messages(model, prompts, tmp_path):
    output = ["-o", tmp_path / "draft", *QUICK]
    for arguments, code, message in (
        ([model], 2, "needed either --prompts or --tokens"),
        ([model, "--prompts", prompts, "--tokens", tmp_path], 2, "needed either --prompts or --tokens"),
        ([model, "--prompts", tmp_path / "absent"], 2, "absent: not readable"),
        ([model, "--tokens", tmp_path], 2, "holds no tokens-*.npz"),
        ([tmp_path / "absent.gguf", "--prompts", prompts], 3, "no such file"),
        ([model, "--prompts", prompts, "--steps", 1, "--minutes", 1], 2, "exclude each other"),
        ([model, "--prompts", prompts, "--mask-token", 999], 2, "is 999, needed a row of the embedding"),
        ([model, "--prompts", prompts, "--continue-from", model], 4, "needed 'dflash' for a draft"),
    ):
        result = bough("train", *arguments, *output)
        assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert not (tmp_path / "draft").exists()
    result = bough("train", model, "--prompts", prompts)
    assert result.exit_code == 2 and "--output" in result.stderr


def test_ctrl_c_leaves_a_checkpoint_to_resume_from(model, prompts, tmp_path):
    folder = tmp_path / "draft"
    program = [sys.executable, "-m", "bough.cli.main", "train", model, "--prompts", prompts, "-o", folder]
    process = subprocess.Popen(
        [str(each) for each in [*program, "--minutes", 30, "--save-every", 0, *QUICK]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
    )
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint.pt").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the same command with --resume goes on" in errors
    result = bough("train", model, "--prompts", prompts, "-o", folder, "--steps", 1, "--resume", *QUICK)
    assert result.exit_code == 0, result.output
    assert (folder / "model.safetensors").exists()
