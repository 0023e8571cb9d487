"""From the arguments of a Serve application, or the command line, to the settings of replicas."""

from pathlib import Path

import pytest

from bough.config import EngineConfig, Replicas, ServerConfig
from bough.deploy.settings import QUEUE, settings_for, settings_of
from bough.errors import UsageError


@pytest.mark.parametrize(("text", "least", "most"), [("2", 2, 2), ("1-4", 1, 4), ("0-3", 0, 3)])
def test_the_number_of_replicas(text, least, most):
    assert Replicas.parse(text) == Replicas(least, most)


@pytest.mark.parametrize("text", ["0", "", "two", "3-1", "-1", "1-", "99999"])
def test_a_number_that_makes_no_sense(text):
    with pytest.raises(UsageError, match="`replicas` is"):
        Replicas.parse(text)


def test_arguments_are_fields_of_both_configurations(tiny_model):
    path = tiny_model()
    arguments = {"model": str(path), "replicas": "1-2", "device": "cpu", "threads": "1", "max_ctx": "512"}
    found = settings_of(arguments | {"draft": "lookup", "model_name": "small", "max_queue": 7})
    assert (found.path, found.model_name, found.gpu) == (path, "small", False)
    assert (found.engine.threads, found.engine.max_ctx, found.server.max_queue) == (1, 512, 7)
    assert found.engine.speculation is not None and found.engine.draft is None
    assert found.slots == 1


def test_the_embedded_pair_needs_no_arguments():
    found = settings_of({"device": "cpu"})
    assert found.model_name == "bough-40m" and found.engine.draft is not None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"max_ctxt": 5}, "no setting 'max_ctxt'"), ({"max_ctx": "long"}, "`max_ctx` is 'long'")],
)
def test_a_wrong_argument_is_named(wrong, message):
    with pytest.raises(UsageError, match=message):
        settings_of({"device": "cpu", **wrong})


def test_replicas_share_the_cpu(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    path, server = Path("model.gguf"), ServerConfig()
    assert settings_for(path, EngineConfig(device="cpu"), server, Replicas(1, 4)).engine.threads == 2
    assert (
        settings_for(path, EngineConfig(device="cpu", threads=3), server, Replicas(4, 4)).engine.threads == 3
    )
    gpu = settings_for(path, EngineConfig(device="cuda", parallel=None), server, Replicas(2, 2))
    assert (gpu.gpu, gpu.slots, gpu.engine.threads) == (True, 8, None)
    assert gpu.slots > QUEUE
    with pytest.raises(UsageError, match="`device` is cuda:1"):
        settings_for(path, EngineConfig(device="cuda:1"), server, Replicas(2, 2))
