"""Compiles grammars in processes with a limit of time and memory, which can be ended: the library cannot.

`python -m bough.text.grammar_process` is such a process: it reads the vocabulary and then jobs, and writes
for each the grammar in the library's form, or why it cannot be used.
"""

import contextlib
import json
import mmap
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from bough.errors import Cancelled, Unavailable, UsageError
from bough.text.grammar import Grammar, GrammarCompiler, Vocabulary
from bough.text.grammar_jobs import (
    LOW_PRIORITY,
    POLL_S,
    STACK,
    GrammarJob,
    Resolved,
    SlowTurn,
    acquire,
    source_of,
    with_stack,
)

LIMIT_S = 3.0  # of the processor, to compile a grammar; 200 tools of five parameters take 0.15
WALL_S = 10.0  # the same beside other work
QUICK_S = 0.25  # then it goes on with a low priority, beside those of others
START_S = 60.0
MEMORY = 512 << 20  # beside the vocabulary's tables; the stack included
MAX_COMPILED = 128 << 20  # of a grammar in the memory of the server
_LENGTH = struct.Struct("<Q")


class GrammarProcesses:
    """At most two processes: one for grammars that are compiled at once, one for those that take long."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._quick, self._slow = threading.Lock(), SlowTurn()
        self._spare: _Process | None = None

    def start(self) -> None:
        """Start the first process, so that the first grammar need not wait for it."""
        with self._quick:
            self._renew()

    def resolve(self, job: str, cancelled: Callable[[], bool]) -> Resolved:
        """Return the library's form of a grammar, which has been compiled within the limits.

        Raise UsageError where it cannot be used, Cancelled once its client has left.
        """
        acquire(self._quick, cancelled)
        try:
            spare, self._spare = self._spare, None
            process = spare if spare is not None and spare.lives else _Process()
            process.begin(self._tokens)
            reply = process.ask(job, QUICK_S, cancelled)
            if reply is not None:
                self._spare = process
                return _resolved(reply)
            goes_on = self._slow.lock.acquire(blocking=False)
        finally:
            try:
                if self._spare is None:
                    self._renew()
            finally:
                self._quick.release()
        if goes_on:
            try:
                return _resolved(process.finish(cancelled), slow=True)
            finally:
                self._slow.lock.release()
        process.end()
        with self._slow.held(cancelled):
            process = _Process()
            process.begin(self._tokens)
            reply = process.ask(job, QUICK_S, cancelled)
            return _resolved(process.finish(cancelled) if reply is None else reply, slow=True)

    def _renew(self) -> None:
        self._spare = _Process()
        self._spare.begin(self._tokens)

    @cached_property
    def _tokens(self) -> bytes:
        vocabulary, ids = self._vocabulary, range(self._vocabulary.vocab_size)
        tokens = [vocabulary.token_bytes(id) for id in ids]
        controls = [id for id in ids if vocabulary.is_control(id)]
        return pickle.dumps((tokens, controls, vocabulary.stop_ids, vocabulary.eos_id))


class _Process:
    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "bough.text.grammar_process"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise Unavailable(f"no process can be started that compiles grammars: {error}") from error
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.end = weakref.finalize(self, _end, self._process)
        self._begun = self._ready = False

    def begin(self, vocabulary: bytes) -> None:
        if not self._begun:
            self._begun = True
            pipes = (self._process.stdin, self._process.stdout, vocabulary, self._replies)
            threading.Thread(target=_exchange, args=pipes, name="grammars", daemon=True).start()

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, job: str, limit_s: float, cancelled: Callable[[], bool]) -> Mapping[str, Any] | None:
        """Return the reply to a job, None if it takes longer."""
        if not self._ready:
            if self._reply(START_S, cancelled) is None:
                raise self._failure()
            self._ready = True
        assert self._process.stdin is not None
        try:
            _write(self._process.stdin, job.encode(errors="surrogatepass"))
        except OSError:
            raise self._failure() from None
        return self._reply(limit_s, cancelled)

    def finish(self, cancelled: Callable[[], bool]) -> Mapping[str, Any]:
        """Return the reply to the job that takes long, and end the process."""
        if hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, LOW_PRIORITY)
        try:
            reply = self._reply(WALL_S, cancelled)
        finally:
            self.end()
        if reply is None:
            raise _too_long()
        return reply

    def _reply(self, limit_s: float, cancelled: Callable[[], bool]) -> Mapping[str, Any] | None:
        end = time.monotonic() + limit_s
        while True:
            try:
                reply = self._replies.get(timeout=max(0.0, min(POLL_S, end - time.monotonic())))
            except queue.Empty:
                if cancelled():
                    self.end()
                    raise Cancelled("the client left before its grammar was compiled") from None
                if time.monotonic() >= end:
                    return None
                continue
            if reply is None:
                raise self._failure()
            return json.loads(reply)

    def _failure(self) -> Exception:
        """Return the error for a process that has ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        self.end()
        if not self._ready:
            return Unavailable(f"the process that compiles grammars has ended at its start, with {code}")
        if code == -getattr(signal, "SIGXCPU", 0):
            return _too_long()
        return UsageError(
            f"the grammar needs more than {MEMORY >> 20} MB of memory to be compiled, or"
            f" {STACK >> 20} MB of stack",
            "make it smaller",
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _exchange(
    to: IO[bytes], back: IO[bytes], vocabulary: bytes, replies: queue.SimpleQueue[bytes | None]
) -> None:
    """Write the vocabulary, then hand on all that comes back; None at its end."""
    with contextlib.suppress(OSError, ValueError):  # the process was ended
        _write(to, vocabulary)
        while (reply := _read(back)) is not None:
            replies.put(reply)
    replies.put(None)


def _resolved(reply: Mapping[str, Any], *, slow: bool = False) -> Resolved:
    if "source" not in reply:
        raise UsageError(reply["message"], reply["hint"], param=reply["param"])
    return Resolved(reply["source"], reply["bytes"], slow)


def _too_long() -> UsageError:
    return UsageError(f"the grammar takes over {LIMIT_S:.0f} s to compile", "make it smaller")


def _write(to: IO[bytes], content: bytes) -> None:
    to.write(_LENGTH.pack(len(content)) + content)
    to.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None


class _ProcessTokens:
    """The vocabulary in the process; it splits text into bytes, which is enough to compile."""

    def __init__(self, tokens: list[bytes], controls: list[int], stops: frozenset[int], eos: int | None):
        self._tokens, self._controls = tokens, frozenset(controls)
        self._bytes = {token: id for id, token in enumerate(tokens) if len(token) == 1}
        self.vocab_size, self.stop_ids, self.eos_id = len(tokens), stops, eos

    def token_bytes(self, id: int) -> bytes:
        return self._tokens[id]

    def is_control(self, id: int) -> bool:
        return id in self._controls

    def encode(self, text: str, *, special: bool = True, begins: bool = True) -> list[int]:
        pieces = (bytes([byte]) for byte in text.encode(errors="replace"))
        return [self._bytes[piece] for piece in pieces if piece in self._bytes]


def _memory() -> tuple[int, int]:
    """Return the bytes of address space and of memory that this process uses; zeros where nothing says."""
    try:
        text = Path("/proc/self/statm").read_text()
    except OSError:
        return 0, 0
    size, resident = (int(pages) * mmap.PAGESIZE for pages in text.split()[:2])
    return size, resident


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows: the time is limited
        return
    limit = _memory()[0] + MEMORY
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    try:
        import resource
    except ImportError:  # Windows: the owner ends it
        return
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + LIMIT_S) + 1, hard))


def _answer(text: str, compiler: GrammarCompiler) -> Mapping[str, Any]:
    try:
        job = GrammarJob.read(text)
        before = _memory()[1]
        source = source_of(job, compiler)
        state = compiler.state_of(source, job.answer or Grammar("lark"))
        used = max(0, _memory()[1] - before)
        del state
        if used > MAX_COMPILED:
            raise UsageError(
                f"the grammar takes {used >> 20} MB compiled; at most {MAX_COMPILED >> 20} can be used"
            )
        return {"source": source, "bytes": used}
    except UsageError as error:
        return {"message": error.message, "hint": error.hint, "param": error.param}
    except (RecursionError, MemoryError) as error:
        what = "nests too deep" if isinstance(error, RecursionError) else "needs too much memory"
        return {"message": f"the grammar {what} to be compiled", "hint": "make it smaller", "param": None}


def main() -> None:
    """Compile what the owner sends until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key pressed is for the owner
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as back:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        vocabulary = _read(sys.stdin.buffer)
        if vocabulary is None:
            return
        compiler = GrammarCompiler(_ProcessTokens(*pickle.loads(vocabulary)))
        compiler.warm()
        _limit_memory()
        _write(back, b"{}")
        while (job := _read(sys.stdin.buffer)) is not None:
            _limit_time()
            text = job.decode(errors="surrogatepass")
            reply = with_stack(lambda text=text: _answer(text, compiler))
            _write(back, json.dumps(reply).encode())


if __name__ == "__main__":
    main()
