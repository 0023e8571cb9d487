"""Each command, and Python's door, on systems without a GPU that lack what Linux has."""

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
SYSTEMS = ["windows", "macos"]


@pytest.fixture(params=SYSTEMS)
def environment(request, tmp_path) -> dict[str, str]:
    return os.environ | {
        "LIKE": request.param,
        "PYTHONPATH": f"{HERE}{os.pathsep}{SOURCES}",
        "XDG_CACHE_HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture
def plain(tmp_path) -> dict[str, str]:
    """Give the environment of a program, whose system a test sets."""
    folders = dict.fromkeys(("XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME"), str(tmp_path))
    path = f"{HERE}{os.pathsep}{SOURCES}"
    return os.environ | folders | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def run(environment, *arguments: str, program=("-m", "bough"), stdin: str = ""):
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, input=stdin, timeout=120)


def test_the_hook_hides_what_it_should(environment):
    script = (
        "import os\n"
        "assert os.environ['LIKE'] != 'windows' or not hasattr(os, 'sysconf')\n"
        "for name in ['triton'] + ['fcntl', 'resource'] * (os.environ['LIKE'] == 'windows'):\n"
        "    try: __import__(name, globals())\n"
        "    except ModuleNotFoundError: continue\n"
        "    raise SystemExit(name)\n"
    )
    assert run(environment, script, program=("-c",)).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "seen"),
    [
        (["run", "-p", "def fibonacci(n):", "-n", "24", "--greedy"], "", "def fibonacci(n):"),
        (["chat", "-n", "8", "--set", "temperature=0"], "def fibonacci(n):\n/stats\n/bye\n", "```python"),
        (["bench", "builtin", "--prompts", "2", "-n", "8"], "", "pp512"),
        (["step"], "", "rows"),
        (["doctor"], "", "memory"),
        (["list"], "", "bough-40m"),
        (["show", "--fit", "--vram-limit", "2g"], "", "longest context"),
    ],
    ids=["run", "chat", "bench", "step", "doctor", "list", "show"],
)
def test_a_command(environment, arguments, stdin, seen):
    result = run(environment, *arguments, stdin=stdin)
    assert result.returncode == 0, result.stderr
    assert seen in result.stdout and "Traceback" not in result.stderr


def test_the_server(environment, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, "-m", "bough", "serve", "--port", "0"], env=environment, stderr=errors
        )
    try:
        end = time.monotonic() + 90
        while "answers at " not in log.read_text():
            assert server.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        address = log.read_text().split("answers at ")[1].split()[0]
        body = b'{"model": "m", "prompt": "def f(n):", "max_tokens": 4, "temperature": 0}'
        request = urllib.request.Request(
            f"{address}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            assert b'"completion_tokens":4' in answer.read()
    finally:
        server.terminate()
        assert server.wait(30) == 0


def test_the_background_needs_a_lock(environment):
    result = run(environment, "stop")
    if environment["LIKE"] == "windows":
        assert result.returncode == 2 and "without --daemon" in result.stderr
    else:
        assert result.returncode == 1 and "no server runs in the background" in result.stderr


def card_of(environment, system: str, *, triton: bool) -> dict[str, str]:
    """Return the environment of a system with a GPU, with Triton or without."""
    return environment | {"LIKE": system, "CARD": "1"} | ({"TRITON": "1"} if triton else {})


REFUSALS = {
    "windows": "hint: pip install triton-windows, or run in WSL2; --device cpu",
    "wsl2": "hint: pip install triton; --device cpu",
}


@pytest.mark.parametrize("system", REFUSALS)
@pytest.mark.parametrize(
    "command", [["run", "-p", "hi", "-n", "4"], ["serve", "--port", "0"]], ids=["run", "serve"]
)
def test_a_gpu_without_triton_is_refused_in_a_sentence(plain, command, system):
    result = run(card_of(plain, system, triton=False), *command)
    assert (
        result.returncode != 0 and "Traceback" not in result.stderr and "ModuleNotFound" not in result.stderr
    )
    assert "a GPU needs Triton, which is not installed" in result.stderr
    assert REFUSALS[system] in " ".join(result.stderr.split())


@pytest.mark.parametrize("system", REFUSALS)
def test_a_driver_and_a_pytorch_without_cuda(plain, system):
    """As `pip install` leaves it on Windows: the CPU computes, and a line says what to install where."""
    result = run(plain | {"LIKE": system, "DRIVER": "1"}, "run", "-p", "def f(n):", "-n", "8", "--greedy")
    seen = " ".join(result.stderr.split())
    assert result.returncode == 0, result.stderr
    assert (
        "an NVIDIA driver is here, but this PyTorch has no CUDA, so the CPU computes: pip install torch"
        in seen
    )
    assert ("then pip install triton-windows" in seen) == (system == "windows")
    doctor = run(plain | {"LIKE": system, "DRIVER": "1"}, "doctor")
    assert doctor.returncode == 0 and "The CPU works; the GPU was not tried, with 1 warning" in doctor.stdout


def test_a_gpu_without_triton_leaves_the_cpu(plain):
    environment = card_of(plain, "windows", triton=False)
    result = run(environment, "run", "--device", "cpu", "-p", "def fibonacci(n):", "-n", "24", "--greedy")
    assert result.returncode == 0 and "def fibonacci(n):" in result.stdout, result.stderr


@pytest.mark.parametrize("system", REFUSALS)
@pytest.mark.parametrize("triton", [True, False])
def test_doctor_and_list_with_a_gpu(plain, system, triton):
    """`doctor` says what is missing, with what helps; `list` needs neither."""
    environment = card_of(plain, system, triton=triton)
    result = run(environment, "doctor")
    seen = " ".join(result.stdout.split())
    assert "Traceback" not in result.stderr and result.returncode == 1  # nothing computes on this card
    assert "NVIDIA GeForce RTX 4090" in seen
    missing = "not installed: without it models run on the CPU alone"
    assert (missing in seen) != triton and ("gpu kernels all 22 fail" in seen) == triton
    assert triton or ("triton-windows" in seen) == (system == "windows")
    listed = run(environment, "list")
    assert listed.returncode == 0 and "qwen3.6-27b" in listed.stdout.lower()


@pytest.mark.parametrize("system", REFUSALS)
def test_doctor_without_a_gpu(plain, system):
    result = run(plain | {"LIKE": system}, "doctor")
    assert result.returncode == 0 and "only a GPU needs it" in " ".join(result.stdout.split()), result.stderr


def test_python(environment):
    script = (
        "from bough import LLM, SamplingParams\n"
        "with LLM() as llm: print(llm.chat('def f(n):', SamplingParams(max_tokens=8)))\n"
    )
    result = run(environment, script, program=("-c",))
    assert result.returncode == 0 and "def" in result.stdout, result.stderr
