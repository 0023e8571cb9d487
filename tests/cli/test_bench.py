"""`bough bench` from the command line: the embedded pair, a tiny model, another server."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bough.models.draft_spec import DraftSpec
from tests.cli.chat_server import ChatServer, echo


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def last_line(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_the_embedded_pair_in_a_few_prompts(bough, here, tmp_path):
    command = ["bench", "builtin,agent", "--prompts", "2", "-n", "10", "--fixed"]
    outputs = ["--json", "all.json", "--markdown", "page.md", "--plot", "pictures"]
    found = last_line(bough(*command, *outputs))
    builtin, agent = found["suites"]
    assert (builtin["suite"], builtin["prompts"], builtin["identical"]["mean"]) == ("builtin", 2, 1.0)
    assert builtin["acceptance_length"]["mean"] > 1.5 and builtin["rows_per_step"]["mean"] == 23
    assert builtin["plain_tok_s"]["n"] == builtin["tok_s"]["n"] == 2 and builtin["ttft_s"]["mean"] > 0
    assert agent["cached_tokens"]["mean"] > 0 and builtin["cached_tokens"]["mean"] == 0
    assert found["overall"]["prompts"] == 4 and found["run"]["settings"]["model"] == "bough-40m"
    cached = tmp_path / "cache/bough/bench.jsonl"
    lines = [json.loads(line) for line in cached.read_text().splitlines()]
    assert len(lines) == 1 + 2 * 4 and all(line["tokens"] <= 10 for line in lines[1:])
    plain = [line for line in lines[1:] if line["budget"] == 0]
    assert all(line["acceptance_length"] == 1 and line["rows_per_step"] == 1 for line in plain)
    assert "| builtin | 2 |" in (here / "page.md").read_text()
    assert len(list((here / "pictures").glob("*.png"))) >= 2
    assert "text" not in json.loads((here / "all.json").read_text())["lines"][0]


def test_a_run_that_is_gone_on_with_and_compared(bough, here, tiny_model):
    command = ["bench", "builtin", tiny_model(), "--prompts", "3", "-n", "6", "--json", "all.json"]
    found = last_line(bough(*command))
    again = bough(*command, "--resume", "--compare", "all.json")
    assert last_line(again)["suites"] == found["suites"]
    assert "6 of 6 figures did not change beyond noise" in again.stdout
    other = bough(*command, "-n", "8", "--resume", "--compare", "all.json")
    assert last_line(other)["suites"] != found["suites"]
    assert "Not the same in both: n_gen was 6, is 8." in other.stdout


def test_a_model_that_has_changed_is_measured_again(bough, here, tiny_model):
    path = here / "own.gguf"
    path.write_bytes((here / tiny_model()).read_bytes())
    command = ["bench", "builtin", path, "--prompts", "1", "-n", "4"]
    before = last_line(bough(*command))["run"]["settings"]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # of some weight
    path.write_bytes(content)
    again = last_line(bough(*command, "--resume"))["run"]["settings"]
    assert again["model"] == before["model"] and again["files"] != before["files"]


def test_a_draft_that_does_not_fit_is_named(bough, here, monkeypatch):
    whole = DraftSpec.from_gguf
    monkeypatch.setattr(DraftSpec, "from_gguf", lambda *a, **k: replace(whole(*a, **k), mask_id=300))
    result = bough("bench", "builtin", "--prompts", "3", "-n", "80")
    assert last_line(result)["run"]["draft_problem"].startswith("mask_token_id is 300, 16383 fits")
    assert "The draft does not fit: mask_token_id is 300" in " ".join(result.stderr.split())


def test_single_steps(bough, here, tiny_model):
    found = last_line(bough("step", tiny_model(), "--budget", "7", "--max-ctx", "1k"))
    assert {row["rows"] for row in found["sizes"]} >= {1, 8}


def test_a_sweep_of_a_model_that_has_no_draft(bough, here, tiny_model):
    arguments = ["--budget", "2,5", "--context", "0,5k", "-t", "0", "-n", "8", "--max-ctx", "1k"]
    found = last_line(bough("bench", "sweep", tiny_model(), *arguments))
    assert [(row["budget"], row["context"]) for row in found["suites"]] == [(2, 0), (5, 0)]
    assert found["skipped"] == 6
    assert found["suites"][0]["identical"]["mean"] == 1


def test_plain_decoding_alone(bough, here, tiny_model):
    result = bough("bench", "builtin", tiny_model(), "--no-draft", "--prompts", "1", "-n", "4")
    [row] = last_line(result)["suites"]
    assert row["budget"] == 0 and row["speedup"] is None


@pytest.mark.parametrize("owner", ["someone", "bough"])
def test_a_server(bough, here, owner):
    with ChatServer(echo, owner=owner) as server:
        server.pause_s = 0.002
        result = bough("bench", "builtin,agent", "--url", server.url, "--prompts", "2", "-n", "9")
    found = last_line(result)
    assert [row["suite"] for row in found["suites"]] == ["builtin", "agent"]
    assert all(row["tok_s"]["mean"] > 0 and row["ttft_s"]["mean"] > 0 for row in found["suites"])
    body = server.requests[-1]
    assert body["max_tokens"] == 9 and body["temperature"] == 0 and body["stream"] and body["tools"]
    # A server of ours decodes plainly too, when asked to.
    assert (found["suites"][0]["speedup"] is not None) is (owner == "bough")
    assert ("bough" in body) is (owner == "bough")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["humanevil"], "there is no suite 'humanevil'"),
        (["builtin,builtin"], "named twice"),
        (["step"], "step is no suite, but a command of its own"),
        (["builtin", "--budget", "4,8"], "several are for the suite sweep"),
        (["builtin", "--context", "1k"], "--context is for the suite sweep"),
        (["builtin", "-t", "hot"], "--temperature is 'hot'"),
        (["sweep", "--budget", "0"], "--budget is '0', needed numbers from 1 to 63"),
        (["gsm8k", "--offline"], "--offline forbids"),
        (["gsm8k", "--data", "."], "has no gsm8k/test.jsonl"),
        (["builtin", "--compare", "notes.txt"], "is not a file that `bench --json` wrote"),
    ],
)
def test_mistakes(bough, here, arguments, said):
    (here / "notes.txt").write_text("hello")
    result = bough("bench", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_prediction(bough, here, tiny_model):
    alone = bough("step", "--predict", "3090")
    assert alone.exit_code == 2 and "--predict 3090 needs the model that is to run" in alone.stderr
    found = last_line(bough("step", tiny_model(), "--predict", "3090"))
    assert found["card"] == "RTX 3090" and [row["rows"] for row in found["sizes"]] == [1, 8, 16, 24]
    unknown = bough("step", tiny_model(), "--predict", "3dfx")
    assert unknown.exit_code == 2 and "--predict is '3dfx', needed: one of" in unknown.stderr
