"""A server's life: load, serve, drain. Knows no terminal."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI

from treeflash.config import ServerConfig
from treeflash.server.app import create_app
from treeflash.server.metrics import Metrics
from treeflash.session.worker import EngineWorker, Job, Loader, Outcome, State

log = logging.getLogger(__name__)

LONGEST = 300  # characters of an error in the log


def serve(
    load: Loader,
    config: ServerConfig,
    listening: socket.socket,
    *,
    model_name: str,
    facts: Callable[[], Mapping[str, Any]] = dict,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Until a signal ends it. Raises what loading raised; `ready` is called when the model is there."""
    metrics = Metrics()

    def ended(job: Job, outcome: Outcome) -> None:
        metrics.count(job, outcome)
        log.info("%s", line(job, outcome))

    worker = EngineWorker(load, max_queue=config.max_queue, ended=ended)
    app = create_app(worker, config, metrics=metrics, model_name=model_name, facts=facts)
    server = make_server(app, config)
    worker.start()
    try:
        asyncio.run(_live(server, worker, listening, ready))
    finally:
        worker.close()
    if worker.failure is not None:
        raise worker.failure


def make_server(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        )
    )


async def _live(
    server: uvicorn.Server, worker: EngineWorker, listening: socket.socket, ready: Callable[[], None]
) -> None:
    def stop(number: int) -> None:
        # An interrupt ends the answers, a request to terminate waits for them; unless it is the second.
        if number == signal.SIGINT or server.should_exit:
            worker.cancel_all()
        log.info("stopping")
        server.should_exit = True

    loop = asyncio.get_running_loop()
    handlers = {
        number: signal.signal(number, lambda number, _frame: loop.call_soon_threadsafe(stop, number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }

    async def watch() -> None:
        while not worker.ready.is_set():
            await asyncio.sleep(0.05)
        if worker.state is State.failed:
            server.should_exit = True
        else:
            ready()

    watching = asyncio.ensure_future(watch())
    try:
        await server.serve(sockets=[listening])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


class _Server(uvicorn.Server):
    """Leaves signals to us: the original raises them again at the end, which would kill the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def line(job: Job, outcome: Outcome) -> str:
    """What the log says of a request."""
    if outcome.finished is None:
        return f"{job.label} · failed: {type(outcome.error).__name__}: {_one_line(str(outcome.error))}"
    stats = outcome.finished.stats
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    parts = [
        job.label,
        f"prompt {stats.prompt_tokens}{cached}",
        f"{stats.generated_tokens} tok",
        f"{stats.decode_tok_s:.1f} tok/s" if stats.decode_tok_s else "",
        f"TTFT {stats.ttft_s:.2f} s",
        f"accept {stats.acceptance_length:.2f}/step" if stats.steps else "",
        f"waited {outcome.waited_s:.1f} s" if outcome.waited_s >= 0.1 else "",
        outcome.finished.reason,
    ]
    return " · ".join(filter(None, parts))


def _one_line(text: str) -> str:
    """As a log may show it: errors quote requests, which may hold line breaks and a terminal's commands."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."
