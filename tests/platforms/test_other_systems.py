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


def test_python(environment):
    script = (
        "from bough import LLM, SamplingParams\n"
        "with LLM() as llm: print(llm.chat('def f(n):', SamplingParams(max_tokens=8)))\n"
    )
    result = run(environment, script, program=("-c",))
    assert result.returncode == 0 and "def" in result.stdout, result.stderr
