"""A start on which something fails: memory that is gone by then, a capture that the driver refuses."""

from typing import Any

import pytest
import torch

from bough.config import EngineConfig
from bough.engine.engine import Engine, Request
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.session import loading
from bough.state.graphs import CapturedFunction
from tests.gpu.texts import embedded_pair


def test_memory_that_runs_out_while_loading_is_planned_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another program took some between the plan and the end of the load; the second plan sees it."""
    build, left = loading.build_engine, [1]

    def failing(*arguments: Any, **options: Any) -> Any:
        if left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 500 MiB.")
        return build(*arguments, **options)

    monkeypatch.setattr(loading, "build_engine", failing)
    config = EngineConfig("cpu", max_ctx=256)
    assert loading.load_session(embedded_pair()[0], config).max_ctx == 256
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("CUDA out of memory: planning again, for another program may have taken memory")
    left.extend([1, 1])
    with pytest.raises(torch.OutOfMemoryError):
        loading.load_session(embedded_pair()[0], config)


@pytest.mark.parametrize("kind", ["out of memory", "driver error"])
def test_a_capture_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Without memory it is planned again; after any other error steps run without graphs, in a line."""
    with GGUFFile.open(embedded_pair()[0]) as file:
        engine = Engine(Decoder.load(file), max_ctx=256, runner="graph")
    calls: list[object] = []

    def failing(self: CapturedFunction[Any], pool: Any) -> None:
        calls.append(self)
        if kind == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 500 MiB.")
        raise RuntimeError("CUDA driver error 999: unknown\nmore")

    monkeypatch.setattr(CapturedFunction, "capture", failing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    if kind == "out of memory":
        with pytest.raises(torch.OutOfMemoryError):
            engine.warmup.capture()
        assert caplog.records == [] and engine.states.free_slots == 1
        return
    assert not engine.warmup.capture()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "steps run without CUDA graphs, more slowly: CUDA driver error 999: unknown"
    request = Request([3, 4, 5], max_tokens=4)
    engine.add(request)
    while not engine.idle:
        engine.step()
