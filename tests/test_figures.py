"""Figures of the pages are those of lines in benchmarks/results, and lines name commits of the history."""

import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
# Tables with figures that no run gives: what they describe, the test that holds them, or estimates.
OTHER_TABLES = {
    "README.md": {"card": "tests/memory/test_documented.py"},
    "docs/memory.md": {
        "card": "tests/memory/test_documented.py",
        "part": "tests/memory/test_planner.py",
        "K/V": "tests/memory/test_planner.py",
    },
    "docs/models.md": {
        "type": "tests/gguf/test_quantise.py",
        "family": "src/bough/hub/recommended.py",
        "where": "tests/memory/test_planner.py",
    },
    "docs/long-context.md": {
        "`--kv`": "tests/kernels/test_kv_cache.py",
        "K / V": "tests/kernels/test_kv_cache.py",
    },
    "docs/other-cards.md": {"card": "src/bough/bench/predict.py", "H200": "tests/bench/test_predict.py"},
    "docs/bough-40m.md": {"": "src/bough/pair/target.gguf"},
    "docs/training.md": {"": "estimates", "change": "estimates"},
    "docs/server.md": {"limit": "src/bough/server/image_urls.py"},
}
HISTORY = ("docs/cli.md", "docs/log.md")  # of no version
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
FIGURE = re.compile(r"[<~]?[\d.,]+(?:e-?\d+)?(?:%|x| [a-zA-Z/]+)?(?: ±.*| \(.*\)|[,;] .*| / .*)?")


@cache
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_figures", ROOT / ".ci" / "make_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_figures"] = module
    spec.loader.exec_module(module)
    return module


PAGES = [path.relative_to(ROOT).as_posix() for path in figures().PAGES]


def measured(table: str) -> bool:
    """Return whether figures fill most cells of a table, without its first column."""
    rows = [re.split(r"(?<!\\)\|", line.strip("|\n"))[1:] for line in table.splitlines()[2:]]
    cells = [cell.strip(" *") for row in rows for cell in row]
    return sum(bool(FIGURE.fullmatch(cell)) for cell in cells) > 0.4 * len(cells)


def header(table: str) -> str:
    return table.split("|")[1].strip()


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_what_their_lines_give(page: str) -> None:
    """`python .ci/make_figures.py` writes them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert figures().written(text) == text


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_a_table_of_figures_is_made_or_held_by_something_else(page: str) -> None:
    text = figures().BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    tables = [table for table in TABLE.findall(text) if measured(table)]
    held = OTHER_TABLES.get(page, {})
    assert sorted({header(table) for table in tables} - held.keys()) == []
    assert all(place == "estimates" or (ROOT / place).exists() for place in held.values())


SPEED = re.compile(r"[\d.,]+ (?:tok/s|tokens a second|ms|TB/s)\b")
SOURCE = re.compile(r"\.jsonl|results/|predict|published|\b[0-9a-f]{7}\b")


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_a_speed_in_a_sentence_names_its_line(page: str) -> None:
    """A file of results, a commit, a prediction, or who published it."""
    text = TABLE.sub("", figures().BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8")))
    paragraphs = re.split(r"\n\n+|\n(?=[-*] )", text)
    assert [part for part in paragraphs if SPEED.search(part) and not SOURCE.search(part)] == []


def test_every_table_that_can_be_made_is_shown() -> None:
    names = [match[2] for page in PAGES for match in figures().BLOCK.finditer((ROOT / page).read_text())]
    assert sorted(names) == sorted(figures().TABLES)


def test_what_a_table_of_figures_is() -> None:
    assert measured("| a | tok/s |\n|---|---|\n| plain | 153.3 ± 0.1 |\n| trees | 12.1 (3.9) |\n")
    assert not measured("| a | why |\n|---|---|\n| plain | 153 of them |\n| trees | it is faster |\n")


def heads(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the numbered lines that say where they come from: of `bough bench` only the run's."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if isinstance(lines[0].get("run"), dict):
        return [(1, lines[0]["run"])]
    return list(enumerate(lines, 1))


@cache
def history() -> list[str]:
    """Return the commits that can be checked out; none without a history."""
    command = ["git", "-C", str(ROOT), "rev-list", "HEAD"]
    shallow = subprocess.run(
        [*command[:3], "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if shallow.stdout.strip() != "false":
        return []
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def is_known(commit: str) -> bool:
    return any(full.startswith(commit) for full in history())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_new_lines_name_a_commit_of_the_history(path: Path) -> None:
    """A line that cannot be repeated proves nothing; those of before are listed in old-lines.toml."""
    old = figures().old_lines()
    lost, changed = (old[kind].get(path.stem, set()) for kind in ("lost", "changed"))
    plain = {number: str(line.get("commit", "")) for number, line in heads(path)}
    vague = {number for number, commit in plain.items() if not re.fullmatch("[0-9a-f]{7,40}", commit)}
    assert vague == changed
    if not history():
        pytest.skip("a copy without git's history")
    named = {commit for number, commit in plain.items() if number not in vague}
    unknown = {commit for commit in named if not is_known(commit)}
    assert {number for number, commit in plain.items() if commit in unknown} == lost


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_lines_name_no_place_of_a_machine(path: Path) -> None:
    places = re.findall(r'[" =](/(?:root|home|tmp|work)/[^" ]*)', path.read_text(encoding="utf-8"))
    assert places == []
