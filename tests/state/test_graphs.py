"""Functions that are captured when they are first called, and what is logged where that fails."""

import logging

import pytest

from bough.state.graphs import CapturedFunction, warn_eager


def test_what_a_capture_takes_can_be_told_from_what_the_function_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Graph:
        def replay(self) -> None:
            order.append("replayed")

    def capture(function: CapturedFunction, pool: object) -> None:
        order.append(f"captured in {pool}")
        function._graph, function._result = Graph(), "result"  # ty: ignore[invalid-assignment]

    monkeypatch.setattr(CapturedFunction, "capture", capture)
    function = CapturedFunction(lambda: "result", sequences=4)
    function.capture_on_call("a pool", lambda: order.append("timed from here"))
    assert function.sequences == 4 and not function.captured
    assert [function(), function()] == ["result", "result"]
    assert order == ["captured in a pool", "timed from here", "replayed", "replayed"]


def test_the_log_has_what_failed_first(caplog: pytest.LogCaptureFixture) -> None:
    """Ending a capture after an error fails as well, and says nothing."""
    try:
        try:
            raise AssertionError("15 rows, needed 16")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore")
    except RuntimeError as error:
        with caplog.at_level(logging.INFO):
            warn_eager(error)
    assert caplog.messages == ["steps run without CUDA graphs, more slowly: 15 rows, needed 16"]
