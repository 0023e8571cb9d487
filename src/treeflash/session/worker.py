"""One thread that owns a session and answers requests in the order they came; knows no protocol.

Jobs are made and read in an asyncio loop, their events in the thread. An error fails the job that caused it
and nothing else.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from treeflash.engine.sampler import SamplingParams
from treeflash.errors import QueueFull, ResourceError, TreeFlashError, Unavailable
from treeflash.session.requests import Finished, Progress, SessionEvent, TextRequest

log = logging.getLogger(__name__)

Tagged = tuple[int, SessionEvent]  # which of the job's requests it belongs to


class TextSession(Protocol):
    """What the worker and the protocols need of `Session`."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def template(self) -> Any: ...
    @property
    def max_ctx(self) -> int: ...
    def sampling_for(self, thinking: bool | None) -> SamplingParams: ...
    def encode(self, request: TextRequest) -> list[int]: ...
    def generate(self, request: TextRequest) -> Iterator[SessionEvent]: ...


Loader = Callable[[Callable[[int, int], None]], TextSession]


class State(StrEnum):
    loading = "loading"
    ready = "ready"
    failed = "failed"
    stopping = "stopping"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request of a job ended: one of the two."""

    finished: Finished | None
    error: Exception | None
    waited_s: float  # in the queue
    took_s: float


class Job:
    """Requests that are answered one after the other, as one place in the queue."""

    def __init__(self, requests: Sequence[TextRequest], label: str, forget: Callable[["Job"], None]):
        self.requests = [replace(request, cancelled=self._is_cancelled) for request in requests]
        self.label = label
        self.ahead = 0  # jobs before it when it was queued
        self.progress: Progress | None = None
        self.queued_at = time.perf_counter()
        self._forget = forget
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._signalled = False
        self._events: deque[Tagged] = deque()
        self._error: Exception | None = None
        self._ended = False

    async def batches(self, patience_s: float | None = None) -> AsyncIterator[list[Tagged]]:
        """Events as they come, all there are at a time; an empty list when none came for so long.

        Raises what the engine raised, behind the events that came before it.
        """
        while True:
            try:
                await asyncio.wait_for(self._came.wait(), patience_s)
            except TimeoutError:
                yield []
                continue
            self._came.clear()
            # From here on the thread signals again, so that nothing that follows is missed.
            self._signalled = False
            ended = self._ended
            batch = []
            while self._events:
                batch.append(self._events.popleft())
            if batch:
                yield batch
            if ended:
                if self._error is not None:
                    raise self._error
                return

    def cancel(self) -> None:
        """Ends it at the engine's next chunk or step, at once if it still waits; any number of times."""
        if not self._cancelled:
            self._cancelled = True
            self._forget(self)

    def _is_cancelled(self) -> bool:
        return self._cancelled

    def put(self, index: int, event: SessionEvent) -> None:
        if isinstance(event, Progress):
            self.progress = event
        self._events.append((index, event))
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        self._error, self._ended = error, True
        self._signalled = False
        self._wake()

    def _wake(self) -> None:
        if not self._signalled:
            self._signalled = True
            # A loop that is closed has nobody left who reads.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._came.set)


class EngineWorker:
    def __init__(
        self,
        load: Loader,
        *,
        max_queue: int = 64,
        ended: Callable[[Job, Outcome], None] = lambda job, outcome: None,
    ):
        """`ended` is called in the thread, once for each request that was begun."""
        self._load = load
        self._max_queue = max_queue
        self._notify = ended
        self._session: TextSession | None = None
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.state = State.loading
        self.loaded: tuple[int, int] = (0, 0)  # tensors read so far, and all
        self.failure: Exception | None = None
        self._failed_at = "the model could not be loaded"
        self.ready = threading.Event()  # loaded, or failed to

    def start(self) -> None:
        self._thread.start()

    @property
    def session(self) -> TextSession:
        """Raises while there is none."""
        if self._session is not None and self.state is State.ready:
            return self._session
        if self.state is State.failed:
            reason = self.failure.message if isinstance(self.failure, TreeFlashError) else repr(self.failure)
            raise Unavailable(f"{self._failed_at}: {reason}", retry_after_s=60)
        if self.state is State.stopping:
            raise Unavailable("the server is stopping", retry_after_s=10)
        done, total = self.loaded
        raise Unavailable(f"the model is being loaded: {done} of {total} tensors", retry_after_s=2)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> bool:
        return self._current is not None

    def submit(self, *requests: TextRequest, label: str = "") -> Job:
        """Queues them as one job; called in the loop that will read its events."""
        _ = self.session
        with self._changed:
            if len(self._waiting) >= self._max_queue:
                raise QueueFull(
                    f"{len(self._waiting)} requests wait, the queue holds {self._max_queue}",
                    "try again later, or start the server with a larger --max-queue",
                )
            job = Job(requests, label, self._drop)
            job.ahead = len(self._waiting) + (self._current is not None)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def _drop(self, job: Job) -> None:
        with self._changed:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        # Whoever cancels does not read on; whoever still reads learns that the server ends.
        job.end(Unavailable("the server is stopping", retry_after_s=10))

    def cancel_all(self) -> None:
        for job in [*self._waiting, self._current]:
            if job is not None:
                job.cancel()

    def close(self, patience_s: float = 30.0) -> None:
        """Takes nothing more, cancels what is left and lets go of the session."""
        with self._changed:
            self.state = State.stopping
            self._changed.notify()
        self.cancel_all()
        # Loading cannot be broken off; the thread ends with the process.
        if self._thread.is_alive() and self.ready.is_set():
            self._thread.join(patience_s)

    def describe(self) -> Mapping[str, Any]:
        done, total = self.loaded
        return {
            "status": "ok" if self.state is State.ready else str(self.state),
            "progress": 1.0 if self.state is State.ready else done / total if total else 0.0,
            "waiting": self.waiting,
            "running": int(self.running),
            "max_queue": self._max_queue,
        }

    def _work(self) -> None:
        try:
            self._session = self._load(self._on_load)
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            self.failure, self.state = error, State.failed
            self.ready.set()
            return
        if self.state is State.loading:
            self.state = State.ready
        self.ready.set()
        while (job := self._next()) is not None:
            self._answer(job)
        self._session = None

    def _on_load(self, done: int, total: int) -> None:
        self.loaded = (done, total)

    def _next(self) -> Job | None:
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._waiting or self.state is not State.ready)
            if self.state is not State.ready:
                return None
            self._current = self._waiting.popleft()
            return self._current

    def _answer(self, job: Job) -> None:
        assert self._session is not None
        for index, request in enumerate(job.requests):
            if request.cancelled():
                return job.end(Unavailable("the server is stopping", retry_after_s=10))
            begun = time.perf_counter()
            finished, error = None, None
            try:
                for event in self._session.generate(request):
                    if isinstance(event, Finished):
                        finished = event
                    job.put(index, event)
            except Exception as caught:
                error = _in_our_words(caught)
            now = time.perf_counter()
            try:
                self._notify(job, Outcome(finished, error, begun - job.queued_at, now - begun))
            except Exception:
                log.exception("the end of %s could not be counted", job.label)
            if error is not None:
                if _device_lost(error):
                    self._give_up(error)
                return job.end(error)
        job.end()

    def _give_up(self, error: Exception) -> None:
        """The process cannot use its device any more: what waits is told so, and nothing more is taken."""
        with self._changed:
            self.failure, self.state = error, State.failed
            self._failed_at = "the GPU failed; start the server again"
            waiting = list(self._waiting)
            self._waiting.clear()
        for job in waiting:
            job.end(Unavailable(f"{self._failed_at}: {error}", retry_after_s=60))


def _device_lost(error: Exception) -> bool:
    """Whether every call to the device will fail from now on: CUDA's errors stick, but for lack of memory."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _in_our_words(error: Exception) -> Exception:
    if isinstance(error, TreeFlashError):
        return error
    log.error("the engine failed", exc_info=error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ResourceError("memory ran out while the request was answered", "shorten the conversation")
    return error
