"""A `bough serve` of its own for a measurement."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

START_S = 300


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    ready_s: float
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(
    *arguments: object,
    ready: Callable[[dict[str, Any]], bool] = lambda health: True,
    ends: bool = False,
    **process: Any,
) -> Iterator[Served]:
    """Run a server with these arguments on a free port.

    ends: it may end before it is told to. process: how it is started (`subprocess.Popen`).
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bough", "serve", "--port", str(port), *map(str, arguments)]
    server, url, begin = subprocess.Popen(command, **process), f"http://127.0.0.1:{port}", time.perf_counter()
    try:
        while not _ready(url, ready):
            if server.poll() is not None or time.perf_counter() - begin > START_S:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield Served(url, time.perf_counter() - begin, server)
        if server.poll() is not None and not ends:
            raise SystemExit(f"the server has ended with {server.returncode}")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _ready(url: str, ready: Callable[[dict[str, Any]], bool]) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        state = httpx2.get(f"{url}/health", timeout=10)
        return state.status_code == 200 and ready(state.json())
    return False
