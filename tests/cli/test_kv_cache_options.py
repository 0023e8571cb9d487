"""The options of the KV cache, from the command line to the statistics of an answer."""

import json
from pathlib import Path

import pytest

from bough.cli.aliases import SWITCHES


@pytest.mark.parametrize(
    ("flags", "keys", "values"),
    [
        ([], "auto", "auto"),
        (["--kv", "q8_0"], "q8_0", "q8_0"),
        (["--kv", "q8_0", "--kv-v", "q5_0"], "q8_0", "q5_0"),
        (["--kv-k", "bf16"], "bf16", "auto"),
        (["--kv", "Q8_0", "--kv-v", "TQ3_0"], "q8_0", "tq3_0"),
        *(
            ([flag], ours.removeprefix("--kv="), ours.removeprefix("--kv="))
            for flag, ours in SWITCHES.items()
        ),
        (["--kv-tq3", "--kv-k", "q8_0"], "q8_0", "tq3_0"),
    ],
)
def test_each_side_may_be_chosen(bough, tiny_model, flags: list[str], keys: str, values: str) -> None:
    done = bough("serve", tiny_model(), "--print-config", "--window", "2k", *flags)
    engine = json.loads(done.stdout)["engine"]
    assert (engine["kv_k"], engine["kv_v"], engine["window"]) == (keys, values, 2048)


@pytest.mark.parametrize("command", ["run", "chat", "serve", "bench"])
def test_every_command_that_answers_has_them(bough, command: str) -> None:
    shown = bough(command, "--help").stdout
    for flag in ("--kv ", "--kv-k", "--kv-v", "--window"):
        assert flag in shown
    assert not any(flag in shown for flag in SWITCHES)
    refused = bough(command, "--kv", "q3")
    assert refused.exit_code == 2 and "invalid value for '--kv': 'q3' is not one of" in refused.stderr


def test_approximations_are_shown(bough, tiny_model) -> None:
    ask = ("run", tiny_model(), "hello", "-n", 8)
    exact = bough(*ask, "--kv-q8")
    assert exact.exit_code == 0 and "pproximate" not in exact.stderr and "q8_0" not in exact.stderr
    lossy = bough(*ask, "--kv", "q4_0", "--kv-k", "q8_0", "--window", 100)
    assert lossy.exit_code == 0
    start, plan, *lines = lossy.stderr.splitlines()
    line = " · ".join(lines)
    assert plan.startswith("KV cache in q8_0/q4_0 (as requested), context ")
    assert start.startswith("Approximate: values in q4_0, a window of 100 tokens.")
    assert line.startswith("8 tok · ") and " · values in q4_0 · a window of 100 tokens · " in line
    answer = json.loads(bough(*ask, "--kv-q4", "--json").stdout)
    assert answer["stats"]["approximate"] == ["keys and values in q4_0"] and answer["kv"] == "q4_0"
    apart = json.loads(bough(*ask, "--kv", "q8_0", "--kv-v", "q5_0", "--json").stdout)
    assert apart["kv"] == "q8_0/q5_0"


def test_a_window_that_holds_the_context_is_none(bough, tiny_model) -> None:
    done = bough("run", tiny_model(), "hello", "-n", 4, "--max-ctx", 128, "--window", 128)
    assert done.exit_code == 0 and "window" not in done.stderr
    done = bough("run", tiny_model(), "hello", "-n", 4, "--max-ctx", 128, "--window", 127)
    assert "Approximate: a window of 127 tokens" in done.stderr


@pytest.mark.parametrize("flags", [["--kv", "q4_0"], ["--window", "2k"], ["--vram-limit", "24g"]])
@pytest.mark.parametrize("command", ["chat", "bench"])
def test_a_server_has_its_own(bough, command: str, flags: list[str]) -> None:
    done = bough(command, "--url", "http://127.0.0.1:9", *flags)
    assert done.exit_code == 2 and "the server has its own" in done.stderr


def test_a_model_with_other_heads_is_refused(bough, tiny_model) -> None:
    path: Path = tiny_model("qwen2")
    done = bough("run", path, "hello", "--kv", "q4_0")
    assert done.exit_code == 2 and "needs a multiple of 32" in done.stderr and "--kv f16" in done.stderr
