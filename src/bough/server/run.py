"""Loads the model, serves until a signal, drains."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from bough.config import ServerConfig
from bough.server.app import create_app
from bough.server.connections import (
    SHARE,
    Connections,
    accepts_at_once,
    descriptor_limit,
    descriptors_used,
    most_connections,
)
from bough.server.failures import without_backquotes
from bough.server.listen import BACKLOG
from bough.server.metrics import Metrics
from bough.server.models import Models, ServedModel
from bough.server.refusals import LOGGED, printable
from bough.session.worker import Ended, EngineWorker, Job, Loader, RequestResult, State, Turns, Worker

log = logging.getLogger(__name__)

CANCEL_S = 2.0  # of the time that requests get to finish, to end those that have not
MAX_ERROR = 300  # characters of an error in the log
# The engine's thread asks for the interpreter at every step; waiting 5 ms for it, Python's own choice, while
# the events of the step before are written would cost more than the step's work on the host.
SWITCH_S = 0.0005


def serve(
    served: Sequence[ServedModel],
    config: ServerConfig,
    listening: socket.socket,
    *,
    ready: Callable[[Any], None] = lambda session: None,
    metrics: Metrics | None = None,
    make_worker: Callable[[Loader, Ended], Worker] | None = None,
) -> None:
    """Serve until a signal. Call `ready` once the first model is loaded; raise what loading it raised.

    make_worker: what runs a model's requests, if not an engine in this process.
    """
    sys.setswitchinterval(SWITCH_S)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of files of clients, who get errors instead
    metrics = metrics or Metrics()
    ended = record(metrics)
    # Kernels of two models share buffers: their steps, and the loading of one, do not overlap.
    turn = Turns() if len(served) > 1 else None

    def engine(load: Loader, ended: Ended) -> Worker:
        return EngineWorker(load, max_queue=config.max_queue, ended=ended, turn=turn)

    models = Models(served, config, lambda load: (make_worker or engine)(load, ended))
    server = make_server(create_app(models, config, metrics=metrics), config)
    models.start()
    try:
        asyncio.run(_serve(server, models, listening, ready))
    finally:
        models.close()
    if (failure := models.first.worker.failure) is not None:
        raise failure


def record(metrics: Metrics) -> Ended:
    """Return what counts and logs a request at its end."""

    def ended(job: Job, result: RequestResult) -> None:
        metrics.count(job, result)
        log.info("%s", line(job, result))
        if result.error is not None:
            result.error.add_note(LOGGED)

    return ended


def make_server(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    descriptors = descriptor_limit()
    share = SHARE if config.api_keys else 1.0
    connections = Connections(most_connections(descriptors, descriptors_used()), share=share)
    return _Server(
        uvicorn.Config(
            app,
            http=connections.protocol(),
            loop="asyncio",  # also where uvloop is installed, which Ray brings along
            backlog=accepts_at_once(descriptors),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        ),
        connections,
    )


async def _serve(
    server: uvicorn.Server, models: Models, listening: socket.socket, ready: Callable[[Any], None]
) -> None:
    def stop(number: int) -> None:
        # SIGINT and any second signal cancel running requests; a first SIGTERM lets them finish. What has not
        # finished in time is cancelled before the HTTP server gives up, so that streams end with an error.
        if number == signal.SIGINT or server.should_exit:
            models.cancel_all()
        else:
            models.refuse()
            loop.call_later(max(drain_s / 2, drain_s - CANCEL_S), models.cancel_all)
        log.info("stopping")
        server.should_exit = True

    loop = asyncio.get_running_loop()
    drain_s = server.config.timeout_graceful_shutdown or 0
    handlers = {
        number: signal.signal(number, lambda number, _frame: loop.call_soon_threadsafe(stop, number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }

    async def watch() -> None:
        worker = models.first.worker
        while not worker.ready.is_set():
            await asyncio.sleep(0.05)
        if worker.state is State.failed:
            server.should_exit = True
        else:
            # What stays is not looked through again: a collection would stop all streams for 0.1 s.
            gc.collect()
            gc.freeze()
            ready(worker.session)

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
    """Installs no signal handlers: uvicorn's raise the signal again at the end, which kills the program."""

    def __init__(self, config: uvicorn.Config, connections: Connections):
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._connections.on_loop_error)
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # uvicorn's setting also says how many are accepted at once

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def line(job: Job, result: RequestResult) -> str:
    if result.finished is None:
        reason = printable(without_backquotes(str(result.error)), MAX_ERROR)
        return f"{job.label} · failed: {type(result.error).__name__}: {reason}"
    stats = result.finished.stats
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    tokens = f"image{'s' * (stats.images > 1)} of {stats.image_tokens} tokens"
    parts = [
        job.label,
        f"prompt {stats.prompt_tokens}{cached}",
        f"{stats.images} {tokens}" if stats.images else "",
        f"{stats.generated_tokens} tok",
        f"{stats.decode_tok_s:.1f} tok/s" if stats.decode_tok_s else "",
        f"TTFT {stats.ttft_s:.2f} s" if stats.ttft_s else "",
        f"accept {stats.acceptance_length:.2f}/step{stats.proposers}" if stats.steps else "",
        f"waited {result.waited_s:.1f} s" if result.waited_s >= 0.1 else "",
        result.finished.reason,
        *stats.notes,
    ]
    return " · ".join(filter(None, parts))
