"""The worker of replicas: what happens to jobs when replicas die, and what is counted. No Ray is started."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from bough.deploy.replica import Order, ReplicaFacts
from bough.deploy.worker import ATTEMPTS, ReplicaLost, ReplicaWorker
from bough.engine.events import Failed
from bough.engine.sequence import Limits
from bough.engine.stats import RequestStats
from bough.errors import QueueFull, Unavailable, UsageError
from bough.session.events import Finished, Progress, Text
from bough.session.requests import TextRequest
from bough.session.worker import Job, State
from tests.server.scripted import ScriptedSession

pytestmark = pytest.mark.ray

Script = Callable[[], AsyncIterator[Any]]
DONE = Finished(reason="stop", tokens=[1], stats=RequestStats(prompt_tokens=3))
WHOLE = [[(0, Progress(0, 3))], [(0, Text("a"))], [(0, Text("b")), (0, DONE)]]


class Stream:
    def __init__(self, messages: AsyncIterator[Any]):
        self._messages, self.cancelled = messages, False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Stands for Serve's: every call of `generate` runs the next script."""

    def __init__(self, *scripts: list[Any]):
        self.scripts, self.orders, self.streams = list(scripts), [], []
        self.about = self.generate = self

    def options(self, **_options: Any) -> "Handle":
        return self

    def remote(self, order: Order | None = None) -> Any:
        if order is None:
            return self
        self.orders.append(order)
        self.streams.append(Stream(self._run(self.scripts.pop(0))))
        return self.streams[-1]

    async def _run(self, script: list[Any]) -> AsyncIterator[Any]:
        for step in script:
            if step == "wait":
                await asyncio.Event().wait()
            if isinstance(step, Exception):
                raise step
            yield step

    def result(self, timeout_s: float | None = None) -> ReplicaFacts:
        return ReplicaFacts(Limits(100, 100, 256), {})

    def broadcast(self, name: str) -> Any:
        return self

    def results(self, return_exceptions: bool) -> list[Any]:
        return []


def worker(handle: Handle, ended: list[Any], **options: Any) -> ReplicaWorker:
    found = ReplicaWorker(
        lambda: handle,
        lambda about: ScriptedSession(lambda request: []),
        ended=lambda job, result: ended.append(result),
        **{"max_queue": 4, **options},
    )
    found.start()
    assert found.ready.wait(10)
    return found


def request(**options: Any) -> TextRequest:
    return TextRequest(messages=[{"role": "user", "content": "Hello"}], **options)


async def text_of(job: Job) -> str:
    events = [event async for batch in job.batches() for _, event in batch]
    return "".join(event.text for event in events if isinstance(event, Text))


def answered(handle: Handle, ended: list[Any], **options: Any) -> str:
    """Return the text of one request."""
    replicas = worker(handle, ended)

    async def main() -> str:
        return await asyncio.wait_for(text_of(replicas.submit(request(**options), label="one")), 20)

    try:
        return asyncio.run(main())
    finally:
        replicas.close()


def test_events_are_forwarded_and_counted():
    ended: list[Any] = []
    handle = Handle(WHOLE)
    assert answered(handle, ended, affinity="mine") == "ab"
    assert [each.finished.reason for each in ended] == ["stop"]
    assert handle.orders[0].hint.session == "mine"
    assert handle.orders[0].requests[0].cancelled() is False


def test_a_replica_that_dies_before_the_text_is_replaced():
    ended: list[Any] = []
    assert answered(Handle([ActorDiedError()], [WHOLE[0], ActorDiedError()], WHOLE), ended) == "ab"
    assert len(ended) == 1


def test_a_replica_that_dies_in_the_text_ends_the_stream():
    ended: list[Any] = []
    handle = Handle([*WHOLE[:2], ActorDiedError()], WHOLE)
    with pytest.raises(ReplicaLost, match="writing this answer"):
        answered(handle, ended)
    assert len(handle.orders) == 1
    assert [type(each.error) for each in ended] == [ReplicaLost]


def test_an_answer_that_is_not_streamed_is_written_again():
    ended: list[Any] = []
    assert answered(Handle([*WHOLE[:2], ActorDiedError()], WHOLE), ended, streamed=False) == "ab"
    assert len(ended) == 1


def test_a_request_that_kills_every_replica_is_given_up():
    ended: list[Any] = []
    handle = Handle(*[[ActorDiedError()]] * (ATTEMPTS + 2))
    with pytest.raises(Unavailable):
        answered(handle, ended)
    assert len(handle.orders) == ATTEMPTS


def test_an_engine_that_failed_sends_the_request_elsewhere(monkeypatch):
    monkeypatch.setattr("bough.deploy.worker.RETRY_S", 0.0)
    assert answered(Handle([Failed(Unavailable("the GPU failed"))], WHOLE), []) == "ab"


def test_an_error_of_the_request_is_raised_as_it_is():
    handle = Handle([Failed(UsageError("max_tokens is 0", param="max_tokens"))], WHOLE)
    with pytest.raises(UsageError) as caught:
        answered(handle, [])
    assert caught.value.param == "max_tokens" and len(handle.orders) == 1


def test_cancelling_a_job_cancels_its_stream():
    ended: list[Any] = []
    handle = Handle([*WHOLE[:2], "wait"])
    replicas = worker(handle, ended)

    async def main() -> None:
        job = replicas.submit(request())
        async for batch in job.batches():
            if any(isinstance(event, Text) for _, event in batch):
                break
        assert (replicas.running, replicas.waiting) == (1, 0)
        job.cancel()
        with pytest.raises(Unavailable):
            await text_of(job)
        assert (replicas.running, replicas.waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(main(), 20))
    replicas.close()
    assert handle.streams[0].cancelled
    assert [each.finished.reason for each in ended] == ["cancelled"]


def test_the_queue_is_bounded():
    replicas = worker(Handle(["wait"], ["wait"]), [], max_queue=2)

    async def main() -> None:
        jobs = [replicas.submit(request()) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            replicas.submit(request())
        replicas.cancel_all()
        for job in jobs:
            with pytest.raises(Unavailable, match="stopping"):
                await text_of(job)

    asyncio.run(asyncio.wait_for(main(), 20))
    replicas.close()
    assert replicas.state is State.stopping


def test_what_prevents_the_start_is_told():
    def deploy() -> Any:
        raise UsageError("`ray_address` is nowhere")

    replicas = ReplicaWorker(deploy, lambda about: None, max_queue=1, ended=lambda job, result: None)
    replicas.start()
    assert replicas.ready.wait(10)
    assert replicas.state is State.failed and isinstance(replicas.failure, UsageError)
    with pytest.raises(Unavailable, match="nowhere"):
        _ = replicas.session
    replicas.close()
