"""The server as a program of its own, and the client programs that are run against it."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import CannotInstall, Client
from tests.server.test_program import PROGRAM, free_port, wait_for

# A client reads no settings of the user, and reaches the server without a proxy.
KEPT = ("PATH", "LANG", "SYSTEMROOT", "TMPDIR")


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`bough serve` with the pair inside the package."""
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    command = [*PROGRAM, "serve", "--port", str(port), "--device", "cpu", "--max-ctx", "4096", "--offline"]
    surroundings = {name: os.environ[name] for name in KEPT if name in os.environ} | {
        "HOME": str(folder),
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path(__file__).parents[2] / "src")),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=surroundings, stderr=log, text=True)
    try:
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
        assert server.poll() is None, (folder / "log").read_text()[-2000:]
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config) -> Path:
    """Where the environments are kept."""
    given = os.environ.get("BOUGH_CLIENTS")
    if given:
        return Path(given).resolve()
    assert pytestconfig.cache is not None, "without pytest's cache, BOUGH_CLIENTS must name a folder"
    return pytestconfig.cache.mkdir("clients")


@pytest.fixture(scope="session")
def results(
    url: str, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Client, list[str]], dict[str, Any]]:
    """Runs cases of a client's program in one process; they are run once a session."""
    known: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}

    def run(client: Client, cases: list[str]) -> dict[str, Any]:
        if client.name in missing:
            pytest.skip(missing[client.name])
        if client.name not in known:
            try:
                command = [*client.installed(cache), *cases]
            except CannotInstall as error:
                missing[client.name] = str(error)
                pytest.skip(str(error))
            home = tmp_path_factory.mktemp(client.name)
            surroundings = {name: os.environ[name] for name in KEPT if name in os.environ}
            surroundings |= {"HOME": str(home), "BOUGH_URL": url}
            known[client.name] = _lines(command, surroundings, home)
        return known[client.name]

    return run


def _lines(command: list[str], surroundings: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the line of each case, and under "" what else there was to see."""
    out, errors = folder / "out", folder / "errors"
    with out.open("w") as stdout, errors.open("w") as stderr:
        program = subprocess.Popen(command, env=surroundings, cwd=folder, stdout=stdout, stderr=stderr)
        try:
            program.wait(600)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines} | {"": errors.read_text()[-2000:]}
