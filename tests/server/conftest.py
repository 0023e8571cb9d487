"""Servers and clients that tests share."""

from collections.abc import Iterator

import anthropic
import httpx2
import openai
import pytest

from bough.config import DraftConfig, EngineConfig
from bough.hub.catalog import named
from bough.session.loading import load_session
from tests.server.live import Live, live, scripted


@pytest.fixture(scope="session")
def echo_server() -> Iterator[Live]:
    """A scripted server that echoes, calls tools and reasons."""
    with scripted() as server:
        yield server


@pytest.fixture(scope="session")
def pair_server() -> Iterator[Live]:
    """The pair inside the package, with its draft."""
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    config = EngineConfig(device="cpu", max_ctx=1024, draft=DraftConfig(pair.draft))
    with live(lambda progress: load_session(pair.target, config, progress=progress)) as server:
        yield server


@pytest.fixture
def http(echo_server: Live) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=echo_server.url, timeout=30) as client:
        yield client


@pytest.fixture(params=["echo_server", "pair_server"])
def any_server(request: pytest.FixtureRequest) -> Live:
    return request.getfixturevalue(request.param)


def openai_client(server: Live, **options) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    )


def anthropic_client(server: Live, **options) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, **{"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    )
