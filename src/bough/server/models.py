"""Several models behind one server: a request's name picks one, the least recently used makes room."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request

from bough.config import ServerConfig
from bough.errors import ModelNotFound, QueueFull, ResourceError, Unavailable
from bough.server.service import Facts, Service
from bough.server.sse import unless_gone
from bough.session.reader import RequestReader
from bough.session.session import Session
from bough.session.worker import Loader, Worker

log = logging.getLogger(__name__)

POLL_S = 0.02
PROGRESS_S = 5.0  # between the lines of the log
LATEST = ":latest"  # Ollama's clients add it to a name


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    load: Loader
    facts: Facts = lambda session: {}
    aliases: frozenset[str] = frozenset()  # what else it is called: the file, the repository
    size: int = 0  # bytes of its file
    path: Path | None = None  # of its file


@dataclass(slots=True, eq=False)
class Resident:
    """A model in memory, from the request that it is loaded for until it is unloaded."""

    model: ServedModel
    service: Service
    loading: asyncio.Task[None] | None = None  # None: the server's first, which no request waits for
    users: int = 0  # requests that wait for it, or are being checked before they queue

    @property
    def busy(self) -> bool:
        return self.users > 0 or self.service.worker.busy

    @property
    def is_loaded(self) -> bool:
        return self.service.worker.ready.is_set()

    @property
    def is_awaited(self) -> bool:
        return self.loading is not None and not self.loading.done()


class Models:
    """Maps names to services. All but the constructor, `start` and `close` run in the event loop."""

    def __init__(
        self, served: Sequence[ServedModel], config: ServerConfig, worker: Callable[[Loader], Worker]
    ):
        self.served = tuple(served)
        self._config, self._worker = config, worker
        self._known = {alias: each for each in reversed(served) for alias in each.aliases}
        self._known |= {each.name: each for each in served}
        self._residents: dict[str, Resident] = {}  # that take requests; the least recently used comes first
        self._leaving: list[Resident] = []  # that finish their requests and are unloaded then
        self._turn = asyncio.Lock()  # one model is loaded or unloaded at a time
        self.first = self._enter(served[0]).service
        self._recent = served[0]  # answers requests that name none of the models
        self._stopping = False

    def start(self) -> None:
        """Begin to load the first model; until it is loaded requests are refused, not kept."""
        self.first.worker.start()

    def close(self) -> None:
        for resident in self.residents:
            resident.service.worker.close()

    def cancel_all(self) -> None:
        """Cancel all jobs; requests that wait for a model are refused."""
        self._stopping = True
        for resident in self.residents:
            resident.service.worker.cancel_all()

    def refuse(self) -> None:
        """Take no more requests; those that wait are refused at once, those that run go on."""
        self._stopping = True
        for resident in self.residents:
            resident.service.worker.refuse()

    async def refresh(self) -> None:
        for resident in self.residents:
            await resident.service.worker.refresh()

    @property
    def residents(self) -> tuple[Resident, ...]:
        """Return what is in memory, or about to be, in the order of use."""
        return (*self._leaving, *self._residents.values())

    @property
    def current(self) -> Service:
        resident = self._residents.get(self._recent.name)
        if resident is None:
            raise Unavailable("no model is loaded", "a request loads one", retry_after_s=2)
        return resident.service

    def named(self, name: str | None) -> ServedModel:
        """Return the model of this name; of another name the one used last, unless names are strict."""
        model = self._known.get(name or "") or self._known.get((name or "").removesuffix(LATEST))
        if model is None and name and self._config.strict_model:
            raise ModelNotFound(f"there is no model {name!r} here", f"there is {self._names()}")
        return model or self._recent

    def resident(self, name: str | None) -> Resident | None:
        """Return the model of this name if it is in memory."""
        return self._residents.get(self.named(name).name)

    @asynccontextmanager
    async def use(self, request: Request, name: str | None) -> AsyncGenerator[Service]:
        """Give the service of the model that a request names, loaded first if it has to be.

        It stays in memory until the end of the context, and of the jobs that were submitted meanwhile.
        """
        model = self.named(name)
        resident = self._residents.get(model.name) or self._request(model)
        if resident.is_awaited and resident.users >= self._config.max_queue:
            raise QueueFull(
                f"{resident.users} requests wait for {model.name}, the queue holds {self._config.max_queue}",
                "try again later, or raise `max_queue`",
            )
        self._residents[model.name] = self._residents.pop(model.name)
        self._recent = model
        resident.users += 1
        try:
            if resident.is_awaited and resident.loading is not None:
                await unless_gone(request, asyncio.shield(resident.loading))
            yield resident.service
        finally:
            resident.users -= 1

    def _names(self) -> str:
        return ", ".join(each.name for each in self.served)

    def _enter(self, model: ServedModel) -> Resident:
        self._residents[model.name] = resident = Resident(model, self._service(model))
        return resident

    def _service(self, model: ServedModel) -> Service:
        return Service(self._worker(_isolated(model.load)), self._config, model.name, model.facts)

    def _request(self, model: ServedModel) -> Resident:
        """Return a model that is going to be loaded as soon as there is room."""
        if not self.first.worker.ready.is_set():
            self.first.session  # noqa: B018  # says how far it is
        resident = self._enter(model)
        resident.loading = asyncio.ensure_future(self._bring_in(resident))
        # Without this the error of a load that nobody waits for any more would be shown as forgotten.
        resident.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return resident

    async def _bring_in(self, resident: Resident) -> None:
        async with self._turn:
            if not resident.users:
                self._forget(resident)
                return
            while len(others := self._loaded_beside(resident)) >= self._config.models_max:
                await self._unload(others[0])
            while (failure := await self._load(resident)) is not None:
                others = self._loaded_beside(resident)
                if not isinstance(failure, ResourceError) or not others:
                    self._forget(resident)
                    raise failure
                log.info("%s does not fit beside what is loaded", resident.model.name)
                await self._unload(others[0])
                resident.service = self._service(resident.model)

    def _loaded_beside(self, resident: Resident) -> list[Resident]:
        """Return the other loaded models in the order in which they make room: idle ones first."""
        others = [each for each in self._residents.values() if each is not resident]
        return sorted((each for each in others if each.is_loaded), key=lambda each: each.busy)

    async def _load(self, resident: Resident) -> Exception | None:
        """Load a model, with its progress in the log; return what went wrong."""
        name, worker = resident.model.name, resident.service.worker
        begun = said = time.monotonic()
        log.info("loading %s", name)
        worker.start()
        while not worker.ready.is_set():
            if self._stopping:
                return Unavailable("the server is stopping", retry_after_s=10)
            await asyncio.sleep(POLL_S)
            done, total = worker.loaded
            if total and time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                log.info("loading %s · %d%%", name, 100 * done // total)
        if worker.failure is None:
            log.info("%s is loaded · %.1f s", name, time.monotonic() - begun)
        else:
            log.warning("%s could not be loaded: %s", name, worker.failure)
        return worker.failure

    async def _unload(self, resident: Resident) -> None:
        """Let the requests of a model finish, then free its memory."""
        self._forget(resident)
        self._leaving.append(resident)
        log.info("unloading %s%s", resident.model.name, " after its requests" if resident.busy else "")
        while resident.busy:
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(resident.service.worker.close)
        self._leaving.remove(resident)
        gc.unfreeze()
        gc.collect()  # sessions hold cycles; memory is planned by what is free
        gc.freeze()

    def _forget(self, resident: Resident) -> None:
        """Take a model out of those that requests can reach."""
        del self._residents[resident.model.name]
        if self._recent is resident.model:
            self._recent = next((each.model for each in reversed(self._residents.values())), self.served[0])

    def health(self) -> tuple[bool, Mapping[str, Any]]:
        """Return whether requests are taken, and the state of the model that was used last."""
        resident = self._residents.get(self._recent.name)
        loaded = sum(each.is_loaded for each in self._residents.values())
        counted = {
            "models": loaded,
            "models_max": self._config.models_max,
            "checking": sum(each.service.checks.count for each in self.residents),
        }
        if resident is None:
            return True, {"status": "idle", "progress": 0.0, "waiting": 0, "running": 0, **counted}
        state = resident.service.worker.describe()
        waiting = state["waiting"] + (resident.users if resident.is_awaited else 0)
        taken = state["status"] == "ok" or resident.is_awaited
        return taken, {**state, "waiting": waiting, **counted}


def _isolated(load: Loader) -> Loader:
    """Return what loads a session that compiles clients' grammars in processes of their own."""

    def loaded(progress: Callable[[int, int], None]) -> Session:
        session = load(progress)
        if isinstance(session, RequestReader):
            session.isolate_grammars()
        return session

    return loaded
