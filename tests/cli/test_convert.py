"""`bough convert`, and running what it wrote."""

import json

import pytest

from tests.convert.hf_models import build_hf, save_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "Tiny-Qwen"
    model, config = build_hf("qwen35")
    save_hf(model, config, folder)
    return folder


def test_converts_and_runs(bough, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bough("convert", folder, "--type", "q8_0")
    assert result.exit_code == 0, result.output
    written = tmp_path / "Tiny-Qwen-q8_0.gguf"
    assert written.exists() and "Tiny-Qwen-q8_0.gguf" in result.stdout and "Q8_0" in result.stdout
    answer = json.loads(bough("run", written, "hello", "-n", 6, "--json").stdout)
    assert answer["stats"]["acceptance_length"] == 1.0
    assert answer["finish_reason"] in ("length", "stop")

    again = bough("convert", folder, "--type", "q8_0")
    assert again.exit_code == 2 and "exists" in again.stderr and "--force" in again.stderr
    assert bough("convert", folder, "--type", "q8_0", "--force").exit_code == 0


def test_output_may_be_a_folder_or_a_file(bough, folder, tmp_path):
    assert bough("convert", folder, "-o", tmp_path, "--type", "f32").exit_code == 0
    assert (tmp_path / "Tiny-Qwen-f32.gguf").exists()
    assert bough("convert", folder, "-o", tmp_path / "x.gguf", "--type", "f16").exit_code == 0
    assert (tmp_path / "x.gguf").stat().st_size < (tmp_path / "Tiny-Qwen-f32.gguf").stat().st_size


def test_a_folder_that_is_no_model(bough, tmp_path):
    result = bough("convert", tmp_path / "none", "-o", tmp_path / "x.gguf")
    assert result.exit_code in (3, 4) and "error: " in result.stderr
    assert not (tmp_path / "x.gguf").exists()
