"""A server in the background: whose answer counts as its own, and a lock that `stop` holds for a moment."""

import fcntl
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.cli import daemon
from bough.config import ServerConfig


@pytest.fixture
def stranger() -> Iterator[http.server.HTTPServer]:
    """A program that has taken the port and answers every request as if it were ready."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(self.server.answer).encode())  # ty: ignore[unresolved-attribute]

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.mark.parametrize("answer", [{"status": "ok"}, {"status": "ok", "pid": 1}, []])
def test_the_answer_of_another_program_is_not_believed(stranger, answer) -> None:
    stranger.answer = answer
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(7)"])
    assert daemon._wait(child, ServerConfig(port=stranger.server_port)) == 7


def test_the_answer_of_the_child_is(stranger) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stranger.answer = {"status": "ok", "pid": child.pid}
    try:
        assert daemon._wait(child, ServerConfig(port=stranger.server_port)) is None
    finally:
        child.kill()
        child.wait()


def test_a_lock_that_is_held_for_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "serve-1.pid"
    holder, other = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert not daemon._lock(other) and not daemon._lock(other, wait_s=0.05)
        threading.Timer(0.1, fcntl.flock, (holder, fcntl.LOCK_UN)).start()
        start = time.monotonic()
        assert daemon._lock(other, wait_s=5) and time.monotonic() - start < 4
    finally:
        os.close(holder)
        os.close(other)
