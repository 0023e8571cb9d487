"""What no linter counts: lines by package, names of classes and of locals, methods of a class."""

import ast
import importlib.util
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bough"
LIMITS = tomllib.loads((ROOT / ".ci" / "sizes.toml").read_text(encoding="utf-8"))
NO_NOUNS = {"each", "found", "own", "given", "kept", "wanted", "chosen", "made"}
SHORT = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def lines(package: str) -> int:
    spec = importlib.util.spec_from_file_location("sizes", ROOT / ".ci" / "sizes.py")
    assert spec is not None and spec.loader is not None
    sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sizes)
    return sizes.lines(package)


@cache
def nodes() -> list[ast.AST]:
    files = sorted(SOURCE.rglob("*.py"))
    return [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def test_every_package_has_a_limit() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and lines(path.name)}
    assert set(LIMITS["lines"]) == packages | {"workshop"}


@pytest.mark.parametrize("package", LIMITS["lines"])
def test_a_package_only_shrinks(package: str) -> None:
    """`python .ci/sizes.py` lowers the limits."""
    limit = LIMITS["lines"][package]["limit"]
    assert 0.97 * limit - 30 <= lines(package) <= limit


def test_class_names_are_unique() -> None:
    """A class may have the name of the one that it extends."""
    names = Counter(
        node.name
        for node in nodes()
        if isinstance(node, ast.ClassDef)
        and not any(isinstance(base, ast.Attribute) and base.attr == node.name for base in node.bases)
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_classes_have_few_methods() -> None:
    sizes = {
        node.name: sum(isinstance(part, FUNCTIONS) for part in node.body)
        for node in nodes()
        if isinstance(node, ast.ClassDef)
    }
    limits = LIMITS["methods"]
    assert {name: size for name, size in sizes.items() if size > limits.get(name, 25)} == {}


def test_locals_are_nouns() -> None:
    """`each` may be the variable of a comprehension or a lambda."""
    modules = [node for node in nodes() if isinstance(node, ast.Module)]
    uses = sum((_without_nouns(module) for module in modules), Counter[str]())
    assert uses.total() <= LIMITS["locals"]["without_nouns"], uses


def _without_nouns(node: ast.AST, allowed: frozenset[str] = frozenset()) -> Counter[str]:
    if isinstance(node, SHORT):
        allowed |= {"each"}
    names: Counter[str] = Counter()
    if isinstance(node, ast.Name | ast.arg):
        name = node.id if isinstance(node, ast.Name) else node.arg
        names[name] = name in NO_NOUNS and name not in allowed
    for child in ast.iter_child_nodes(node):
        names += _without_nouns(child, allowed)
    return names
