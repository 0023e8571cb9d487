"""What the grammar of a request is compiled from, and the compiled ones that are kept."""

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from bough.errors import Cancelled, QueueFull, ResourceError, UsageError
from bough.text.grammar import Grammar, GrammarCompiler, Matcher
from bough.text.grammar_bounds import check_rules, check_schemas, check_text
from bough.text.tools import Syntax, Tool, call_grammar

MAX_KEPT = 128 << 20  # bytes of compiled grammars: agents send the same tools with every request
MAX_ENTRIES = 256
# As much memory as a chain of references within the bounds needs several times; 8 MB, or 0.5, is usual.
STACK = 64 << 20
_MIN_STACK = 8 << 20
MAX_SLOW = 8  # grammars that wait until a slow one is compiled
POLL_S = 0.02
LOW_PRIORITY = 10  # of what takes long, beside texts
_PER_CHARACTER = 64  # bytes of a compiled grammar per character of its source, where nothing else is known
_stack_size = threading.Lock()


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """The grammar of a text, of calls of tools, or of either."""

    answer: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    syntax: Syntax | None = None
    many: bool = False  # calls
    opened: bool = False  # the grammar begins after the tag that opens a call

    @property
    def field(self) -> str | None:
        return "tools" if self.answer is None else self.answer.field

    def check(self) -> None:
        """Raise UsageError unless it is within the bounds of what may be compiled."""
        schemas: dict[str, Any] = {f"the parameters of {tool.field}": tool.parameters for tool in self.tools}
        if self.answer is not None:
            value, name = self.answer.value, self.answer.field
            match self.answer.kind:
                case "json_schema":
                    schemas[name or "the JSON schema"] = value
                case "lark" | "gbnf" if isinstance(value, str):
                    check_rules(value, name)
                case "regex" if isinstance(value, str):
                    check_text(value, name)
        check_schemas(schemas)

    def written(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def read(text: str) -> "GrammarJob":
        fields = json.loads(text)
        answer, tools = fields.pop("answer"), fields.pop("tools")
        return GrammarJob(
            Grammar(**answer) if answer else None, tuple(Tool(**tool) for tool in tools), **fields
        )


def source_of(job: GrammarJob, compiler: GrammarCompiler) -> str:
    """Return the library's form of a job's grammar; raise UsageError with the tool that is at fault."""
    calls = None
    if job.tools:
        assert job.syntax is not None
        tools = [_checked(tool, job.syntax, compiler) for tool in job.tools]
        calls = call_grammar(tools, job.syntax, many=job.many, opened=job.opened)
    if job.answer is not None:
        return compiler.source(job.answer, calls=calls)
    assert calls is not None
    return compiler.source(calls)


def _checked(tool: Tool, syntax: Syntax, compiler: GrammarCompiler) -> Tool:
    """Return a tool whose parameters a grammar can represent; raise UsageError with its name."""
    try:
        parameters = compiler.prepare(tool.parameters, lenient=not tool.strict)
        prepared = replace(tool, parameters=parameters)
        compiler.check(call_grammar([prepared], syntax, many=False))
    except UsageError as error:
        hint = "leave the keyword out" + ", or `strict`" * tool.strict
        raise UsageError(
            f"the parameters of the tool {tool.name!r} cannot be enforced: {error.message}",
            hint,
            param=tool.field,
        ) from error
    return prepared


class Resolved(NamedTuple):
    """The library's form of a grammar, and what it took to compile it, as far as is known."""

    source: str
    bytes: int = 0
    slow: bool = False


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The library's matcher at the start of a grammar; of use in this process only."""

    state: Any
    compiler: GrammarCompiler
    param: str | None
    bytes: int
    opened: bool

    def matcher(self) -> Matcher:
        return self.compiler.matcher(self.state, self.param)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """Another process compiles its own."""


@dataclass(slots=True)
class Grammars:
    """Compiles the grammars of requests and keeps them, by what they are made of.

    resolve: `source_of` in another process, which can be ended; None: here, for requests of this program.
    """

    compiler: GrammarCompiler
    resolve: Callable[[str, Callable[[], bool]], Resolved] | None = None
    _kept: OrderedDict[bytes, CompiledGrammar | UsageError] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slow: "SlowTurn" = field(default_factory=lambda: SlowTurn())

    def compiled(self, job: GrammarJob, cancelled: Callable[[], bool] = lambda: False) -> CompiledGrammar:
        """Return the compiled grammar; raise UsageError where it cannot be used, Cancelled for no client."""
        try:
            job.check()
            text = job.written()
        except RecursionError as error:
            raise UsageError(f"{job.field or 'the grammar'} nests too deep", param=job.field) from error
        key = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        with self._lock:
            grammar = self._kept.get(key)
            if grammar is not None:
                self._kept.move_to_end(key)
        if grammar is None:
            try:
                grammar = self._compile(job, text, cancelled)
            except UsageError as error:
                grammar = error
            self._keep(key, grammar)
        if isinstance(grammar, UsageError):
            raise UsageError(grammar.message, grammar.hint, param=grammar.param or job.field)
        return grammar

    def _compile(self, job: GrammarJob, text: str, cancelled: Callable[[], bool]) -> CompiledGrammar:
        kind, resolved = job.answer or Grammar("lark", field=job.field), None
        if self.resolve is not None:
            threading.Thread(target=self.compiler.warm, name="tables", daemon=True).start()
            resolved = self.resolve(text, cancelled)
        if cancelled():
            raise Cancelled("the client left before its grammar was compiled")

        def here() -> CompiledGrammar:
            source, size, slow = resolved or Resolved(source_of(GrammarJob.read(text), self.compiler))
            with self._slow.held(cancelled) if slow else contextlib.nullcontext():
                if slow and sys.platform == "linux":  # where a thread has a priority of its own
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
                state = self.compiler.state_of(source, kind)
            size = max(size, 1024 + _PER_CHARACTER * len(source))
            return CompiledGrammar(state, self.compiler, kind.field, size, job.opened)

        return with_stack(here)

    def _keep(self, key: bytes, entry: CompiledGrammar | UsageError) -> None:
        with self._lock:
            replaced = self._kept.pop(key, None)
            self._kept[key] = entry
            self._bytes += _size(entry) - (_size(replaced) if replaced is not None else 0)
            while self._bytes > MAX_KEPT or len(self._kept) > MAX_ENTRIES:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= _size(oldest)


class SlowTurn:
    """Has what takes long wait for each other; refuses more where many do."""

    def __init__(self) -> None:
        self.lock, self._waiting = threading.Lock(), 0

    @contextlib.contextmanager
    def held(self, cancelled: Callable[[], bool]) -> Generator[None]:
        if self._waiting >= MAX_SLOW:
            raise QueueFull(
                f"{self._waiting} grammars wait to be compiled, at most {MAX_SLOW} can", "try again later"
            )
        self._waiting += 1
        try:
            acquire(self.lock, cancelled)
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self.lock.release()


def acquire(lock: threading.Lock, cancelled: Callable[[], bool]) -> None:
    while not lock.acquire(timeout=POLL_S):
        if cancelled():
            raise Cancelled("the client left before its grammar was compiled")


def _size(entry: CompiledGrammar | UsageError) -> int:
    return entry.bytes if isinstance(entry, CompiledGrammar) else 1024


def with_stack(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a thread whose stack holds any references within the bounds."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except Exception as error:
            if isinstance(error, RecursionError):
                error = UsageError("the grammar nests too deep to be compiled")
            outcome.append((None, error))

    thread = _started(run)
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _started(run: Callable[[], None]) -> threading.Thread:
    for size in (STACK, _MIN_STACK):  # a limit of the process's memory may leave no room
        thread = threading.Thread(target=run, name="grammar", daemon=True)
        with _stack_size:
            before = threading.stack_size(size)
            try:
                thread.start()
                return thread
            except RuntimeError:
                continue
            finally:
                threading.stack_size(before)
    raise ResourceError("there is no memory for a thread that compiles a grammar", "try again later")
