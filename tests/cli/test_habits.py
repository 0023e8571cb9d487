"""What people who come from other programs type first."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from bough.cli import completion, daemon, view
from bough.cli.aliases import spelled
from bough.cli.bench import in_order
from bough.cli.sampling import SamplingOptions
from tests.cli.terminal import Terminal


@pytest.fixture
def model(tiny_model):
    return tiny_model()


def test_a_sentence_where_the_model_belongs_is_the_prompt(bough):
    given = bough("run", "def f(n):\n return", "-n", 4, "--greedy")
    named = bough("run", "bough-40m", "-p", "def f(n):\n return", "-n", 4, "--greedy")
    assert given.exit_code == 0 and given.stdout == named.stdout
    assert "No model given: using bough-40m" in given.stderr


def test_words_after_the_model_are_the_prompt(bough, model):
    words = bough("run", model, "why", "is", "it", "-n", 4, "--greedy")
    assert words.exit_code == 0
    assert words.stdout == bough("run", model, "why is it", "-n", 4, "--greedy").stdout


def test_a_name_that_is_no_model_is_said_to_be_none(bough):
    result = bough("run", "lama3", "Hello")
    assert result.exit_code == 3 and "lama3: no such file or short name" in result.stderr
    assert "USER/REPO[:QUANT]: unsloth/Llama-3.2-3B-Instruct-GGUF:Q4_K_M" in result.stderr


def test_a_prompt_from_a_file(bough, model, tmp_path):
    (tmp_path / "p.txt").write_text("some text\n")
    from_file = bough("run", model, "-f", tmp_path / "p.txt", "-n", 4, "--greedy")
    assert from_file.stdout == bough("run", model, "some text", "-n", 4, "--greedy").stdout
    missing = bough("run", model, "-f", tmp_path / "q.txt")
    assert missing.exit_code == 2 and "cannot be read" in missing.stderr


def test_spellings_of_other_programs(bough, model):
    ours = bough("run", model, "hi", "-n", 5, "--temperature", 0, "--max-ctx", 256, "--json")
    theirs = bough(
        *("run", "-p", "hi", "--max-tokens=5", "--temp", 0, "-c", 256, "--repeat-penalty", 1),
        *("-m", model, "--json"),
    )
    assert ours.exit_code == theirs.exit_code == 0, theirs.output
    assert json.loads(ours.stdout)["tokens"] == json.loads(theirs.stdout)["tokens"]
    unlimited = bough("run", "-hf", model, "hi", "-n", -1, "--max-ctx", 64, "--greedy", "--json")
    assert json.loads(unlimited.stdout)["stats"]["generated_tokens"] > 20
    shown = bough("run", "--help").stdout
    assert not any(name in shown for name in ("--max-tokens", "--ctx-size", "-hf"))


def test_values_are_not_taken_for_options():
    known, valued = {"-p", "--n-gen", "--temperature", "--json"}, {"-p", "--n-gen", "--temperature"}
    given = ["-p", "-m", "--temp", "--max-tokens", "--json", "--", "--temp"]
    assert spelled(given, known, valued) == ["-p", "-m", "--temperature", "--max-tokens", *given[4:]]
    assert spelled(["x", "-m", "m"], known, valued) == ["m", "x"]


def test_letters_that_mean_something_else_elsewhere(bough, model):
    hot = bough("run", model, "hi", "-n", 1, "-t", 8, "-s", "42")
    assert "above 2 most models write noise" in hot.stderr and "--threads" in hot.stderr
    assert "The system message is '42'. The seed is --seed." in hot.stderr
    mild = bough("run", model, "hi", "-n", 1, "-t", 2)
    assert "noise" not in mild.stderr


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_model_alone_on_a_terminal_starts_a_chat(command, model, tmp_path):
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    arguments = ["-m", "bough", command, str(model), "-n", "3", "--top-k", "5", "--min-p", "0.1"]
    with Terminal([sys.executable, *arguments], environment, lines=40) as terminal:
        terminal.wait(lambda text: "/help shows commands" in text)
        terminal.type("/set\r")
        terminal.wait(lambda text: "max_tokens" in text and "draft" in text.split("max_tokens")[1])
        shown = terminal.text
        assert re.search(r"top_k +5 ", shown) and re.search(r"max_tokens +3 ", shown), shown
        assert "context 4,096 tokens · CPU, 1 thread" in shown
        terminal.type("/bye\r")
        assert terminal.ended() == 0


def test_the_model_comes_first_in_bench_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert in_order("builtin", None) == ("builtin", None)
    assert in_order("builtin", "m.gguf") == ("builtin", "m.gguf")
    for name in ("m.gguf", "qwen3.6-27b", "qwen3.6-27b:Q8_0", "me/M-GGUF:Q8_0", "folder"):
        assert in_order(name, None) == ("builtin", name)
        assert in_order(name, "agent,sweep") == ("agent,sweep", name)
    assert in_order("humanevl", None) == ("humanevl", None)  # which names the suites in its error


def test_bench_writes_into_the_cache_folder_and_shows_llama_benchs_tests(bough, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bough("bench", model, "--prompts", 1, "-n", 4)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "cache/bough/bench.jsonl").exists() and not list(tmp_path.glob("*.jsonl"))
    assert re.search(r"pp512 +[\d.]+ ± ", result.stdout) and re.search(r"tg128 +[\d.]+ ± ", result.stdout)
    assert set(json.loads(result.stdout.splitlines()[-1])["run"]["speed"]) == {"pp512", "tg128"}


def test_the_built_in_model_is_listed_with_what_fits(bough, monkeypatch):
    from bough.cli import listing

    monkeypatch.setattr(listing, "_memory", lambda: ("a card", 12 << 30))
    facts = json.loads(bough("list", "--json").stdout)
    assert [(row["name"], row["fits"]) for row in facts["built_in"]] == [("bough-40m", True)]
    sizes = {row["name"]: (round(row["size_bytes"] / 1e9, 1), row["fits"]) for row in facts["available"]}
    assert sizes["qwen3.6-27b"] == (16.5, False) and sizes["qwen3-8b"] == (4.9, True)
    shown = bough("list").stdout
    assert "comes with it" in shown and "16.5 GB" in shown and "on a card, 12.00 GiB" in shown


def test_names_of_models_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qw.gguf").touch()
    (tmp_path / "qwert").mkdir()
    (tmp_path / "qwert/m.gguf").touch()
    found = completion.model_names("qw")
    assert "qwen3.6-27b" in found and found[-2:] == ["qw.gguf", "qwert/"]
    assert completion.model_names("qwert/") == ["qwert/m.gguf"]
    assert completion.model_names("bou") == ["bough-40m"] and completion.pulled_names("bou") == []


def test_debug_goes_anywhere_and_keeps_the_exit_code(bough):
    for arguments in (["--debug", "run", "no.gguf", "x"], ["run", "no.gguf", "x", "--debug"]):
        result = bough(*arguments)
        assert result.exit_code == 3
        assert "Traceback" in result.stderr and "error: no.gguf: no such file" in result.stderr


def test_lines_to_try_run_when_pasted(bough, tmp_path, monkeypatch):
    monkeypatch.setattr(view, "PIPE_WIDTH", 400)
    grown = bough("grow", "--preset", "double", "-o", tmp_path / "a folder")
    line = re.search(r"try it +(bough .*)", grown.stdout)
    program, *arguments = shlex.split(line[1])
    result = bough(*arguments, "-n", 4, "--greedy", "--json")
    assert program == "bough" and result.exit_code == 0, result.output
    assert json.loads(result.stdout)["draft"].endswith("a folder/draft.gguf")


def test_python_dash_m(tmp_path):
    shown = subprocess.run([sys.executable, "-m", "bough", "--version"], capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.startswith("bough ")


def test_what_sampling_options_mean():
    assert SamplingOptions(n_gen=-1).limit is None and SamplingOptions(n_gen=3).limit == 3
    assert SamplingOptions(stop=[r"a\nb"]).stops == ["a\nb"]


def test_serve_takes_sampling_defaults(bough, model):
    flags = ["--temperature", 0.5, "--top-k", 7, "--max-tokens", 9, "--print-config"]
    config = json.loads(bough("serve", model, *flags).stdout)["server"]
    assert config["sampling"] == {"temperature": 0.5, "top_k": 7} and config["max_tokens"] == 9


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("box", "box")]
)
def test_the_address_that_is_shown_can_be_opened(host, shown):
    assert daemon.address(host, 8000) == f"http://{shown}:8000"


COMMANDS = ["run", "chat", "serve", "bench", "show", "list", "pull", "rm", "train", "grow", "doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_eighty_columns(bough, command):
    shown = bough(command, "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80 and shown.startswith(f"\nUsage: bough {command}")
    assert not any(word in shown for word in ("<bool>", "<str>", "<list", "x>=", "…"))


def test_the_options_that_matter_come_first(bough):
    shown = bough("run", "--help").stdout
    first = shown.split("\nMost used\n")[1].split("\n\n")[0]
    found = re.findall(r"^  (?:-\w, )?(--[\w-]+)", first, re.M)
    assert found == ["--prompt", "--n-gen", "--temperature", "--draft", "--max-ctx"]
    assert shown.count("  -n, --n-gen") == 1 and "--break-loops, --no-break-loops" in shown
    assert "auto|f32|f16|bf16|q8_0|q5_0|q4_0|tq3_0" in shown
