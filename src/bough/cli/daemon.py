"""A server in the background: its pid file, its log, and how it is stopped.

The server holds a lock on its pid file as long as it lives, so a stale file is never taken for a server.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from bough.cli import view
from bough.config import ServerConfig
from bough.errors import BoughError, UsageError
from bough.server.listen import bind
from bough.session.folders import state_folder

STOP_S = 45.0  # more than a server gives requests in progress
LOCK_S = 0.5  # `stop` holds a lock for a moment to see whether a server has it
TAIL = 12  # lines of the log that are shown when a start fails


class NotRunning(BoughError):
    """No such server is running."""


def start(config: ServerConfig, *, log_file: Path | None, screen: view.Screen) -> None:
    """Run the same command line without --daemon; return when its model is loaded."""
    check_system()
    if config.port == 0:
        raise UsageError("--daemon needs a port other than 0", "--port 8000")
    state_folder().mkdir(parents=True, exist_ok=True)
    pid_file = _pid_file(config.port)
    log_file = (log_file or state_folder() / f"serve-{config.port}.log").absolute()
    with contextlib.ExitStack() as stack:
        descriptor = os.open(pid_file, os.O_RDWR | os.O_CREAT, 0o600)
        stack.callback(os.close, descriptor)
        if not _lock(descriptor, wait_s=LOCK_S):
            raise UsageError(
                f"a server runs in the background on port {config.port} already",
                f"bough stop --port {config.port}, or --port N",
            )
        bind(config).close()
        try:
            log = stack.enter_context(log_file.open("ab"))
        except OSError as error:
            raise UsageError(f"--log-file {log_file} cannot be written: {error.strerror}") from error
        begun = log.tell()
        command = [sys.executable, "-m", "bough", *_without_daemon(sys.argv[1:])]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[descriptor],
        )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{child.pid}\n".encode())
        with screen.waiting("Loading in the background"):
            code = _wait(child, config)
        if code is not None:
            pid_file.unlink(missing_ok=True)
            with log_file.open("rb") as written:
                written.seek(begun)
                lines = written.read().decode(errors="replace").splitlines()[-TAIL:]
            raise _failed(code, "\n".join(lines), log_file)
    view.plain(f"{config.model_name} answers at {address(config.host, config.port)} (process {child.pid})")
    screen.note(f"log {log_file} · bough stop --port {config.port}")


def stop(port: int | None) -> str:
    """Stop a server; return a sentence that says what happened."""
    check_system()
    servers = dict(running())
    if port is None:
        if len(servers) > 1:
            raise UsageError(
                f"servers run on the ports {', '.join(map(str, sorted(servers)))}, needed one of them",
                "bough stop --port N",
            )
        port = next(iter(servers), None)
    if port is None or port not in servers:
        where = "" if port is None else f" on port {port}"
        others = f"; there are some on {', '.join(map(str, sorted(servers)))}" if servers else ""
        raise NotRunning(f"no server runs in the background{where}{others}", "bough serve --daemon")
    pid = servers[port]
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + STOP_S
    while _holder(_pid_file(port)) is not None:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            _pid_file(port).unlink(missing_ok=True)
            return f"The server on port {port} did not end within {STOP_S:.0f} s and was killed."
        time.sleep(0.05)
    _pid_file(port).unlink(missing_ok=True)
    return f"The server on port {port} has ended."


def running() -> list[tuple[int, int]]:
    """Return port and process of every server in the background; none where there can be none."""
    try:
        check_system()
    except UsageError:
        return []
    servers = []
    for path in state_folder().glob("serve-*.pid"):
        pid, port = _holder(path), path.stem.removeprefix("serve-")
        if pid is not None and port.isdigit():
            servers.append((int(port), pid))
    return servers


def _holder(path: Path) -> int | None:
    """Return the process that holds the file's lock."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if _lock(descriptor):
            return None
        text = os.read(descriptor, 32).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)


def check_system() -> None:
    """Raise where there is no lock that tells a running server from a file it left."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise UsageError(
            "this system has no servers in the background", "bough serve without --daemon"
        ) from None


def _lock(descriptor: int, *, wait_s: float = 0.0) -> bool:
    import fcntl

    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        else:
            return True


def _wait(child: subprocess.Popen[bytes], config: ServerConfig) -> int | None:
    """Return None when the child has loaded the model, else its exit code.

    Another program may have taken the port since it was found free: only the child's own answer counts.
    """
    # A server on this machine needs no proxy.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while child.poll() is None:
        try:
            with direct.open(f"{address(config.host, config.port)}/health", timeout=2) as answer:
                if json.load(answer).get("pid") == child.pid:
                    return None
        except (urllib.error.URLError, OSError, ValueError, AttributeError):
            pass
        time.sleep(0.1)
    return child.returncode


def _failed(code: int, log: str, path: Path) -> BoughError:
    error = BoughError(f"the server ended with code {code}; its log says:\n{log}", f"all of it: {path}")
    error.exit_code = code if 0 < code < 256 else 1
    return error


def address(host: str, port: int) -> str:
    """Return where a server can be reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _pid_file(port: int) -> Path:
    return state_folder() / f"serve-{port}.pid"


def _without_daemon(arguments: list[str]) -> list[str]:
    rest: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--log-file":
            skip = True
        elif argument != "--daemon" and not argument.startswith("--log-file="):
            rest.append(argument)
    return rest
