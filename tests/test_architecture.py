"""The pages about the code name what is there, and a class holds one idea."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bough"
PAGES = ("docs/architecture.md", "docs/glossary.md", "docs/images/request.svg")
MOST_METHODS = 25
# Classes that still hold two ideas: this list only gets shorter.
TOO_MANY = {"EngineWorker": 27, "WeightLoader": 27}

_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*(\.(py|cu|c|h|toml)|/)")
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)?(?=\(|$)")


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(SOURCE.rglob("*.py"))]


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


@cache
def members() -> dict[str, set[str]]:
    """Return the methods and fields of every class, with those of its bases."""
    found: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for _, node in classes():
        names = found.setdefault(node.name, set())
        bases.setdefault(node.name, []).extend(base.id for base in node.bases if isinstance(base, ast.Name))
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(part.name)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                names.add(part.target.id)
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                names.add(part.attr)

    def all_of(name: str) -> set[str]:
        return found.get(name, set()).union(*(all_of(base) for base in bases.get(name, [])))

    return {name: all_of(name) for name in found}


@cache
def words() -> set[str]:
    """Return every identifier, module, keyword of a literal and dictionary key of the package."""
    found = {part for path, _ in trees() for part in (*path.parts, path.stem)}
    for _, tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.Constant(value=str(text)):
                    found.add(text)
    return found


def names_of(page: str) -> set[str]:
    text = (ROOT / page).read_text()
    if page.endswith(".svg"):
        # Those with a dot are members of classes; others are words as well.
        return {name for line in re.findall(r">([^<>]+)<", text) for name in re.findall(r"\w+\.\w+", line)}
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def exists(name: str) -> bool:
    if _PATH.fullmatch(name):
        path = name.rstrip("/")
        return any((folder / path).exists() for folder in (SOURCE, ROOT)) or any(SOURCE.rglob(path))
    match = _NAME.match(name)
    if match is None or (match.end() != len(name) and not name.endswith(")")):
        return True  # a command, a formula, an HTTP path
    owner, _, attribute = match.group().partition(".")
    if attribute and owner in members():
        return attribute in members()[owner]
    return bool(attribute) or owner in words()


@pytest.mark.parametrize("page", PAGES)
def test_every_name_exists(page: str) -> None:
    names = names_of(page)
    assert len(names) > 20
    assert not sorted(name for name in names if not exists(name))


def test_a_wrong_name_is_seen() -> None:
    for name in ("Engine._decode_all", "NoSuchClass", "engine/no_such.py", "Drafter.propose", "no_such()"):
        assert not exists(name), name


def test_a_class_holds_one_idea() -> None:
    counts = {
        node.name: sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
        for _, node in classes()
    }
    many = {name: count for name, count in counts.items() if count > TOO_MANY.get(name, MOST_METHODS)}
    assert not many, f"more than {MOST_METHODS} methods: {many}"
    shorter = {name for name in TOO_MANY if counts.get(name, 0) <= MOST_METHODS}
    assert not shorter, f"no exception any more: {shorter}"
