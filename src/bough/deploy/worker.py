"""The worker of a server whose requests run on replicas: it forwards jobs and reads their events.

A replica that dies before the client has anything of an answer is no error: the job goes to another one.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from bough.deploy.replica import Order, ReplicaFacts, ReplicaReport
from bough.deploy.routes import Hint
from bough.engine.events import Failed
from bough.engine.stats import RequestStats
from bough.errors import BoughError, QueueFull, Unavailable
from bough.session.events import Finished, Progress
from bough.session.reader import RequestReader
from bough.session.requests import TextRequest
from bough.session.worker import Ended, IndexedEvent, Job, RequestResult, State, stopping

log = logging.getLogger(__name__)

ATTEMPTS = 3  # replicas that a job may lose: it may be what they die of
RETRY_S = 1.0  # after an engine failed in a replica that lives: its health check is about to end it
REPORT_S = 5.0
CLOSE_S = 30.0
_POLL_S = 1.0


class ReplicaLost(Unavailable):
    """The replica of a request ended, and it could not be sent to another one."""


class ReplicaWorker:
    def __init__(
        self,
        deploy: Callable[[], DeploymentHandle],
        read: Callable[[ReplicaFacts], RequestReader],
        *,
        max_queue: int,
        ended: Ended,
        check: Callable[[], None] = lambda: None,
        undeploy: Callable[[], None] = lambda: None,
        pid: int | None = None,
    ):
        """`check` raises if the replicas can never start; `pid`: of the process that users know."""
        self._deploy, self._read, self._check, self._undeploy = deploy, read, check, undeploy
        self._max_queue, self._ended, self._pid = max_queue, ended, pid
        self._thread = threading.Thread(target=self._start, name="replicas", daemon=True)
        self._handle: DeploymentHandle | None = None
        self._reader: RequestReader | None = None
        self._stopping = self._refuses = False
        self._closed = threading.Event()
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self.about: ReplicaFacts | None = None
        self.reports: Sequence[ReplicaReport] = ()
        self.ready = threading.Event()
        self.loaded = (0, 0)  # replicas load, each in its process
        self.failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> State:
        """Return whether requests are answered: ready means that there is a replica."""
        if self._stopping:
            return State.stopping
        if self.failure is not None:
            return State.failed
        return State.ready if self._reader is not None and self.reports else State.loading

    @property
    def session(self) -> RequestReader:
        """Return what reads requests; a request may then wait for a replica."""
        if self._stopping:
            raise stopping()
        if self.failure is not None:
            reason = self.failure.message if isinstance(self.failure, BoughError) else repr(self.failure)
            raise Unavailable(f"no replica could be started: {reason}", retry_after_s=60)
        if self._reader is None:
            raise Unavailable("the first replica is being started", retry_after_s=2)
        return self._reader

    @property
    def waiting(self) -> int:
        return sum(job.progress is None for job in self._tasks)

    @property
    def running(self) -> int:
        return len(self._tasks) - self.waiting

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def check_room(self, *, prefill_only: bool = False) -> None:
        _ = self.session
        if self._refuses:
            raise stopping()
        # One for each replica: they hold a place there until it is idle.
        if prefill_only and sum(job.prefill_only for job in self._tasks) >= max(1, len(self.reports)):
            raise QueueFull(
                "every replica has a request for prefill alone", "try again later, or send the whole request"
            )
        if self.waiting >= self._max_queue:
            raise QueueFull(
                f"{self.waiting} requests are waiting, the queue holds {self._max_queue}",
                "try again later, or raise `max_queue`",
            )

    def submit(self, *requests: TextRequest, label: str = "") -> Job:
        job = Job(requests, label, self._drop)
        self.check_room(prefill_only=job.prefill_only)
        job.ahead = self.waiting
        forwarding = _Forwarding(job, self._ended)
        task = self._tasks[job] = asyncio.create_task(self._forward(job, forwarding))
        # Not inside the task: one that is cancelled at once never runs.
        task.add_done_callback(lambda task: self._finish(job, forwarding, task))
        return job

    def cancel_all(self) -> None:
        for job in list(self._tasks):
            job.cancel()

    def refuse(self) -> None:
        """Take no more requests and refuse those that wait; those that run go on."""
        self._refuses = True
        for job in [job for job in self._tasks if job.progress is None]:
            job.cancel()

    def close(self) -> None:
        """Accept no more requests and end the replicas that this process started."""
        self._stopping = True
        self._closed.set()
        self._thread.join(CLOSE_S)

    def describe(self) -> Mapping[str, Any]:
        names = ("replica", "pid", "parallel", "running", "waiting")
        return {
            "status": "ok" if self.state is State.ready else str(self.state),
            "progress": float(self._reader is not None),
            "waiting": self.waiting,
            "running": self.running,
            "parallel": sum(each.parallel for each in self.reports),
            "max_queue": self._max_queue,
            "replicas": [{name: getattr(each, name) for name in names} for each in self.reports],
        } | ({} if self._pid is None else {"pid": self._pid})

    def facts(self) -> Mapping[str, Any]:
        """Return properties of the model for /props, and the prefix caches of all replicas together."""
        assert self.about is not None
        caches = [each.prefix_cache for each in self.reports]
        together = {name: sum(each[name] for each in caches) for name in (caches[0] if caches else ())}
        return {**self.about.facts, "prefix_cache": together, "replicas": len(self.reports)}

    async def refresh(self) -> None:
        if self._handle is None or self._reader is None:
            return
        reports: list[Any] = []
        # One that does not answer in time may be busy: the last reports stay.
        with contextlib.suppress(TimeoutError):
            with contextlib.suppress(RayServeException):
                response = self._handle.broadcast("report")
                reports = await response.results_async(timeout_s=REPORT_S, return_exceptions=True)
            self.reports = _reports(reports)

    def _start(self) -> None:
        try:
            self._handle = self._deploy()
            self.about = self._ask(self._handle)
            self.reports = _reports(self._handle.broadcast("report").results(return_exceptions=True))
            self._reader = self._read(self.about)
        except Exception as error:
            self.failure = error
        self.ready.set()
        # The system ends Ray's processes with the thread that started them.
        self._closed.wait()
        self._undeploy()

    def _ask(self, handle: DeploymentHandle) -> ReplicaFacts:
        """Return what the first replica says, as soon as there is one."""
        response = handle.about.remote()
        while True:
            try:
                return response.result(timeout_s=_POLL_S)
            except TimeoutError:
                self._check()
                if self._stopping:
                    raise stopping() from None
            except RayError:
                response = handle.about.remote()

    def _drop(self, job: Job) -> None:
        if (task := self._tasks.get(job)) is not None:
            task.cancel()

    def _finish(self, job: Job, forwarding: "_Forwarding", task: asyncio.Task[None]) -> None:
        """End a job's reader, with the error if there was one."""
        del self._tasks[job]
        if task.cancelled():
            forwarding.cancelled()
            job.end(stopping())
        elif (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            forwarding.failed(error)
            job.end(error)
        else:
            job.end()

    async def _forward(self, job: Job, forwarding: "_Forwarding") -> None:
        """Pass a job's events on to their end; what its reader has nothing of yet is tried again."""
        order = _order(job)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._read_events(order, forwarding)
            except RayTaskError as error:
                raise error.as_instanceof_cause() from error
            except (RayError, Unavailable) as error:
                if isinstance(error, QueueFull) and job.prefill_only:
                    raise
                if forwarding.begun:
                    raise _lost("the replica that was writing this answer ended") from error
                if attempt == ATTEMPTS:
                    raise _lost(f"{attempt} replicas ended before this answer began") from error
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                log.warning("%s goes to another replica: %s", job.label, reason)
                forwarding.restart()
                if isinstance(error, Unavailable):
                    await asyncio.sleep(RETRY_S * attempt)

    async def _read_events(self, order: Order, forwarding: "_Forwarding") -> None:
        assert self._handle is not None
        stream = self._handle.options(stream=True).generate.remote(order)
        try:
            async for message in stream:
                if isinstance(message, Failed):
                    raise message.error
                forwarding.put(message)
        except BaseException:
            stream.cancel()
            raise
        forwarding.flush()


class _Forwarding:
    """Passes a job's events on; those of an answer that is not streamed only when it is complete."""

    def __init__(self, job: Job, ended: Ended):
        self._job, self._ended = job, ended
        self._streamed = all(each.streamed for each in job.requests)
        self._held: list[IndexedEvent] = []
        self._started: dict[int, float] = {}
        self._finished: set[int] = set()
        self.begun = False  # the reader has something of an answer

    def restart(self) -> None:
        self._held, self._started = [], {}

    def put(self, batch: list[IndexedEvent]) -> None:
        for index, event in batch:
            self._started.setdefault(index, time.perf_counter())
            if not self._streamed and not isinstance(event, Progress):
                self._held.append((index, event))
            else:
                self._pass_on(index, event)
        Job.wake([self._job])

    def flush(self) -> None:
        for index, event in self._held:
            self._pass_on(index, event)
        Job.wake([self._job])

    def failed(self, error: Exception) -> None:
        self._count(0, None, error)

    def cancelled(self) -> None:
        """Count the requests whose client has gone; their statistics are on the replica."""
        for index, request in enumerate(self._job.requests):
            if index not in self._finished:
                tokens = len(request.encoded.ids) if request.encoded is not None else 0
                stats = RequestStats(prompt_tokens=tokens)
                self._count(index, Finished(reason="cancelled", tokens=[], stats=stats), None)

    def _pass_on(self, index: int, event: Any) -> None:
        self.begun = self.begun or not isinstance(event, Progress)
        self._job.put(index, event)
        if isinstance(event, Finished):
            self._finished.add(index)
            self._count(index, event, None)

    def _count(self, index: int, finished: Finished | None, error: Exception | None) -> None:
        now = time.perf_counter()
        started = self._started.get(index, now)
        self._ended(self._job, RequestResult(finished, error, started - self._job.queued_at, now - started))


def _order(job: Job) -> Order:
    """Return the job without what stays in this process."""
    first = job.requests[0]
    ids = first.encoded.ids if first.encoded is not None else ()
    # `bool` is the shortest function that can be sent to another process and returns False.
    requests = tuple(replace(each, cancelled=bool) for each in job.requests)
    return Order(requests, job.label, Hint.of(first.affinity, ids))


def _reports(answers: Sequence[Any]) -> list[ReplicaReport]:
    """Return the reports, without the errors of replicas that are about to end."""
    return [each for each in answers if isinstance(each, ReplicaReport)]


def _lost(what: str) -> ReplicaLost:
    return ReplicaLost(what, "send the request again")
