"""Coding agents from npm complete a turn with a tool call against our server, with a script for an engine.

Run with `pytest -m clients tests/server/test_npm_clients.py`; needs npm and a registry it can reach.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bough.session.events import Reasoning, Text, ToolArguments, ToolCall
from bough.session.requests import TextRequest
from tests.server.live import Live, scripted

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

COMMAND = "echo tree$((40 + 2))flash"
PROOF = "tree42flash"  # only a shell that ran the command can say it
PACKAGES = {
    "codex": "@openai/codex",
    "claude": "@anthropic-ai/claude-code",
    "opencode": "opencode-ai",
}
SHELLS = ("bash", "exec_command", "shell", "shell_command")
ARGUMENTS = {
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    "claude": ["-p", "--dangerously-skip-permissions", "--allowedTools", "Bash", "--"],
    "opencode": ["run"],
}


def shell_call(tools: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the tool that runs commands, and arguments that match its schema."""
    for tool in tools or ():
        function = tool["function"]
        if function["name"].lower() in SHELLS:
            properties = function["parameters"]["properties"]
            name = "cmd" if "cmd" in properties else "command"
            listed = properties[name].get("type") == "array"
            arguments: dict[str, Any] = {name: ["bash", "-lc", COMMAND] if listed else COMMAND}
            if "description" in properties:
                arguments["description"] = "Says something"
            return function["name"], arguments
    return None


def agent(request: TextRequest) -> Iterator[Any]:
    """Runs one command, then repeats what it printed."""
    results = [message for message in request.messages or () if message["role"] == "tool"]
    call = shell_call(request.tools)
    if results:
        yield Reasoning("It worked.")
        yield Text("The command printed: ")
        yield Text(PROOF if PROOF in json.dumps(results[-1]["content"]) else "something else")
    elif call is None:
        yield Text("A title")
    else:
        name, arguments = call
        yield Reasoning("I need the shell.")
        yield Text("I will run it.")
        yield ToolCall(0, "call_0a1b2c", name)
        text = json.dumps(arguments)
        yield ToolArguments(0, text[:9])
        yield 0.05
        yield ToolArguments(0, text[9:])


@pytest.fixture
def server() -> Iterator[Live]:
    with scripted(agent) as live:
        yield live


def install(client: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    assert npm, "npm is needed"
    folder.mkdir()
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), PACKAGES[client]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "node_modules/.bin"


def surroundings(home: Path, binaries: Path) -> dict[str, str]:
    """Return an environment with its own home directory, so that no user settings are read or written."""
    kept = {name: os.environ[name] for name in ("LANG", "TERM", "TMPDIR") if name in os.environ}
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    return {
        **kept,
        "HOME": str(home),
        "PATH": path,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "CODEX_HOME": str(home / ".codex"),
        "IS_SANDBOX": "1",
    }


@pytest.mark.parametrize("client", list(PACKAGES))
def test_a_turn_with_a_tool_call(client: str, server: Live, tmp_path: Path):
    binaries = install(client, tmp_path / "npm")
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".codex").mkdir(parents=True)
    work.mkdir()
    launch = [sys.executable, "-m", "bough.cli.main", "launch", client, "--url", server.url, "--"]
    done = subprocess.run(
        [*launch, *ARGUMENTS[client], f"Run {COMMAND}"],
        cwd=work,
        env=surroundings(home, binaries),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"The command printed: {PROOF}" in said
    results = [m for request in server.session.seen for m in request.messages or () if m["role"] == "tool"]
    assert any(PROOF in json.dumps(each["content"]) for each in results)
    server.settle()
