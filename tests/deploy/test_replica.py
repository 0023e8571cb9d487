"""A replica without Serve around it: the same text as a session, errors that can be sent, health."""

import asyncio
import pickle
from dataclasses import replace

import pytest

pytest.importorskip("ray")

from bough import errors
from bough.config import EngineConfig, Replicas, ServerConfig
from bough.deploy.replica import Order, Replica
from bough.deploy.routes import Hint
from bough.deploy.settings import Settings
from bough.engine.events import Failed
from bough.errors import BoughError, PromptTooLong, Unavailable, UsageError
from bough.session.events import Finished, Vector
from bough.session.loading import load_reader, load_session
from bough.session.requests import TextRequest, VectorOptions
from tests.gguf_edit import edited

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def settings(tiny_model) -> Settings:
    engine = EngineConfig(device="cpu", max_ctx=128, threads=1)
    return Settings(tiny_model(), engine, ServerConfig(), Replicas(1, 1), gpu=False)


@pytest.fixture
def replica(settings):
    found = Replica(settings, name="one")
    yield found
    found._worker.close()


def generated(replica: Replica, *requests: TextRequest) -> list:
    async def main() -> list:
        order = pickle.loads(pickle.dumps(Order(requests, "label", Hint())))
        return [message async for message in replica.generate(order)]

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_the_text_is_that_of_a_session(settings, replica):
    request = TextRequest(prompt="Once upon", max_tokens=12, cancelled=bool)
    checked = load_reader(settings.path, settings.engine, replica.about().limits).check(request)
    messages = generated(replica, checked)
    finished = messages[-1][-1][1]
    (alone,) = [
        event
        for event in load_session(settings.path, settings.engine).generate(request)
        if isinstance(event, Finished)
    ]
    assert finished.tokens == alone.tokens and len(alone.tokens) == 12
    report = replica.report()
    assert (report.replica, report.running, report.waiting) == ("one", 0, 0)
    values = {each.name: each.value for family in report.metrics for each in family.samples}
    assert values["bough:generation_tokens_total"] == 12
    assert pickle.loads(pickle.dumps(report)).pid == report.pid


def test_vectors_come_from_replicas_too(settings, tmp_path):
    path = edited(settings.path, tmp_path / "embed.gguf", keys={"qwen35.pooling_type": 3})
    replica = Replica(replace(settings, path=path), name="vectors")
    try:
        request = TextRequest(prompt="Once upon", vector=VectorOptions(), cancelled=bool)
        checked = load_reader(path, settings.engine, replica.about().limits).check(request)
        [found] = [event for batch in generated(replica, checked) for _, event in batch[:1]]
        session = load_session(path, settings.engine)
        assert isinstance(found, Vector) and found == next(session.generate(request))
    finally:
        replica._worker.close()


def test_a_reader_without_weights_refuses_what_a_session_refuses(settings):
    session = load_session(settings.path, settings.engine)
    reader = load_reader(settings.path, settings.engine, session.limits)
    for wrong in (
        TextRequest(prompt="word " * 500),
        TextRequest(prompt=[10**6]),
        TextRequest(prompt="a", max_tokens=0),
        TextRequest(prompt=[]),
    ):
        with pytest.raises(UsageError) as one:
            session.check(wrong)
        with pytest.raises(UsageError) as other:
            reader.check(wrong)
        assert str(one.value) == str(other.value)


def test_prompts_that_a_model_scores_are_left_to_the_replica(settings, tiny_model):
    compress = replace(settings.engine.compress, mode="auto", above=10, scorer=tiny_model())
    limits = load_session(settings.path, settings.engine).limits
    reader = load_reader(settings.path, replace(settings.engine, compress=compress), limits)
    assert reader.check(TextRequest(prompt="word " * 20)).encoded is None
    assert reader.check(TextRequest(prompt="word")).encoded is not None


def test_an_error_is_the_last_message(replica):
    (failed,) = generated(replica, TextRequest(prompt=[10**6], cancelled=bool))
    assert isinstance(failed, Failed) and isinstance(failed.error, UsageError)
    assert failed.error.param == "prompt"


def test_health_is_the_engine_s(replica):
    replica.check_health()
    replica._worker._give_up(RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        replica.check_health()
    (failed,) = generated(replica, TextRequest(prompt="a", cancelled=bool))
    assert isinstance(failed.error, Unavailable)


def test_a_model_that_cannot_be_loaded_ends_the_replica(settings, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(BoughError):
        Replica(replace(settings, path=tmp_path / "bad.gguf"), name="one")


def test_errors_can_be_sent_to_another_process():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, BoughError):
            error = kind(5, 4) if kind is PromptTooLong else kind("what", "hint")
            error.add_note("a note")
            found = pickle.loads(pickle.dumps(error))
            assert type(found) is kind and found.__dict__ == error.__dict__ and str(found) == str(error)
