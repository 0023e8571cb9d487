"""The options of compression, from the command line to the answer's statistics."""

import json
import random

import pytest

from bough.cli.aliases import COMPRESS
from tests.compress.conversations import prose

FACT = "The password of the harbour office is KESTREL-4471."
TEXT = f"{prose(random.Random(1), 40)}\n\n{FACT}\n\n{prose(random.Random(2), 40)}"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ("off", 32768, 0.15)),
        (["--compress", "auto", "--compress-to", "16k"], ("auto", 32768, 16384)),
        (["--compress", "auto", "--compress-above", "8k", "--compress-to", "10%"], ("auto", 8192, 0.1)),
        (["--prefill-compression", "auto", "--prefill-threshold", "9000"], ("auto", 9000, 0.15)),
        (["--prefill-compression=auto", "--prefill-keep-ratio=0.05"], ("auto", 32768, 0.05)),
    ],
)
def test_values_and_luces_spellings(bough, tiny_model, flags: list[str], expected: tuple) -> None:
    done = bough("serve", tiny_model(), "--print-config", *flags)
    found = json.loads(done.stdout)["engine"]["compress"]
    assert (found["mode"], found["above"], found["to"]) == expected and found["scorer"] == "words"


def test_a_scorer_is_a_model(bough, tiny_model) -> None:
    ask = ("serve", tiny_model(), "--print-config", "--prefill-drafter", tiny_model("qwen3"))
    done = bough(*ask, "--compress", "auto")
    assert json.loads(done.stdout)["engine"]["compress"]["scorer"] == str(tiny_model("qwen3"))
    done = bough(*ask)
    assert done.exit_code == 2 and "--compress-scorer needs --compress auto" in done.stderr


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_every_command_that_answers_has_them(bough, command: str) -> None:
    shown = bough(command, "--help").stdout
    assert all(flag in shown for flag in COMPRESS.values())
    assert not any(flag in shown for flag in COMPRESS)
    refused = bough(command, "--compress-to", "1.5")
    assert refused.exit_code == 2 and "'1.5' is not a number of tokens" in refused.stderr


def test_a_server_has_its_own(bough) -> None:
    done = bough("chat", "--url", "http://127.0.0.1:9", "--compress", "auto")
    assert done.exit_code == 2 and "--url excludes" in done.stderr


def test_run_says_what_was_kept(bough, tiny_model) -> None:
    flags = ["--compress", "auto", "--compress-above", "1k", "--compress-to", "0.2", "--max-ctx", "8k"]
    model = tiny_model(context=8192)
    ask = ("run", model, "What is the password of the harbour office?", "-n", 3, *flags)
    done = bough(*ask, "--show-kept", stdin=TEXT)
    assert done.exit_code == 0, done.stderr
    assert "Long prompts are compressed, approximately" in done.stderr
    assert FACT in done.stderr and "[-" in done.stderr and "prompt compressed to " in done.stderr
    dropped = "".join(part.split("-]")[0] for part in done.stderr.split("[-")[1:])
    assert FACT not in dropped and len(dropped) > 0.7 * len(TEXT)
    found = json.loads(bough(*ask, "--json", stdin=TEXT).stdout)["stats"]["compression"]
    assert found["kept_tokens"] <= 0.2 * found["sent_tokens"]
    plain = json.loads(bough(*ask[:5], "--max-ctx", "8k", "--json", stdin=TEXT).stdout)
    assert "compression" not in plain["stats"]
    done = bough("run", tiny_model(), "hello", "--show-kept")
    assert done.exit_code == 2 and "--show-kept needs --compress auto" in done.stderr
