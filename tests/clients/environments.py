"""Client libraries in environments of their own: installed once, kept for the next run."""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


class CannotInstall(Exception):
    """pip or npm failed; says why."""


@dataclass(frozen=True)
class Client:
    """A program, and the versions of the packages that it was tried with."""

    program: str
    packages: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.program.removeprefix("use_").split(".")[0]

    def installed(self, cache: Path) -> list[str]:
        """Return the command that runs the program; install its packages into a folder of `cache` first."""
        versions = " ".join([sys.version, *self.packages])
        folder = cache / f"{self.name}-{hashlib.sha256(versions.encode()).hexdigest()[:12]}"
        install = _with_npm if self.program.endswith(".mjs") else _with_pip
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            install(folder, self.packages)
            (folder / "complete").touch()
        if install is _with_pip:
            return [str(_python(folder)), str(PROGRAMS / self.program)]
        # Modules find packages in the folders above their own file alone.
        shutil.copytree(PROGRAMS, folder / "programs", dirs_exist_ok=True)
        return ["node", str(folder / "programs" / self.program)]


CLIENTS = [
    Client(
        "use_ai_sdk.mjs",
        (
            "ai@6.0.326",
            "@ai-sdk/openai@3.0.139",
            "@ai-sdk/openai-compatible@2.0.87",
            "@ai-sdk/anthropic@3.0.138",
            "zod@4.6.7",
        ),
    ),
    Client(
        "use_langchain.mjs",
        (
            "@langchain/core@1.2.13",
            "@langchain/openai@1.5.8",
            "@langchain/anthropic@1.5.11",
            "zod@4.6.7",
        ),
    ),
    Client("use_instructor.py", ("instructor[anthropic]==1.17.0", "openai==3.3.0")),
    Client(
        "use_pydantic_ai.py",
        ("pydantic-ai-slim[openai,anthropic]==2.66.0", "openai==3.49.0", "anthropic==2.8.0"),
    ),
    Client("use_openai_agents.py", ("openai-agents==0.24.0", "openai==3.49.0")),
    Client(
        "use_llama_index.py",
        (
            "llama-index-core==0.14.25",
            "llama-index-llms-openai==0.8.3",
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-llms-anthropic==0.12.3",
            "openai==2.54.0",
            "anthropic==0.125.0",
        ),
    ),
    Client("use_ollama.py", ("ollama==0.6.3",)),
    Client("use_continue.mjs", ("@continuedev/cli@1.5.47", "zod@4.6.7")),
    # litellm imports mcp as soon as a request has tools.
    Client("use_dspy.py", ("dspy==3.4.1", "litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0")),
]


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _with_pip(folder: Path, packages: tuple[str, ...]) -> None:
    _run("venv", [sys.executable, "-m", "venv", str(folder)])
    _run("pip", [str(_python(folder)), "-m", "pip", "install", "--quiet", *packages])


def _with_npm(folder: Path, packages: tuple[str, ...]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise CannotInstall("npm is not on the path")
    _run("npm", [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages])


def _run(tool: str, command: list[str]) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired as error:
        raise CannotInstall(f"{tool} cannot install: it took more than {error.timeout:.0f} s") from error
    if done.returncode != 0:
        raise CannotInstall(f"{tool} cannot install: {done.stderr.strip()[-500:]}")
