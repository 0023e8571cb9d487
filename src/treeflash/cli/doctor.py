"""`treeflash doctor`: what this machine has, and whether it computes rightly."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import treeflash
from treeflash.cli import view

LIBRARIES = ("numpy", "safetensors", "tokenizers", "jinja2", "huggingface-hub", "typer", "rich")
LOW_DISK = 20 << 30  # a 27B model at four bits takes 17 GB
BROKEN = 1


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Literal["ok", "note", "warn", "fail"]
    detail: str
    hint: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at this machine: Python, PyTorch, GPU, memory, disk, model cache, and a test of the kernels.

    The exit code is 1 when something is broken. Having no GPU is not.
    """
    screen = view.Screen(quiet=as_json)
    found = []
    with screen.waiting("Looking around"):
        for part in (system, graphics, resources, models, kernels):
            found += part()
    broken = [check.name for check in found if check.status == "fail"]
    if as_json:
        view.print_json({"ok": not broken, "checks": [asdict(check) for check in found]})
    else:
        view.checks([(check.status, check.name, check.detail, check.hint) for check in found])
        view.plain(f"\n{len(broken)} broken: {', '.join(broken)}" if broken else "\nEverything works.")
    if broken:
        raise typer.Exit(BROKEN)


def system() -> Iterator[Check]:
    yield Check("treeflash", "ok", treeflash.__version__)
    yield Check("python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield Check("platform", "ok", f"{platform.platform()}, {os.cpu_count()} CPUs")
    for name in LIBRARIES:
        version = _version(name)
        if version is None:
            yield Check(name, "fail", "not installed", f"pip install {name}")
    yield Check("libraries", "ok", ", ".join(f"{name} {_version(name)}" for name in LIBRARIES))
