"""What the server uses for requests that do not say."""

import httpx2

from bough.config import ServerConfig
from tests.server.live import scripted

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_sampling_and_token_limit_of_the_server():
    config = ServerConfig(sampling={"temperature": 0.5, "top_k": 7}, max_tokens=9)
    with scripted(config=config) as server, httpx2.Client(base_url=server.url) as http:
        http.post("/v1/chat/completions", json=CHAT).raise_for_status()
        http.post(
            "/v1/completions", json={"prompt": "a", "temperature": 1, "max_tokens": 3}
        ).raise_for_status()
        first, second = server.session.seen
        assert (first.sampling.temperature, first.sampling.top_k, first.max_tokens) == (0.5, 7, 9)
        assert (second.sampling.temperature, second.sampling.top_k, second.max_tokens) == (1, 7, 3)
        assert http.get("/props").json()["sampling"]["temperature"] == 0.5


def test_models_have_a_time():
    with scripted() as server:
        (model,) = httpx2.get(f"{server.url}/v1/models").json()["data"]
    assert model["created"] > 1_700_000_000 and model["created_at"] > "2024"
