"""The number of CPU threads, and that a busy machine slows the program in proportion."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bough.errors import UsageError
from bough.session import threads


def stat(idle: int, busy: int) -> str:
    """Return /proc/stat with our CPUs at these ticks; half of the idle ones wait for a disk."""
    half = idle // 2
    lines = [f"cpu{cpu} {busy} 0 0 {half} {idle - half} 0 0 0 5 5" for cpu in os.sched_getaffinity(0)]
    return "\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "ctxt 12"])


@pytest.mark.parametrize(("idle", "busy", "share"), [(10, 0, 1.0), (0, 10, 0.0), (3, 1, 0.75), (0, 0, 1.0)])
def test_idle_cpus(tmp_path: Path, idle: int, busy: int, share: float) -> None:
    path = tmp_path / "stat"
    path.write_text(stat(100, 100))
    found = threads.idle_cpus(lambda _: path.write_text(stat(100 + idle, 100 + busy)) and None, path)
    assert found == pytest.approx(share * len(os.sched_getaffinity(0)))


def test_no_statistics(tmp_path: Path) -> None:
    assert threads.idle_cpus(lambda _: None, tmp_path / "none") is None
    (tmp_path / "odd").write_text("cpu0 what\n")
    assert threads.idle_cpus(lambda _: None, tmp_path / "odd") is None


@pytest.mark.parametrize(
    ("idle", "most", "count"), [(2, 2, 2), (1.6, 2, 2), (1.4, 2, 1), (0, 2, 1), (64, 8, 8), (5.2, 8, 5)]
)
def test_threads_for(idle: float, most: int, count: int) -> None:
    assert threads.threads_for(idle, most) == count


@pytest.mark.parametrize("wanted", [0, 1000])
def test_a_number_out_of_range(wanted: int) -> None:
    with pytest.raises(UsageError, match=rf"`threads` is {wanted}, needed 1 to \d+") as raised:
        threads.checked_threads(wanted)
    assert raised.value.param == "threads"


@pytest.mark.parametrize(("given", "count"), [(None, 1), ("2", 2)])
def test_busy_cpus_reduce_the_threads_unless_the_user_set_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str | None, count: int
) -> None:
    monkeypatch.setattr(threads, "idle_cpus", lambda: 0.3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    threads.torch_threads.cache_clear()
    try:
        assert threads.torch_threads(2) == count
    finally:
        threads.torch_threads.cache_clear()
    assert ("using 1 instead of 2 threads" in caplog.text) == (given is None)


def seconds(environment: dict[str, str], backend: str) -> float:
    prompt = ["--prompt", "Add two numbers.", "-n", "8", "--cpu-backend", backend]
    command = [sys.executable, "-m", "bough.cli.main", "run", *prompt]
    start = time.monotonic()
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.monotonic() - start


@pytest.mark.parametrize("backend", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_two_busy_processes_beside_it(backend: str) -> None:
    """At most twice the time of one thread; threads that spin took five to eight times as long."""
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    burn = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(burn) for _ in range(2)]
    try:
        time.sleep(0.2)
        one = free | {"OMP_NUM_THREADS": "1"}
        times = [(seconds(free, backend), seconds(one, backend)) for _ in range(2)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert min(chosen for chosen, _ in times) <= 2 * min(single for _, single in times), times
