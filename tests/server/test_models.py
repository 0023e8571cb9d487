"""Several models behind one server: chosen by name, loaded on request, the least recently used unloaded."""

import contextlib
import threading
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from bough.config import ServerConfig
from bough.errors import ResourceError
from bough.server.models import ServedModel
from bough.session.events import Finished, Text
from bough.session.worker import Turns
from tests.server.live import Live, live
from tests.server.scripted import ScriptedSession

ASK = {"messages": [{"role": "user", "content": "hello"}]}


class Store:
    """Models that answer with their names, and what was loaded when."""

    def __init__(self, *names: str, most: int = 99):
        self.names, self.most = names, most
        self.loads: list[str] = []
        self.live: list[weakref.ref[ScriptedSession]] = []  # sessions that take memory
        self.go = threading.Event()  # set: answers end
        self.go.set()
        self.may_load = threading.Event()
        self.may_load.set()

    def served(self, name: str) -> ServedModel:
        aliases = frozenset({f"{name}.gguf"})
        return ServedModel(name, lambda progress: self.load(name, progress), _facts, aliases, size=7)

    def load(self, name: str, progress) -> ScriptedSession:
        self.loads.append(name)
        progress(1, 2)
        assert self.may_load.wait(30)
        if name == "broken":
            raise ResourceError("broken needs more memory")
        self.live = [each for each in self.live if each() is not None]
        if len(self.live) >= self.most:
            raise ResourceError(f"{name} does not fit")

        def script(_request):
            yield Text(name)
            while not self.go.wait(0.001):
                yield Text(".")
            yield Finished(reason="stop", tokens=[], stats=None)

        session = ScriptedSession(script)
        self.live.append(weakref.ref(session))
        return session


def _facts(session: ScriptedSession) -> dict:
    return {"architecture": "scripted", "device": "cpu", "memory_bytes": 1 << 20}


@contextlib.contextmanager
def serving(store: Store, **settings) -> Generator[tuple[Live, httpx2.Client]]:
    first, *others = map(store.served, store.names)
    config = ServerConfig(model_name=first.name, **settings)
    with (
        live(first.load, config, others=others) as server,
        httpx2.Client(base_url=server.url, timeout=60) as http,
    ):
        server.session = None  # it would stay in memory
        yield server, http


def ask(http: httpx2.Client, model: str | None, **fields) -> httpx2.Response:
    return http.post("/v1/chat/completions", json=ASK | {"model": model} | fields)


def said(http: httpx2.Client, model: str | None) -> str:
    answer = ask(http, model).raise_for_status().json()
    return answer["choices"][0]["message"]["content"]


def loaded(http: httpx2.Client) -> list[str]:
    return [each["name"] for each in http.get("/api/ps").json()["models"]]


def test_a_request_names_its_model_and_the_least_recently_used_is_unloaded():
    store = Store("a", "b", "c")
    with serving(store, models_max=2) as (_, http):
        assert said(http, "a") == "a" and store.loads == ["a"]
        assert said(http, "b") == "b" and said(http, "a") == "a" and loaded(http) == ["b", "a"]
        assert said(http, "c") == "c" and loaded(http) == ["a", "c"]
        assert said(http, "b.gguf") == "b" and said(http, "b:latest") == "b" and loaded(http) == ["c", "b"]
        # A name that is none of theirs gets the one that was used last, and the answer repeats it.
        answer = ask(http, "gpt-4o").json()
        assert (answer["choices"][0]["message"]["content"], answer["model"]) == ("b", "gpt-4o")
        assert store.loads == ["a", "b", "c", "b"]


def test_one_model_at_a_time_by_default():
    store = Store("a", "b")
    with serving(store) as (_, http):
        assert [said(http, name) for name in ("b", "a", None)] == ["b", "a", "a"]
        assert store.loads == ["a", "b", "a"] and loaded(http) == ["a"]


def test_every_model_is_listed_loaded_or_not():
    with serving(Store("a", "b")) as (_, http):
        data = http.get("/v1/models").json()["data"]
        assert [(each["id"], each["loaded"]) for each in data] == [("a", True), ("b", False)]
        assert data[0]["max_model_len"] == 200_000 and data[1]["max_model_len"] is None
        tags = http.get("/api/tags").json()["models"]
        assert [each["name"] for each in tags] == ["a", "b"] and tags[1]["size"] == 7
        (shown,) = http.get("/api/ps").json()["models"]
        assert (shown["name"], shown["status"], shown["running"]) == ("a", "ok", 0)
        assert (
            shown["context_length"] == 200_000 and "{%" in http.post("/api/show", json={}).json()["template"]
        )
        assert http.post("/api/show", json={"model": "b"}).json()["modelfile"] == "FROM b\n"
        assert http.get("/props").json()["models"] == ["a", "b"]


def test_strict_names_are_refused_in_each_protocol():
    with serving(Store("a", "b"), strict_model=True) as (_, http):
        refused = ask(http, "c")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "there is no model 'c' here; there is a, b"
        body = ASK | {"max_tokens": 4}
        answer = http.post("/v1/messages", json=body | {"model": "c"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        answer = http.post("/api/chat", json=ASK | {"model": "c"})
        assert answer.status_code == 404 and "no model 'c'" in answer.json()["error"]
        assert http.get("/v1/models/c").status_code == 404 and http.get("/v1/models/b").status_code == 200
        assert said(http, "b") == "b" and said(http, None) == "b"


def test_requests_in_flight_finish_before_their_model_is_unloaded():
    store = Store("a", "b")
    with serving(store) as (_, http), ThreadPoolExecutor() as pool:
        store.go.clear()
        with http.stream("POST", "/v1/chat/completions", json=ASK | {"model": "a", "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            other = pool.submit(said, http, "b")
            while loaded(http) != ["a", "b"]:  # a finishes, b waits for it
                pass
            assert store.loads == ["a"] and not other.done()
            # A new request for a comes after b.
            again = pool.submit(said, http, "a")
            store.go.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert other.result(30) == "b" and again.result(30) == "a"
        assert store.loads == ["a", "b", "a"]


def test_loading_is_shown_and_a_client_that_leaves_does_not_stop_it(caplog, monkeypatch):
    store = Store("a", "b")
    monkeypatch.setattr("bough.server.models.PROGRESS_S", 0.0)
    caplog.set_level("INFO", "bough")
    with serving(store) as (_, http), ThreadPoolExecutor() as pool:
        store.may_load.clear()
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{http.base_url}/v1/chat/completions", json=ASK | {"model": "b"}, timeout=0.5)
        waiting = pool.submit(said, http, "b")
        while (health := http.get("/health")).json()["waiting"] < 1 or health.json()["progress"] < 0.5:
            pass
        assert health.status_code == 200 and health.json()["status"] == "loading"
        shown = http.get("/api/ps").json()["models"][-1]
        assert (shown["name"], shown["status"], shown["progress"]) == ("b", "loading", 0.5)
        store.may_load.set()
        assert waiting.result(30) == "b" and store.loads == ["a", "b"]
    for line in ("unloading a", "loading b", "loading b · 50%", "b is loaded"):
        assert any(line in record.getMessage() for record in caplog.records)


def test_a_model_that_cannot_be_loaded_is_the_error_of_its_request_alone():
    store = Store("a", "broken")
    with serving(store) as (_, http):
        answer = ask(http, "broken")
        assert answer.status_code == 507 and answer.json()["error"]["message"] == "broken needs more memory"
        assert http.get("/health").json()["status"] == "idle"
        assert said(http, "whatever") == "a" and store.loads == ["a", "broken", "a"]


def test_where_memory_is_short_fewer_are_kept_than_allowed():
    store = Store("a", "b", most=1)
    with serving(store, models_max=3) as (_, http):
        assert said(http, "b") == "b" and loaded(http) == ["b"] and store.loads == ["a", "b", "b"]


def test_two_models_take_turns():
    store = Store("a", "b")
    with serving(store, models_max=2) as (_, http), ThreadPoolExecutor() as pool:
        said(http, "b")
        store.go.clear()
        answers = [pool.submit(said, http, name) for name in ("a", "b")]
        while [each["running"] for each in http.get("/api/ps").json()["models"]] != [1, 1]:
            pass
        store.go.set()
        assert [each.result(30).rstrip(".") for each in answers] == ["a", "b"]
        assert store.loads == ["a", "b"]


def test_turns_are_taken_in_order():
    turn, order = Turns(), []

    def other() -> None:
        with turn:
            order.append("other")

    with turn:
        thread = threading.Thread(target=other)
        thread.start()
        while turn._asked < 2:
            pass
    with turn:
        order.append("the first again")
    thread.join(30)
    assert order == ["other", "the first again"]


def test_a_full_queue_for_a_model_is_429():
    store = Store("a", "b")
    with serving(store, max_queue=1) as (_, http), ThreadPoolExecutor() as pool:
        store.may_load.clear()
        waiting = pool.submit(said, http, "b")
        while http.get("/health").json()["waiting"] < 1:
            pass
        assert ask(http, "b").status_code == 429
        store.may_load.set()
        assert waiting.result(30) == "b"


def test_no_other_model_is_loaded_before_the_first():
    store = Store("a", "b")
    store.may_load.clear()
    first, other = map(store.served, store.names)
    with live(first.load, ServerConfig(model_name="a"), others=[other], wait=False) as server:
        while server.worker.loaded != (1, 2):
            pass
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=ASK | {"model": "b"}, timeout=30)
        assert answer.status_code == 503 and "50% read" in answer.json()["error"]["message"]
        assert httpx2.get(f"{server.url}/health").status_code == 503
        store.may_load.set()
        server.worker.ready.wait(30)
    assert store.loads == ["a"]
