"""The worker thread: order, limits, cancellation, errors."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine

import pytest

from bough.errors import QueueFull, Unavailable, UsageError
from bough.session.events import Finished, Text
from bough.session.requests import TextRequest
from bough.session.worker import EngineWorker, Job, State
from tests.server.scripted import ScriptedSession


def ask(text: str) -> TextRequest:
    return TextRequest(messages=[{"role": "user", "content": text}])


async def text_of(job: Job) -> str:
    pieces = [event async for batch in job.batches() for _, event in batch]
    assert isinstance(pieces[-1], Finished)
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def slow(request):
    """Yield text until cancelled."""
    for index in range(1000):
        yield Text(f"{index} ")
        yield 0.005


def run(main: Coroutine, worker: EngineWorker) -> None:
    try:
        asyncio.run(asyncio.wait_for(main, 20))
    finally:
        worker.close()


def started(session: ScriptedSession, **options) -> EngineWorker:
    worker = EngineWorker(lambda _progress: session, **options)
    worker.start()
    assert worker.ready.wait(5)
    return worker


def test_jobs_run_in_order():
    order = []

    def script(request):
        order.append(request.messages[-1]["content"])
        yield Text(request.messages[-1]["content"])

    worker = started(ScriptedSession(script))

    async def main():
        jobs = [worker.submit(ask(str(index))) for index in range(20)]
        assert await asyncio.gather(*map(text_of, jobs)) == [str(index) for index in range(20)]

    run(main(), worker)
    assert order == [str(index) for index in range(20)]


def test_one_job_of_several_requests():
    worker = started(ScriptedSession(lambda request: [Text(request.messages[-1]["content"])]))

    async def main():
        job = worker.submit(ask("a"), ask("b"))
        pieces = [each async for batch in job.batches() for each in batch]
        assert [(index, event.text) for index, event in pieces if isinstance(event, Text)] == [
            (0, "a"),
            (1, "b"),
        ]

    run(main(), worker)


def test_a_reader_of_the_whole_is_woken_at_the_end():
    def script(request):
        for index in range(50):
            yield Text(f"{index} ")
            yield 0.01

    worker = started(ScriptedSession(script))

    async def main():
        batches = {}
        for whole in (False, True):
            job = worker.submit(ask("x"))
            batches[whole] = [batch async for batch in job.batches(whole=whole)]
        assert len(batches[True]) <= 2 < len(batches[False])  # one of them before it said so
        texts = [[event for batch in found for event in batch] for found in batches.values()]
        assert [event for _, event in texts[0][:-1]] == [event for _, event in texts[1][:-1]]

    run(main(), worker)


def test_a_cancelled_job_starts_no_more_requests():
    session = ScriptedSession(slow)
    worker = started(session)

    async def main():
        job = worker.submit(*(ask("x") for _ in range(5)))
        await asyncio.to_thread(session.busy.wait, 5)
        job.cancel()
        # A reader gets an error, because events are missing.
        with pytest.raises(Unavailable):
            async for _ in job.batches():
                pass
        assert len(session.seen) == 1 and session.cancelled == 1

    run(main(), worker)


def test_the_queue_is_bounded_and_drops_cancelled_jobs():
    session = ScriptedSession(slow)
    worker = started(session, max_queue=3)

    async def main():
        running = worker.submit(ask("first"))
        await asyncio.to_thread(session.busy.wait, 5)
        waiting = [worker.submit(ask("next")) for _ in range(3)]
        assert [job.ahead for job in waiting] == [1, 2, 3]
        with pytest.raises(QueueFull, match="3 requests are waiting, the queue holds 3"):
            worker.submit(ask("too many"))
        waiting[1].cancel()
        assert worker.waiting == 2
        another = worker.submit(ask("fits again"))
        for job in (running, *waiting, another):
            job.cancel()
            job.cancel()
        assert worker.waiting == 0
        while worker.running:
            await asyncio.sleep(0.005)
        assert session.cancelled == 1 and len(session.seen) == 1

    run(main(), worker)


def test_events_come_in_batches_and_timeouts_are_reported():
    def script(request):
        yield 0.15
        for index in range(500):
            yield Text(f"{index} ")

    worker = started(ScriptedSession(script))

    async def main():
        job = worker.submit(ask("x"))
        batches = [batch async for batch in job.batches(0.05)]
        assert [] in batches
        texts = [event.text for batch in batches for _, event in batch if isinstance(event, Text)]
        assert texts == [f"{index} " for index in range(500)]
        assert len(batches) < 500

    run(main(), worker)


def test_an_error_fails_only_its_job():
    ends = []

    def script(request):
        if request.messages[-1]["content"] == "bad":
            yield Text("so far")
            yield RuntimeError("broken")
        yield Text("fine")

    worker = started(
        ScriptedSession(script), ended=lambda job, outcome: ends.append((job.label, outcome.error))
    )

    async def main():
        bad = worker.submit(ask("bad"), label="one")
        good = worker.submit(ask("good"), label="two")
        seen = []
        with pytest.raises(RuntimeError, match="broken"):
            async for batch in bad.batches():
                seen += [event for _, event in batch]
        assert Text("so far") in seen
        assert await text_of(good) == "fine"

    run(main(), worker)
    assert [(label, type(error)) for label, error in ends] == [("one", RuntimeError), ("two", type(None))]


def test_unavailable_while_loading_and_after_a_failure():
    gate = threading.Event()

    def load(progress):
        progress(3, 12)
        gate.wait(5)
        raise UsageError("no such file")

    worker = EngineWorker(load)
    worker.start()

    async def main():
        while worker.loaded != (3, 12):
            await asyncio.sleep(0.005)
        assert worker.describe()["progress"] == 0.25
        with pytest.raises(Unavailable, match="25% read"):
            worker.submit(ask("x"))
        gate.set()
        await asyncio.to_thread(worker.ready.wait, 5)
        assert worker.state is State.failed
        with pytest.raises(Unavailable, match="no such file"):
            worker.submit(ask("x"))

    run(main(), worker)


def test_closing_cancels_running_and_waiting_jobs():
    session = ScriptedSession(slow)
    worker = started(session)

    async def main():
        jobs = [worker.submit(ask("x")) for _ in range(3)]
        await asyncio.to_thread(session.busy.wait, 5)
        start = time.monotonic()
        await asyncio.to_thread(worker.close)
        assert time.monotonic() - start < 2
        running = [event async for batch in jobs[0].batches() for _, event in batch]
        assert running[-1].reason == "cancelled"
        for job in jobs[1:]:
            with pytest.raises(Unavailable, match="stopping"):
                await text_of(job)
        with pytest.raises(Unavailable):
            worker.submit(ask("late"))

    run(main(), worker)


class AcceleratorError(RuntimeError):
    """Has the name of torch's exception."""


@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA driver error 700: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=["torch", "driver", "triton"],
)
def test_a_lost_device_fails_all_jobs(error: RuntimeError):
    begun = threading.Event()
    go_on = threading.Event()

    def script(request):
        begun.set()
        go_on.wait(5)
        raise error

    worker = started(ScriptedSession(script))

    async def main():
        broken = worker.submit(ask("a"))
        await asyncio.to_thread(begun.wait, 5)
        waiting = worker.submit(ask("b"))
        go_on.set()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await text_of(broken)
        with pytest.raises(Unavailable, match="the GPU failed; start the server again"):
            await text_of(waiting)
        assert worker.state is State.failed
        assert worker.describe()["status"] == "failed"
        with pytest.raises(Unavailable, match="illegal memory access"):
            worker.submit(ask("c"))

    run(main(), worker)


def test_a_request_error_leaves_the_worker_ready():
    def script(request):
        if request.messages[-1]["content"] == "a":
            raise RuntimeError("a shape is wrong")
        yield Text("b")

    worker = started(ScriptedSession(script))

    async def main():
        with pytest.raises(RuntimeError, match="a shape is wrong"):
            await text_of(worker.submit(ask("a")))
        assert await text_of(worker.submit(ask("b"))) == "b"

    run(main(), worker)


def test_an_error_between_requests_leaves_the_worker_ready():
    tried = threading.Event()

    class Failing(ScriptedSession):
        def use_idle_time(self) -> bool:
            tried.set()
            raise ValueError("a kernel does not compile")

    worker = started(Failing(lambda request: iter([Text("b")])))

    async def main():
        assert tried.wait(10)
        assert await text_of(worker.submit(ask("b"))) == "b"
        assert worker.state is State.ready

    run(main(), worker)


def test_requests_run_side_by_side_as_far_as_there_is_room():
    def script(request):
        for index in range(20):
            yield Text(f"{request.messages[-1]['content']}{index} ")
            yield 0.002

    session = ScriptedSession(script, parallel=3)
    worker = started(session)

    async def main():
        order: list[str] = []

        async def read(job: Job) -> None:
            async for batch in job.batches():
                order.extend(event.text[0] for _, event in batch if isinstance(event, Text))

        jobs = [worker.submit(ask(name)) for name in "abcd"]
        assert [job.ahead for job in jobs] == [0, 0, 0, 1]
        reading = [asyncio.create_task(read(job)) for job in jobs]
        while worker.running < 3:
            await asyncio.sleep(0.001)
        assert (worker.waiting, worker.describe()["parallel"]) == (1, 3)
        await asyncio.gather(*reading)
        assert {order.count(name) for name in "abcd"} == {20}
        # The first three took turns; the fourth began when one of them had ended.
        assert order.index("c") < 10 and order.index("d") > 40

    run(main(), worker)


def test_the_requests_of_a_job_run_side_by_side_and_share_its_first_prompt():
    seen = []

    class Recording(ScriptedSession):
        def begin(self, request, *, beside=None):
            seen.append(beside)
            return super().begin(request, beside=beside)

    session = Recording(lambda request: [Text("x"), 0.01, Text("y")], parallel=2)
    worker = started(session)

    async def main():
        job = worker.submit(*(ask("same") for _ in range(3)))
        pieces = [each async for batch in job.batches() for each in batch]
        assert [index for index, event in pieces if isinstance(event, Finished)] == [0, 1, 2]
        assert seen[0] is None and len(set(seen[1:])) == 1 and seen[1] is not None

    run(main(), worker)


def test_an_error_among_others_fails_only_its_job():
    def script(request):
        for index in range(10):
            if index == 5 and request.messages[-1]["content"] == "bad":
                yield RuntimeError("broken")
            yield Text(str(index))

    worker = started(ScriptedSession(script, parallel=4))

    async def main():
        jobs = [worker.submit(ask(text)) for text in ("good", "bad", "good")]
        first, bad, last = await asyncio.gather(*map(text_of, jobs), return_exceptions=True)
        assert first == last == "0123456789"
        assert isinstance(bad, RuntimeError)

    run(main(), worker)


def test_a_step_that_fails_for_nobody_in_particular_fails_all_and_no_later_one():
    class Failing(ScriptedSession):
        def step(self):
            if len(self.seen) == 2:
                self.seen.clear()
                raise RuntimeError("all of them")
            return super().step()

    session = Failing(lambda request: [Text(str(index)) for index in range(5)], parallel=2)
    worker = started(session)

    async def main():
        jobs = [worker.submit(ask("x")) for _ in range(2)]
        found = await asyncio.gather(*map(text_of, jobs), return_exceptions=True)
        assert all(isinstance(each, RuntimeError) for each in found)
        assert await text_of(worker.submit(ask("later"))) == "01234"

    run(main(), worker)


def test_cancelling_one_of_many_leaves_the_others():
    session = ScriptedSession(slow, parallel=3)
    worker = started(session)

    async def main():
        jobs = [worker.submit(ask("x")) for _ in range(3)]
        while worker.running < 3:
            await asyncio.sleep(0.001)
        jobs[1].cancel()
        while worker.running == 3:
            await asyncio.sleep(0.001)
        assert session.cancelled == 1
        # A slot is free again.
        assert worker.submit(ask("y")).ahead == 0

    run(main(), worker)


def test_the_turn_is_kept_until_a_chunk_is_whole():
    """Two models on one device plan memory for one chunk each: only one may be in the middle of one."""

    class InParts(ScriptedSession):
        steps = 0

        @property
        def amid_chunk(self) -> bool:
            return self.steps % 3 != 0

        def step(self):
            self.steps += 1
            return super().step()

    session, left = InParts(lambda request: (Text(f"{index} ") for index in range(20))), []

    class Turn(contextlib.nullcontext):
        def __exit__(self, *exception):
            left.append((session.steps, session.amid_chunk))

    worker = started(session, turn=Turn())

    async def main():
        assert await text_of(worker.submit(ask("x"))) == "".join(f"{index} " for index in range(20))

    run(main(), worker)
    assert left[-1][0] > 6 and not any(amid for _, amid in left)
