"""The number of CPU threads, and that a busy machine slows the program in proportion."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treeflash.errors import UsageError
from treeflash.session import threads


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
        threads.use_threads(wanted)
    assert raised.value.param == "threads"


LOAD = """
import sys, torch
torch.set_num_threads(2)  # as torch has by itself on two CPUs
from treeflash.session import threads
threads.idle_cpus = lambda: 0.3
threads.use_threads(None)
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(("given", "count"), [(None, "1"), ("2", "2")])
def test_busy_cpus_reduce_the_threads_unless_the_user_set_them(given: str | None, count: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": given} if given else {}
    result = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == count
    assert ("using 1 instead of 2 threads" in result.stderr) == (given is None)


def seconds(environment: dict[str, str]) -> float:
    command = [sys.executable, "-m", "treeflash.cli.main", "run", "--prompt", "Add two numbers.", "-n", "8"]
    start = time.monotonic()
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.monotonic() - start


def test_two_busy_processes_beside_it() -> None:
    """At most twice the time of one thread; threads that spin took five to eight times as long."""
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    burn = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(burn) for _ in range(2)]
    try:
        time.sleep(0.2)
        times = [(seconds(free), seconds(free | {"OMP_NUM_THREADS": "1"})) for _ in range(2)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert min(chosen for chosen, _ in times) <= 2 * min(one for _, one in times), times
