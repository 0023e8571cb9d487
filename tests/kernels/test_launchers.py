"""What Triton gets wrong when several threads compile: launchers, and keys of its cache."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
from triton.runtime import build, jit

from bough.kernels.runtime import launchers
from bough.kernels.runtime.launchers import load_in_turn, settle_keys

LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *arguments) { return PyLong_FromLong(%d); }
static PyMethodDef METHODS[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "a_launcher", NULL, -1, METHODS};
PyMODINIT_FUNC PyInit_a_launcher(void) { return PyModule_Create(&MODULE); }
"""


def extensions(folder: Path, count: int) -> list[Path]:
    """Return C extensions of one name that return their number."""
    compiler = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    include = sysconfig.get_paths()["include"]
    if compiler is None or not Path(include, "Python.h").exists():
        pytest.skip("no C compiler, or no headers of Python")
    made = []
    for number in range(count):
        source, path = folder / f"{number}.c", folder / str(number) / "a_launcher.so"
        path.parent.mkdir()
        source.write_text(LAUNCHER % number)
        subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", source, "-o", path], check=True)
        made.append(path)
    return made


def test_threads_get_the_launchers_they_asked_for(tmp_path: Path) -> None:
    paths, wrong = extensions(tmp_path, 12), []
    with load_in_turn():  # what Triton calls is replaced
        pass

    def load_all(first: int) -> None:
        for place in range(5 * len(paths)):
            number = (first + place) % len(paths)
            module = build._load_module_from_path("a_launcher", str(paths[number]))
            wrong.extend([number] if module.launch() != number else [])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=load_all, args=[first]) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_one_module_takes_the_functions_of_the_next(tmp_path: Path) -> None:
    """Why launchers are kept apart: if this fails, Python no longer needs that."""
    first, second = extensions(tmp_path, 2)

    def load(path: Path):
        spec = importlib.util.spec_from_file_location("a_launcher", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    load(first)
    one = load(second)
    load(first)  # again
    assert one.launch() == 0, "the module of the second has the function of the first"


def test_keys_do_not_depend_on_the_order_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton 3.6 finds them: the constants of a function are known after its own key was asked for."""

    class Function:
        def __init__(self) -> None:
            self.constants: list[str] = []

        @property
        def cache_key(self) -> str:
            self.constants = ["LEVELS"]
            return "key"

    class Finder:
        def __init__(self) -> None:
            self.found: list[str] = []

        def _update_hash(self, function: Function) -> None:
            self.found += [*function.constants, function.cache_key]

    monkeypatch.setattr(jit, "DependenciesFinder", Finder)
    launchers._settle.cache_clear()
    try:
        settle_keys()
        helper, first, second = Function(), Finder(), Finder()
        first._update_hash(helper)
        second._update_hash(helper)
        assert first.found == second.found == ["LEVELS", "key"]
    finally:
        launchers._settle.cache_clear()


def test_kernels_have_one_key_in_every_order() -> None:
    """Both call a function with constants of its module; each order in a process of its own."""
    script = """
import sys
from bough.kernels.attention import triton_kernels as attention
from bough.kernels.kv_cache import triton_kernels as cache
from bough.kernels.runtime.launchers import settle_keys
settle_keys()
kernels = [attention._merge_kernel, cache._cache_kernel][:: int(sys.argv[1])]
print(sorted(kernel.cache_key for kernel in kernels))
"""
    keys = [
        subprocess.run(
            [sys.executable, "-c", script, order], capture_output=True, text=True, check=True
        ).stdout
        for order in ("1", "-1")
    ]
    assert keys[0] == keys[1] and len(keys[0]) > 100
