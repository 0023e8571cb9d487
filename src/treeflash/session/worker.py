"""The worker thread that owns a session and runs requests first in, first out.

Jobs are created and read in an asyncio loop; the thread produces their events. An error fails only
its own job.
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

IndexedEvent = tuple[int, SessionEvent]  # index of the job's request, event


class TextSession(Protocol):
    """The part of `Session` that the worker and the protocol adapters use."""

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
class RequestResult:
    """The end of one request of a job: either `finished` or `error` is set."""

    finished: Finished | None
    error: Exception | None
    waited_s: float  # in the queue
    took_s: float  # from leaving the queue to the end


class Job:
    """Requests that run one after the other and occupy one position in the queue."""

    def __init__(self, requests: Sequence[TextRequest], label: str, dequeue: Callable[["Job"], None]):
        self.requests = [replace(request, cancelled=self._is_cancelled) for request in requests]
        self.label = label
        self.ahead = 0  # jobs before this one when it was queued
        self.progress: Progress | None = None
        self.queued_at = time.perf_counter()
        self._dequeue = dequeue
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._wakeup = asyncio.Event()
        self._signalled = False
        self._events: deque[IndexedEvent] = deque()
        self._error: Exception | None = None
        self._ended = False

    async def batches(self, timeout_s: float | None = None) -> AsyncIterator[list[IndexedEvent]]:
        """Yield events in batches as they arrive, and an empty list after `timeout_s` without any.

        Raise the engine's error, if any, after the events that preceded it.
        """
        while True:
            try:
                await asyncio.wait_for(self._wakeup.wait(), timeout_s)
            except TimeoutError:
                yield []
                continue
            self._wakeup.clear()
            # Reset before draining: the thread signals again for any event added from here on.
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
        """End the job at the engine's next chunk or step, at once if it is still queued. Idempotent."""
        if not self._cancelled:
            self._cancelled = True
            self._dequeue(self)

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
            # The loop is closed: nobody reads the events.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wakeup.set)


class EngineWorker:
    def __init__(
        self,
        load: Loader,
        *,
        max_queue: int = 64,
        ended: Callable[[Job, RequestResult], None] = lambda job, result: None,
    ):
        """`ended` is called in the thread, once for each request that was started."""
        self._load = load
        self._max_queue = max_queue
        self._notify = ended
        self._session: TextSession | None = None
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.state = State.loading
        self.loaded: tuple[int, int] = (0, 0)  # tensors loaded, total
        self.failure: Exception | None = None
        self._failure_reason = "the model could not be loaded"
        self.ready = threading.Event()  # set when loading succeeded or failed

    def start(self) -> None:
        self._thread.start()

    @property
    def session(self) -> TextSession:
        """Return the session; raise Unavailable unless it is ready."""
        if self._session is not None and self.state is State.ready:
            return self._session
        if self.state is State.failed:
            reason = self.failure.message if isinstance(self.failure, TreeFlashError) else repr(self.failure)
            raise Unavailable(f"{self._failure_reason}: {reason}", retry_after_s=60)
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
        """Queue the requests as one job; call this in the loop that reads its events."""
        with self._changed:
            _ = self.session
            if len(self._waiting) >= self._max_queue:
                raise QueueFull(
                    f"{len(self._waiting)} requests are waiting, the queue holds {self._max_queue}",
                    "try again later, or raise `max_queue`",
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
        # Only a shutdown cancels a job that still has a reader.
        job.end(Unavailable("the server is stopping", retry_after_s=10))

    def cancel_all(self) -> None:
        for job in [*self._waiting, self._current]:
            if job is not None:
                job.cancel()

    def close(self, timeout_s: float = 30.0) -> None:
        """Accept no more requests, cancel all jobs and release the session."""
        with self._changed:
            self.state = State.stopping
            self._changed.notify()
        self.cancel_all()
        # Loading cannot be interrupted; the thread is a daemon and ends with the process.
        if self._thread.is_alive() and self.ready.is_set():
            self._thread.join(timeout_s)

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
        with self._changed:
            if self.state is State.loading:
                self.state = State.ready
        self.ready.set()
        while (job := self._next()) is not None:
            self._run(job)
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

    def _run(self, job: Job) -> None:
        assert self._session is not None
        for index, request in enumerate(job.requests):
            if request.cancelled():
                return job.end(Unavailable("the server is stopping", retry_after_s=10))
            started = time.perf_counter()
            finished, error = None, None
            try:
                for event in self._session.generate(request):
                    if isinstance(event, Finished):
                        finished = event
                    job.put(index, event)
            except Exception as caught:
                error = _translated(caught)
            now = time.perf_counter()
            try:
                self._notify(job, RequestResult(finished, error, started - job.queued_at, now - started))
            except Exception:
                log.exception("the result of %s could not be recorded", job.label)
            if error is not None:
                if _device_lost(error):
                    self._give_up(error)
                return job.end(error)
        job.end()

    def _give_up(self, error: Exception) -> None:
        """Fail the waiting jobs and accept no more: the process can no longer use its device."""
        with self._changed:
            self.failure, self.state = error, State.failed
            self._failure_reason = "the GPU failed; start the server again"
            waiting = list(self._waiting)
            self._waiting.clear()
        for job in waiting:
            job.end(Unavailable(f"{self._failure_reason}: {error}", retry_after_s=60))


def _device_lost(error: Exception) -> bool:
    """Return whether every further CUDA call will fail: all errors are sticky except out of memory."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _translated(error: Exception) -> Exception:
    if isinstance(error, TreeFlashError):
        return error
    log.error("the engine failed", exc_info=error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ResourceError("out of memory during the request", "shorten the conversation")
    return error
