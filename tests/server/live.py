"""A real server on a loopback port, in a thread of the test process."""

import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from bough.config import ServerConfig
from bough.server.app import create_app
from bough.server.listen import bind
from bough.server.metrics import Metrics
from bough.server.models import Models, ServedModel
from bough.server.run import make_server
from bough.session.session import Session
from bough.session.worker import EngineWorker, Loader, Turns
from tests.server.scripted import Script, ScriptedSession, echo

MODEL = "bough-test"


@dataclass
class Live:
    url: str
    port: int
    worker: EngineWorker
    session: Session

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until no request is running or queued."""
        end = time.monotonic() + seconds
        while (self.worker.running or self.worker.waiting) and time.monotonic() < end:
            time.sleep(0.01)
        assert not self.worker.running and not self.worker.waiting


@contextlib.contextmanager
def live(
    load: Loader,
    config: ServerConfig | None = None,
    *,
    others: Sequence[ServedModel] = (),
    wait: bool = True,
) -> Generator[Live]:
    """`others`: further models that requests may name."""
    config = replace(config or ServerConfig(), port=0, drain_s=1)
    metrics = Metrics()
    turn = Turns() if others else None
    served = [ServedModel(config.model_name or MODEL, load), *others]
    models = Models(
        served,
        config,
        lambda load: EngineWorker(load, max_queue=config.max_queue, ended=metrics.count, turn=turn),
    )
    worker = models.first.worker
    server = make_server(create_app(models, config, metrics=metrics), config)
    listening = bind(config)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    models.start()
    thread.start()
    while not server.started:
        time.sleep(0.005)
    if wait:
        worker.ready.wait(120)
    try:
        yield Live(f"http://127.0.0.1:{port}", port, worker, worker._session)
    finally:
        server.should_exit = True
        thread.join(10)
        models.close()


@contextlib.contextmanager
def scripted(script: Script = echo, config: ServerConfig | None = None, **options) -> Generator[Live]:
    session = ScriptedSession(script, **options)
    with live(lambda _progress: session, config) as server:
        yield server
