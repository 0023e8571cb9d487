"""What stops a server, or does not: signals in streams, kills, damaged snapshots, lost files, little memory.

    python -m workshop attack.faults

Each server is `bough serve` with a copy of the embedded pair on 127.0.0.1. Official clients read the streams
that a signal ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai

from workshop.attack.clients import PLAIN, attacked
from workshop.case import DRAFT, RESULTS, TARGET, case, environment
from workshop.report import Report
from workshop.serving import Served

TURN = [{"role": "user", "content": "Count from one to a thousand, in words."}]
LONG = {"messages": TURN, "max_tokens": 6000, "stream": True, "ignore_eos": True}
PROMPT = {**PLAIN, "messages": [{"role": "user", "content": "A text that is long enough to be kept. " * 60}]}


def answer(server: Served, body: dict[str, Any] = PROMPT) -> str:
    reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


@contextlib.contextmanager
def streams(server: Served) -> Iterator[dict[str, str]]:
    """Yield what three streams of official clients end with, once they have ended."""
    ends: dict[str, str] = {}
    openai_client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60)
    anthropic_client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=60)
    extra = {"ignore_eos": True}
    opened: dict[str, Callable[[], Any]] = {
        "chat": lambda: openai_client.chat.completions.create(
            model="x", messages=TURN, max_tokens=6000, stream=True, extra_body=extra
        ),
        "response": lambda: openai_client.responses.create(
            model="x", input=TURN, max_output_tokens=6000, stream=True, instructions="Never stop."
        ),
        "message": lambda: anthropic_client.messages.create(
            model="x", messages=TURN, max_tokens=6000, stream=True
        ),
    }
    begun = threading.Barrier(len(opened) + 1)

    def read(name: str) -> None:
        try:
            events = iter(opened[name]())
            next(events)
            begun.wait(60)
            last = [*events, None][-2]
            ends[name] = f"{getattr(last, 'type', 'end')}: {str(getattr(last, 'response', ''))[-400:]}"
        except Exception as error:
            ends[name] = f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}: {error}"

    threads = [threading.Thread(target=read, args=[name]) for name in opened]
    for thread in threads:
        thread.start()
    begun.wait(60)
    yield ends
    for thread in threads:
        thread.join(90)


def stopped(*signals: signal.Signals) -> bool:
    """Return whether each stream comes to its end, or ends with a typed error that says why."""
    with attacked("--parallel", 3, "--no-draft", "--threads", 1, ends=True) as server:
        with streams(server) as ends:
            for number in signals:
                server.process.send_signal(number)
                time.sleep(0.5)
        code = server.process.wait(60)
    print([one.name for one in signals], code, ends, flush=True)
    sound = (
        "openai.APIError: the server is stopping",
        "anthropic.APIStatusError",
        "end",
        "message_stop",
        "response.",
    )
    return code == 0 and len(ends) == 3 and all(end.startswith(sound) for end in ends.values())


def terminated() -> bool:
    return stopped(signal.SIGTERM)


def terminated_twice() -> bool:
    return stopped(signal.SIGTERM, signal.SIGTERM)


def interrupted() -> bool:
    return stopped(signal.SIGINT)


def frozen() -> bool:
    """A process that sleeps for 5 s goes on with its stream."""
    with attacked() as server:
        threading.Timer(0.3, server.process.send_signal, [signal.SIGSTOP]).start()
        threading.Timer(5.3, server.process.send_signal, [signal.SIGCONT]).start()
        begin, body = time.monotonic(), LONG | {"max_tokens": 400}
        reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        return reply.text.rstrip().endswith("data: [DONE]") and time.monotonic() - begin > 5


def killed_while_writing() -> bool:
    """Snapshots of a server that was killed four times do not change its answers."""
    with tempfile.TemporaryDirectory() as folder:
        texts = []
        for pause in (0.0, 0.05, 0.2, 0.5, None):
            with attacked("--prefix-cache-dir", folder, ends=True) as server:
                texts.append(answer(server))
                if pause is not None:
                    time.sleep(pause)
                    server.process.kill()
                    server.process.wait()
        return len(set(texts)) == 1


def damaged_snapshots() -> bool:
    """Halved, empty, folders, pipes, links: a server starts, and answers as before."""
    with tempfile.TemporaryDirectory() as folder:
        with attacked("--prefix-cache-dir", folder) as server:
            before = answer(server)
        paths = sorted(Path(folder).glob("*.snapshot"))
        damages: list[Callable[[Path, bytes], object]] = [
            lambda path, content: path.write_bytes(content[: len(content) // 2]),
            lambda path, content: path.write_bytes(b""),
            lambda path, content: path.mkdir(),
            lambda path, content: os.mkfifo(path),
            lambda path, content: path.symlink_to("/dev/zero"),
            lambda path, content: path.symlink_to("/nowhere"),
        ]
        for damage in damages:
            for path in paths:
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else b"x" * 999
                path.rmdir() if path.is_dir() else path.unlink()
                damage(path, content)
            with attacked("--prefix-cache-dir", folder) as server:
                if answer(server) != before:
                    return False
        return bool(paths)


def folder_is_removed() -> bool:
    folder = tempfile.mkdtemp()
    with attacked("--prefix-cache-dir", folder) as server:
        before = answer(server)
        shutil.rmtree(folder, ignore_errors=True)
        return answer(server) == before and bool(answer(server, PLAIN))


def shared_folder() -> bool:
    """Two servers and one small folder: no answer differs."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--prefix-cache-dir", folder, "--prefix-cache-dir-size", "8m")
        with attacked(*options) as first, attacked(*options) as second:
            bodies = [
                {**PROMPT, "messages": [{"role": "user", "content": f"Text {index % 5}. " * 120}]}
                for index in range(20)
            ]
            return all(answer(first, body) == answer(second, body) for body in bodies)


def broken_stderr() -> bool:
    read, write = os.pipe()
    with attacked(stderr=write) as server:
        os.close(read), os.close(write)
        return bool(answer(server, PLAIN)) and bool(answer(server, PLAIN))


def model_is_replaced() -> bool:
    """Truncated and replaced while it is served, a file does not change the answers."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(shutil.copy(TARGET, folder))
        with attacked(target, "--draft", DRAFT) as server:
            before = answer(server)
            target.unlink()
            target.write_bytes(b"another file")
            return answer(server) == before


def starts(*arguments: object, limit_kb: int = 0) -> tuple[int, str]:
    """Return exit code and messages of a server that cannot start."""
    command = f'ulimit -v {limit_kb}; exec "$@"' if limit_kb else 'exec "$@"'
    serve = [sys.executable, "-m", "bough", "serve", "--port", "0", *map(str, arguments)]
    process = subprocess.run(
        ["bash", "-c", command, "_", *serve], env=environment(), capture_output=True, text=True, timeout=120
    )
    return process.returncode, process.stderr[-2000:]


def refused_files() -> bool:
    """Each says what is wrong in a sentence, without a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        halved = Path(folder, "halved.gguf")
        halved.write_bytes(TARGET.read_bytes()[: TARGET.stat().st_size // 2])
        shallow = Path(folder, "shallow.gguf")
        content = bytearray(TARGET.read_bytes())
        at = content.index(b"qwen35.block_count") + len(b"qwen35.block_count") + 4
        content[at : at + 4] = (2).to_bytes(4, "little")
        shallow.write_bytes(content)
        pipe = Path(folder, "pipe.gguf")
        pipe.symlink_to("/nowhere")
        keys = Path(folder, "keys")
        keys.write_text("schlüssel\n")
        attempts = [
            (halved,),
            (shallow, "--no-draft"),
            (pipe,),
            ("--api-key-file", keys),
            ("--host", "0.0.0.0"),
        ]
        good = True
        for arguments in attempts:
            code, text = starts(*arguments)
            good &= 0 < code < 128 and "error: " in text and not _is_ours(text)
            print(code, text.strip().splitlines()[-2:], flush=True)
        return good


def little_memory() -> bool:
    code, text = starts(limit_kb=700_000)
    print(code, text.strip().splitlines()[-2:], flush=True)
    return 0 < code < 128 and "error: " in text and not _is_ours(text)


def key_file_with_comments() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys")
        path.write_text("# for the laptop\nfirst-key\n\n# old\nsecond-key\n")
        with attacked("--api-key-file", path) as server:
            right = [
                httpx2.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
                for key in ("first-key", "second-key", "# old", "x")
            ]
        return right == [200, 200, 401, 401]


def _is_ours(text: str) -> bool:
    return "Traceback" in text or "should not have happened" in text


CASES = (
    terminated, terminated_twice, interrupted, frozen, killed_while_writing, damaged_snapshots,
    folder_is_removed, shared_folder, broken_stderr, model_is_replaced, refused_files, little_memory,
    key_file_with_comments,
)  # fmt: skip


@case(out=RESULTS / "server_attack.jsonl")
def main(report: Report, *, cases: Sequence[str] = tuple(function.__name__ for function in CASES)) -> None:
    held = {}
    for function in CASES:
        if function.__name__ in cases:
            held[function.__name__] = function()
            print("PASS" if held[function.__name__] else "FAIL", function.__name__, flush=True)
    failed = [name for name, passed in held.items() if not passed]
    report.failed |= bool(failed)
    report.line(what="faults", cases=len(held), failed=failed)
