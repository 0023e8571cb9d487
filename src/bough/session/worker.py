"""The worker thread that owns a session and runs requests, first come, first served, several at once.

Jobs are created and read in an asyncio loop; the thread produces their events, one step of the engine after
the other. An error fails only its own job.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from bough.engine.events import Failed
from bough.errors import BoughError, QueueFull, ResourceError, Unavailable
from bough.session.events import Finished, Progress, SessionEvent
from bough.session.reader import RequestReader
from bough.session.requests import TextRequest
from bough.session.session import Session

log = logging.getLogger(__name__)

MAX_PREFILLS = 8  # jobs for prefill alone that wait
_PAUSE_S = 0.1  # without a request, before idle time is used

IndexedEvent = tuple[int, SessionEvent]  # index of the job's request, event


Loader = Callable[[Callable[[int, int], None]], Session]


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
    """Requests that occupy one position in the queue and run side by side as far as there is room."""

    def __init__(self, requests: Sequence[TextRequest], label: str, dequeue: Callable[["Job"], None]):
        self.requests = [replace(request, cancelled=lambda: self._cancelled) for request in requests]
        self.label = label
        self.ahead = 0  # jobs before this one when it was queued
        self.progress: Progress | None = None
        self.queued_at = time.perf_counter()
        self.begun = 0  # requests
        self.live = 0  # requests begun that have not ended
        self.first: Any = None  # the first request's generation
        self._dequeue = dequeue
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._wakeup = asyncio.Event()
        self._signalled = False
        self._whole = False  # it is read at its end
        self._events: deque[IndexedEvent] = deque()
        self._error: Exception | None = None
        self._ended = False

    async def batches(
        self, timeout_s: float | None = None, *, whole: bool = False
    ) -> AsyncIterator[list[IndexedEvent]]:
        """Yield events in batches as they arrive, and an empty list after `timeout_s` without any.

        Raise the engine's error, if any, after the events that preceded it. `whole`: all of them at the end;
        a reader that wakes up for every step takes time from the engine's thread.
        """
        self._whole = whole
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

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def prefill_only(self) -> bool:
        """Return whether it runs only while there is nothing else to do, beside the others."""
        return self.requests[0].prefill_for_s is not None

    def put(self, index: int, event: SessionEvent) -> None:
        """Add an event; `wake` then tells the readers of all jobs that have new ones."""
        if isinstance(event, Progress):
            self.progress = event
        self._events.append((index, event))

    def end(self, error: Exception | None = None) -> None:
        if self._ended:
            return
        self._error, self._ended = error, True
        self._signalled = False
        self.wake([self])

    @staticmethod
    def wake(jobs: Iterable["Job"]) -> None:
        """Tell the readers of some jobs that there are events: once a loop, since each call interrupts it."""
        loops: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for job in jobs:
            if not job._signalled and (job._ended or not job._whole):
                job._signalled = True
                loops.setdefault(job._loop, []).append(job._wakeup)
        for loop, wakeups in loops.items():
            # The loop is closed: nobody reads the events.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_set_all, wakeups)


@dataclass(frozen=True, slots=True)
class _Running:
    job: Job
    index: int
    started: float


class Turns:
    """A lock that is given in the order in which threads ask for it: no busy worker starves another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._served = 0

    def __enter__(self) -> None:
        with self._changed:
            mine, self._asked = self._asked, self._asked + 1
            self._changed.wait_for(lambda: self._served == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()


Ended = Callable[[Job, RequestResult], None]


class Worker(Protocol):
    """What runs a server's requests: the engine's thread of this process, or replicas in others."""

    ready: threading.Event  # set when loading succeeded or failed
    failure: Exception | None
    loaded: tuple[int, int]  # tensors loaded, total

    @property
    def state(self) -> State: ...
    @property
    def session(self) -> RequestReader: ...
    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    def start(self) -> None: ...
    def check_room(self, *, prefill_only: bool = False) -> None: ...
    def submit(self, *requests: TextRequest, label: str = "") -> Job: ...
    def cancel_all(self) -> None: ...
    def refuse(self) -> None:
        """Take no more requests and refuse those that wait; those that run go on."""
        ...

    def close(self) -> None: ...
    def describe(self) -> Mapping[str, Any]: ...
    async def refresh(self) -> None:
        """Bring up to date what the other members return."""
        ...


class EngineWorker:
    def __init__(
        self,
        load: Loader,
        *,
        max_queue: int = 64,
        ended: Ended = lambda job, result: None,
        turn: contextlib.AbstractContextManager[Any] | None = None,
    ):
        """`ended` is called in the thread, once for each request that was started.

        turn: held while something is computed, where several workers share a device.
        """
        self._load = load
        self._turn = contextlib.nullcontext() if turn is None else turn
        self._max_queue = max_queue
        self._notify = ended
        self._session: Session | None = None
        self._waiting: deque[Job] = deque()  # with requests that have not begun
        self._prefills: deque[Job] = deque()  # for prefill alone
        self._running: dict[Any, _Running] = {}  # by generation
        self._submitted: list[Job] = []  # that had not ended when the last one was submitted
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._state = State.loading
        self._refuses = False
        self.loaded: tuple[int, int] = (0, 0)  # bytes read, total
        self.failure: Exception | None = None
        self._failure_reason = "the model could not be loaded"
        self.ready = threading.Event()  # set when loading succeeded or failed

    @property
    def state(self) -> State:
        return self._state

    def start(self) -> None:
        self._thread.start()

    @property
    def session(self) -> Session:
        if self._session is not None and self.state is State.ready:
            return self._session
        if self.state is State.failed:
            reason = self.failure.message if isinstance(self.failure, BoughError) else repr(self.failure)
            raise Unavailable(f"{self._failure_reason}: {reason}", retry_after_s=60)
        if self.state is State.stopping:
            raise Unavailable("the server is stopping", retry_after_s=10)
        done, total = self.loaded
        raise Unavailable(f"the model is being loaded: {done / max(1, total):.0%} read", retry_after_s=2)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._prefills) + max(0, len(self._running) - self.running)

    @property
    def running(self) -> int:
        session, begun = self._session, len(self._running)
        return min(begun, session.running) if session is not None else 0

    @property
    def busy(self) -> bool:
        return any(not job.ended for job in self._submitted)

    def check_room(self, *, prefill_only: bool = False) -> None:
        _ = self.session
        if self._refuses:
            raise stopping()
        if prefill_only and len(self._prefills) >= MAX_PREFILLS:
            raise QueueFull(
                f"{len(self._prefills)} requests for prefill alone are waiting, at most {MAX_PREFILLS} can",
                "try again later, or send the whole request",
            )
        if len(self._waiting) >= self._max_queue:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting, the queue holds {self._max_queue}",
                "try again later, or raise `max_queue`",
            )

    def submit(self, *requests: TextRequest, label: str = "") -> Job:
        with self._changed:
            job = Job(requests, label, self._drop)
            self.check_room(prefill_only=job.prefill_only)
            job.ahead = max(0, len(self._waiting) + len(self._running) + 1 - self.session.parallel)
            self._queue_of(job).append(job)
            self._changed.notify()
        self._submitted = [job, *(each for each in self._submitted if not each.ended)]
        return job

    def _drop(self, job: Job) -> None:
        with self._changed:
            if job not in self._queue_of(job):
                return
            self._queue_of(job).remove(job)
            if job.live:
                return
        job.end(stopping())

    def _queue_of(self, job: Job) -> deque[Job]:
        return self._prefills if job.prefill_only else self._waiting

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *self._prefills, *(each.job for each in list(self._running.values()))]

    def cancel_all(self) -> None:
        for job in self._jobs():
            job.cancel()

    def refuse(self) -> None:
        """Take no more requests and refuse those that wait; those that run go on."""
        self._refuses = True
        for job in [*self._waiting, *self._prefills]:
            if not job.begun:
                job.cancel()

    def close(self, timeout_s: float = 30.0) -> None:
        """Accept no more requests, cancel all jobs and release the session."""
        with self._changed:
            self._state = State.stopping
            self._changed.notify()
        self.cancel_all()
        # Loading cannot be interrupted; the thread is a daemon and ends with the process.
        if self._thread.is_alive() and self.ready.is_set():
            self._thread.join(timeout_s)

    async def refresh(self) -> None:
        pass

    def describe(self) -> Mapping[str, Any]:
        done, total = self.loaded
        return {
            "status": "ok" if self.state is State.ready else str(self.state),
            "progress": 1.0 if self.state is State.ready else done / total if total else 0.0,
            "waiting": self.waiting,
            "running": self.running,
            "parallel": self._session.parallel if self._session is not None else 0,
            "max_queue": self._max_queue,
        }

    def _work(self) -> None:
        try:
            with self._turn:
                self._session = self._load(self._on_load)
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            self.failure, self._state = error, State.failed
            self.ready.set()
            return
        with self._changed:
            if self.state is State.loading:
                self._state = State.ready
        self.ready.set()
        while self._has_work():
            with self._turn:
                self._begin_requests()
                self._step()
                # Each model plans memory for its own chunks alone.
                while self._session.amid_chunk:
                    self._begin_requests()
                    self._step()
        self._session, self._submitted = None, []

    def _on_load(self, done: int, total: int) -> None:
        self.loaded = (done, total)

    def _has_work(self) -> bool:
        """Wait until there is something to do; False: the thread ends."""
        assert self._session is not None
        if self.state is State.ready and (self._queued or not self._session.idle):
            return True
        with self._changed:  # a client's next request often follows at once
            self._changed.wait_for(lambda: self._queued or self.state is not State.ready, _PAUSE_S)
        while self.state is State.ready and self._session.idle and not self._queued and self._use_idle_time():
            pass
        with self._changed:
            if self._session.idle:
                self._changed.wait_for(lambda: self._queued or self.state is not State.ready)
        return self.state is State.ready or (self.state is State.stopping and not self._session.idle)

    def _use_idle_time(self) -> bool:
        assert self._session is not None
        try:
            with self._turn:
                return self._session.use_idle_time()
        except Exception as error:  # of any kind: requests can do without it
            log.error("work between requests failed", exc_info=error)
            if _device_lost(error):
                self._give_up(error)
            return False

    def _begin_requests(self) -> None:
        """Hand requests to the session, in order, while it has room."""
        assert self._session is not None
        while True:
            with self._changed:
                job = self._next_job()
                if job is None or self.state is not State.ready:
                    return
                index, job.begun, job.live = job.begun, job.begun + 1, job.live + 1
                if job.begun == len(job.requests):
                    self._queue_of(job).popleft()
            running = _Running(job, index, time.perf_counter())
            try:
                generation = self._session.begin(job.requests[index], beside=job.first)
            except Exception as error:
                self._end(running, None, _translated(error))
                continue
            job.first = job.first or generation
            self._running[generation] = running

    def _next_job(self) -> Job | None:
        """Return the job whose next request can begin: one for prefill alone at a time, beside the others."""
        assert self._session is not None
        prefills = sum(each.job.prefill_only for each in self._running.values())
        if self._waiting and len(self._running) - prefills < self._session.parallel:
            return self._waiting[0]
        return self._prefills[0] if self._prefills and not prefills else None

    @property
    def _queued(self) -> bool:
        return bool(self._waiting or self._prefills)

    def _step(self) -> None:
        assert self._session is not None
        try:
            events = self._session.step()
        except Exception as error:
            events = [(generation, Failed(error)) for generation in self._running]
            if not events:
                log.error("the engine failed after a request", exc_info=error)
            for generation in self._running:
                self._session.end(generation)
        readers: dict[Job, None] = {}  # of the events, in order
        for generation, event in events:
            running = self._running.get(generation)
            if running is None:
                continue
            if isinstance(event, Failed):
                del self._running[generation]
                self._end(running, None, _translated(event.error))
                continue
            running.job.put(running.index, event)
            readers[running.job] = None
            if isinstance(event, Finished):
                del self._running[generation]
                self._end(running, event, None)
        Job.wake(readers)

    def _end(self, running: _Running, finished: Finished | None, error: Exception | None) -> None:
        """Record the end of a request; the last one, or an error, ends its job."""
        job, now = running.job, time.perf_counter()
        waited = running.started - job.queued_at
        try:
            self._notify(job, RequestResult(finished, error, waited, now - running.started))
        except Exception:
            log.exception("the result of %s could not be recorded", job.label)
        job.live -= 1
        if error is not None:
            job.end(error)
            job.cancel()
            if _device_lost(error):
                self._give_up(error)
        elif not job.live and (job.begun == len(job.requests) or job not in self._waiting):
            job.end(None if job.begun == len(job.requests) else stopping())

    def _give_up(self, error: Exception) -> None:
        """Fail all other jobs and accept no more: the process can no longer use its device."""
        with self._changed:
            self.failure, self._state = error, State.failed
            self._failure_reason = "the GPU failed; start the server again"
            jobs = self._jobs()
            self._waiting.clear()
            self._prefills.clear()
            self._running.clear()
        for job in jobs:
            job.end(Unavailable(f"{self._failure_reason}: {error}", retry_after_s=60))


def _set_all(wakeups: Iterable[asyncio.Event]) -> None:
    for wakeup in wakeups:
        wakeup.set()


def stopping() -> Unavailable:
    """Return the error for the reader of a cancelled job: only a shutdown cancels one that has a reader."""
    return Unavailable("the server is stopping", retry_after_s=10)


def _device_lost(error: Exception) -> bool:
    """Return whether every further CUDA call will fail: all errors are sticky except out of memory."""
    text = str(error)  # torch's, that of our own launches, Triton's
    lost = any(part in text for part in ("CUDA error", "CUDA driver error 7", "illegal memory access"))
    return type(error).__name__ == "AcceleratorError" or lost


def _translated(error: Exception) -> Exception:
    if isinstance(error, BoughError):
        return error
    log.error("the engine failed", exc_info=error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ResourceError("out of memory during the request", "shorten the conversation")
    return error
