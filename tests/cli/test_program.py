"""The program as a process of its own: start-up, pipes, signals, a terminal."""

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pyte
import pytest

PROGRAM = [sys.executable, "-m", "bough.cli.main"]
# The same, but what was imported is named on standard error at the end.
LISTING = "import sys, bough.cli.main as m\ntry: m.main()\nfinally: print(*sys.modules, file=sys.stderr)"
WATCHED = [sys.executable, "-c", LISTING]


@pytest.fixture
def environment() -> dict[str, str]:
    """One thread, so that other work on the same cores does not stall it; our sources, installed or not."""
    sources = str(Path(__file__).parents[2] / "src")
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": sources, "TERM": "xterm-256color"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]])
def test_help_is_quick_and_loads_no_torch(environment, arguments):
    times = []  # of the processor: the clock on the wall also counts what else the machine does
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([*PROGRAM, *arguments], env=environment, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.returncode == 0 and result.stdout
    assert min(times) < 0.5, times
    result = subprocess.run([*WATCHED, *arguments], env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and not {"torch", "huggingface_hub", "tokenizers"} & set(
        result.stderr.split()
    )


def test_show_loads_no_torch(environment, tiny_model):
    command = [*WATCHED, "show", str(tiny_model()), "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert json.loads(result.stdout)["architecture"] == "qwen35"
    assert "torch" not in result.stderr.split()


def test_managing_models_loads_no_torch(environment, tmp_path):
    command = [*WATCHED, "list", "--json"]
    environment |= {"HF_HOME": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert json.loads(result.stdout)["models"] == []
    assert "torch" not in result.stderr.split()


def test_piped_in_and_out(environment, tiny_model):
    command = [*PROGRAM, "run", str(tiny_model()), "-n", "20", "--no-think"]
    result = subprocess.run(command, env=environment, input="hello", capture_output=True, text=True)
    assert result.returncode == 0
    assert re.fullmatch(
        r"20 tok · [\d.,]+ tok/s · TTFT [\d.]+ s · prompt \d+ · accept [\d.]+/step"
        r" · length limit\n"
        r"No draft is known for this model: .*\n",
        result.stderr,
    )
    assert result.stdout.endswith("\n") and len(result.stdout) > 10 and "\x1b" not in result.stdout


# Prints a line when Python itself has started, which takes a time that depends on the machine.
STARTING = """
import contextlib, importlib, signal, threading, typing
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
print("started", flush=True)
from bough.cli.main import main
main()
"""


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.2, 0.4, 0.8])
@pytest.mark.parametrize("command", ["run", "serve", "show", "list"])
def test_interrupting_while_it_starts(environment, tiny_model, tmp_path, command, delay):
    arguments = {
        "run": ["run", str(tiny_model()), "hello"],
        "serve": ["serve", str(tiny_model()), "--port", "0"],
        "show": ["show", str(tiny_model())],
        "list": ["list"],
    }[command]
    with subprocess.Popen(
        [sys.executable, "-c", STARTING, *arguments],
        env=environment | {"HF_HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"started\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    ended = process.returncode
    # At its very end Python has no handlers any more; shells show that as 130, too.
    assert ended in (130, -signal.SIGINT) or (ended == 0 and (command == "serve" or delay > 0.2)), (
        ended,
        errors,
    )
    assert b"Traceback" not in errors and b"KeyboardInterrupt" not in errors


def start(environment, model, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*PROGRAM, "run", str(model), "-n", "4000", "hello", "--no-think", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_interrupting_keeps_what_was_written(environment, tiny_model):
    with start(environment, tiny_model()) as process:
        first = process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert len(first) == 5 and rest.endswith(b"\n")
    assert b"tok/s" in errors and b"interrupted\n" in errors and b"Traceback" not in errors


def test_interrupting_before_the_answer(environment, tiny_model):
    with start(environment, tiny_model(), "--json") as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and b"Traceback" not in errors
    found = json.loads(output)
    assert found.get("finish_reason") == "cancelled" or found["error"]["type"] == "Interrupted"


FULL = "error: cannot write the answer: No space left on device\n"
CLOSED = "error: cannot write the answer: standard output is closed\n"


@pytest.mark.parametrize(
    ("arguments", "code", "output", "errors"),
    [
        ("run {} hi --no-think -n 3 >/dev/full", 74, "", FULL),
        ("run {} hi --no-think -n 3 --json >/dev/full", 74, "", FULL),
        ("run {} hi -n 0 --json >/dev/full", 74, "", FULL),
        ("run {} hi --no-think -n 3 >&-", 74, "", CLOSED),
        ("run {} hi --no-think -n 3 --json >&- 2>&-", 74, "", ""),
        ("run {} hi --no-think -n 3 -q 2>&-", 0, ".+\n", ""),
        ("run {} hi --no-think -n 3 2>/dev/full", 0, ".+\n", ""),
        ("run nothing.gguf hi 2>&-", 3, "", ""),
        ("show {} >/dev/full", 74, "", FULL),
        ("--version >/dev/full", 74, "", FULL),
        ("run --help >&-", 74, "", CLOSED),
    ],
)
def test_streams_that_take_nothing(environment, tiny_model, arguments, code, output, errors):
    command = f"{shlex.join(PROGRAM)} {arguments.format(shlex.quote(str(tiny_model())))} <&-"
    result = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (code, errors)
    assert re.fullmatch(output, result.stdout, re.S)


def test_an_answer_that_outgrows_what_is_allowed(environment, tiny_model, tmp_path):
    program = shlex.join([*PROGRAM, "run", str(tiny_model()), "hi", "-n", "4000", "--no-draft", "--no-think"])
    command = f"ulimit -f 1; exec {program} >{shlex.quote(str(tmp_path / 'answer'))} </dev/null"
    # Nothing else may want to write a file: neither compiled sources nor step costs.
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (74, "error: cannot write the answer: File too large\n")
    assert (tmp_path / "answer").stat().st_size == 1024


@pytest.mark.parametrize("nothing", ["</dev/null", "<&-"])
def test_standard_input_that_holds_nothing(environment, tiny_model, nothing):
    command = shlex.join([*PROGRAM, "run", str(tiny_model()), "hi", "-n", "3", "-q", "--no-think"])
    result = subprocess.run(["sh", "-c", f"{command} {nothing}"], env=environment, capture_output=True)
    piped = subprocess.run(["sh", "-c", f"printf '' | {command}"], env=environment, capture_output=True)
    assert result.returncode == 0 and result.stderr == b""
    assert result.stdout == piped.stdout != b""


def test_a_table_whose_reader_goes_away(environment, tiny_model):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [*PROGRAM, "show", str(tiny_model())]
        result = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert result.returncode == 141 and result.stderr == b""


def test_a_reader_that_goes_away(environment, tiny_model):
    with start(environment, tiny_model()) as process:
        process.stdout.read(5)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141 and errors == b""


def test_on_a_terminal(environment, tiny_model):
    screen = pyte.Screen(120, 24)
    stream = pyte.ByteStream(screen)
    arguments = [*PROGRAM[1:], "run", str(tiny_model()), "hello", "--no-think"]
    arguments += ["-n", "40", "-t", "1", "--seed", "3"]
    child = pexpect.spawn(PROGRAM[0], arguments, env=environment, dimensions=(24, 120), timeout=60)
    seen_text_before_end = False
    while True:
        try:
            stream.feed(child.read_nonblocking(65536, timeout=60))
        except pexpect.EOF:
            break
        lines = [line.rstrip() for line in screen.display if line.strip()]
        seen_text_before_end |= bool(lines) and "tok/s ·" not in lines[-1]
    child.close()
    assert child.exitstatus == 0 and seen_text_before_end
    lines = [line.rstrip() for line in screen.display]
    last = max(index for index, line in enumerate(lines) if line) - 1
    if lines[last] == "length limit":
        lines[last - 1 : last + 1] = [f"{lines[last - 1]} · length limit"]
        last -= 1
    wanted = r"40 tok · .* · accept [\d.]+/step · seed 3 · length limit"
    assert re.fullmatch(wanted, lines[last]) and lines[last + 1].startswith("No draft is known")
    assert {screen.buffer[line][0].fg for line in (last, last + 1)} == {"brightblack"}
    assert lines[0] and not any("Starting" in line or "Loading" in line for line in lines)
    plain = subprocess.run(
        [*PROGRAM, *arguments[2:], "-q"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert "".join(lines[:last]).replace(" ", "") == plain.stdout.replace("\n", "").replace(" ", "")


def test_reasoning_is_dimmed_on_a_terminal_and_not_piped(environment, tiny_model):
    arguments = ["run", str(tiny_model()), "hello", "-n", "12", "--think"]
    screen = pyte.Screen(120, 24)
    child = pexpect.spawn(PROGRAM[0], [*PROGRAM[1:], *arguments], env=environment, dimensions=(24, 120))
    child.expect(pexpect.EOF, timeout=60)
    child.close()
    pyte.ByteStream(screen).feed(child.before)
    assert child.exitstatus == 0
    first = [cell for cell in screen.buffer[0].values() if cell.data.strip()]
    assert first and {cell.fg for cell in first} == {"brightblack"}
    assert "All 12 tokens were spent on reasoning" in "\n".join(screen.display)
    command = [*PROGRAM, *arguments]
    piped = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert piped.returncode == 0 and piped.stdout == ""
    reasoning = json.loads(
        subprocess.run(
            [*command, "--json"], env=environment, stdin=subprocess.DEVNULL, capture_output=True
        ).stdout
    )["reasoning"]
    assert "".join(cell.data for cell in first)[:5] in reasoning.replace(" ", "").replace("\n", "")
    assert reasoning[:8] not in piped.stderr


def test_errors_on_a_terminal_are_two_lines(environment, tmp_path):
    (tmp_path / "model-a.gguf").write_bytes(b"x")
    child = pexpect.spawn(
        PROGRAM[0],
        [*PROGRAM[1:], "run", "model-b.gguf", "hi"],
        env=environment,
        cwd=tmp_path,
        encoding="utf-8",
    )
    child.expect(pexpect.EOF)
    child.close()
    plain = re.sub(r"\x1b\[[\d;]*m", "", child.before or "")
    assert child.exitstatus == 3
    assert plain == "error: model-b.gguf: no such file\r\nhint: did you mean model-a.gguf?\r\n"
