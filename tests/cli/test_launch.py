"""Coding agents: the lines each needs, and that they are started with them."""

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bough.cli.launch import INSTALL, Client, Server, plan, shell_lines
from tests.cli.chat_server import ChatServer, echo

SOURCES = str(Path(__file__).parents[2] / "src")
# Stands in for an agent: shows what it was given.
AGENT = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}))
"""


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("BOUGH_API_KEY", raising=False)


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Every agent is installed, and does nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for client in Client:
        (folder / client).write_text(AGENT)
        (folder / client).chmod(0o755)
    return {
        "PATH": f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": SOURCES,
        "HOME": str(tmp_path),
        "ANTHROPIC_API_KEY": "of somebody else",
        "KEPT": "yes",
    }


def launched(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bough.cli.main", "launch", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("client", Client)
def test_agents_are_started_with_what_is_printed(environment, client):
    with ChatServer(echo, key="secret") as server:
        flags = [client, "--url", server.url, "--api-key", "secret"]
        started = launched(environment, *flags, "--", "--resume", "it's")
        printed = launched(environment, *flags, "--print", "--", "--resume", "it's")
    assert (started.returncode, started.stderr, printed.returncode) == (0, "", 0)
    shell = subprocess.run(["sh", "-c", printed.stdout], env=environment, capture_output=True, text=True)
    found, by_hand = json.loads(started.stdout), json.loads(shell.stdout)
    assert found["arguments"] == by_hand["arguments"] and found["arguments"][-2:] == ["--resume", "it's"]
    unlike = ("PWD", "OLDPWD", "_", "SHLVL", "LC_CTYPE")
    for each in (found["environment"], by_hand["environment"]):
        assert each["KEPT"] == "yes" and "secret" in str(each)
    assert {name: value for name, value in found["environment"].items() if name not in unlike} == {
        name: value for name, value in by_hand["environment"].items() if name not in unlike
    }


def test_claude():
    start = plan(Client.claude, Server("http://h:1", "m"), "k", [])
    assert start.variables["ANTHROPIC_BASE_URL"] == "http://h:1"
    assert start.variables["ANTHROPIC_AUTH_TOKEN"] == "k" and start.without == ["ANTHROPIC_API_KEY"]
    assert {value for name, value in start.variables.items() if name.endswith("_MODEL")} == {"m"}
    assert shell_lines(start)[0] == "unset ANTHROPIC_API_KEY" and shell_lines(start)[-1] == "claude"


def test_codex():
    start = plan(Client.codex, Server("http://h:1", 'm"x', 8192), "k", ["exec", "hi"])
    lines = [
        each for flag, each in zip(start.command[1:-2:2], start.command[2:-2:2], strict=True) if flag == "-c"
    ]
    found = tomllib.loads("\n".join(lines))
    assert found == {
        "model": 'm"x',
        "model_provider": "bough",
        "model_context_window": 8192,
        "model_providers": {
            "bough": {
                "name": "Bough",
                "base_url": "http://h:1/v1",
                "wire_api": "responses",
                "env_key": "BOUGH_API_KEY",
            }
        },
    }
    assert start.variables == {"BOUGH_API_KEY": "k"} and start.command[-2:] == ["exec", "hi"]


def test_opencode():
    start = plan(Client.opencode, Server("http://h:1", "m", 8192), "k", [])
    settings = json.loads(start.variables["OPENCODE_CONFIG_CONTENT"])
    provider, model = settings["model"].split("/")
    assert settings["small_model"] == settings["model"]
    assert settings["provider"][provider]["options"] == {"baseURL": "http://h:1/v1", "apiKey": "k"}
    models = settings["provider"][provider]["models"]
    assert models == {model: {"name": "m", "limit": {"context": 8192, "output": 4096}}}
    unknown = plan(Client.opencode, Server("http://h:1"), "k", []).variables["OPENCODE_CONFIG_CONTENT"]
    assert "limit" not in unknown and "image" not in unknown
    seeing = plan(Client.opencode, Server("http://h:1", sees=True), "k", []).variables[
        "OPENCODE_CONFIG_CONTENT"
    ]
    assert '"modalities": {"input": ["text", "image"], "output": ["text"]}' in seeing


def test_aider():
    start = plan(Client.aider, Server("http://h:1", "m"), "k", ["--yes"])
    assert start.command == ["aider", "--model", "openai/m", "--yes"]
    assert start.variables == {"OPENAI_API_BASE": "http://h:1/v1", "OPENAI_API_KEY": "k"}


def test_the_server_must_be_there(bough):
    result = bough("launch", "claude", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1 and result.stdout == ""
    assert "error: there is no server at 127.0.0.1:9" in result.stderr
    assert "hint: bough serve MODEL --port 9\n" in result.stderr


def test_printing_needs_no_server(bough):
    result = bough("launch", "aider", "--print", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 0
    assert shlex.split(result.stdout.splitlines()[-1]) == ["aider", "--model", "openai/bough"]


def test_a_server_that_loads_or_wants_a_key(bough):
    with ChatServer(echo, key="secret") as server:
        keyless = bough("launch", "codex", "--url", server.url)
        server.health = 503
        loading = bough("launch", "codex", "--url", server.url)
    assert "says 401: wrong key\nhint: --api-key KEY" in keyless.stderr
    assert "is still loading its model\nhint: try again in a while" in loading.stderr


@pytest.mark.parametrize("client", Client)
def test_agents_that_are_not_installed(bough, monkeypatch, client, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with ChatServer(echo) as server:
        result = bough("launch", client, "--url", server.url)
    assert result.exit_code == 1
    assert result.stderr == f"error: {client} is not installed\nhint: {INSTALL[client]}\n"
