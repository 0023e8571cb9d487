"""Fuzzed requests: never a 500 and always a response."""

import json

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.config import EngineConfig, ServerConfig
from bough.session.loading import load_session
from tests.server.agent_bodies import claude_code, codex, opencode
from tests.server.live import Live, live, scripted

PATHS = {
    "/v1/chat/completions": opencode(turn=2) | {"n": 1, "logit_bias": {}, "stop": ["x"], "seed": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 4, "echo": False, "logprobs": None},
    "/v1/responses": codex(turn=2),
    "/v1/messages": claude_code(turn=2),
    "/v1/messages/count_tokens": claude_code(turn=2),
    "/v1/prefill": {"messages": [{"role": "user", "content": "x"}], "lifetime": 9, "system": "x"},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}], "tools": []},
}
BOUNDED = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=[]), max_size=8),
    st.sampled_from(["auto", "required", "user", "system", "tool", "text", "json_schema", "function", "-1"]),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "function", "schema", "input", "id"])
            | st.text(max_size=4),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def server():
    with scripted(config=ServerConfig(max_body=1 << 20)) as live:
        yield live


@pytest.fixture(scope="module")
def http(server: Live):
    with httpx2.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def model_http(tiny_model):
    """A server with a real engine and a tiny random model."""
    config = EngineConfig(device="cpu", max_ctx=512)
    with (
        live(lambda progress: load_session(tiny_model(), config, progress=progress)) as server,
        httpx2.Client(base_url=server.url, timeout=20) as client,
    ):
        yield client


def spots(value, path=()):
    """Yield the path of every value in a body."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from spots(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from spots(item, (*path, index))


def replaced(value, path, new):
    if not path:
        return new
    head, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[head] = replaced(value[head], rest, new)
    return copy


@pytest.mark.parametrize("path", PATHS)
@BOUNDED
@given(data=st.data())
def test_a_body_with_one_invalid_value(http: httpx2.Client, path: str, data: st.DataObject):
    body = PATHS[path]
    spot = data.draw(st.sampled_from(sorted(spots(body), key=repr)))
    sent = json.dumps(replaced(body, spot, data.draw(values)))
    answer = http.post(path, content=sent)
    assert answer.status_code in (200, 400), (spot, sent, answer.text)
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
    else:
        assert '"server_error"' not in answer.text and '"api_error"' not in answer.text, (sent, answer.text)


@BOUNDED
@given(path=st.sampled_from(sorted(PATHS)), content=st.binary(max_size=60) | values.map(json.dumps))
def test_any_json_body(http: httpx2.Client, path: str, content: bytes | str):
    answer = http.post(path, content=content)
    assert answer.status_code in (200, 400), answer.text


ASKED = {
    "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "seed": 3,
    "stop": ["q"],
    "logprobs": True,
    "top_logprobs": 2,
    "thinking_budget": 2,
    "chat_template_kwargs": {"enable_thinking": True},
    "bough": {"budget": 3, "trees": True},
}
FORMS = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
    {"structured_outputs": {"regex": "[ab]+"}},
    {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"response_format": {"type": "json_object"}},
    {"stream": True},
]


@settings(BOUNDED, max_examples=80)
@given(data=st.data())
def test_an_invalid_value_with_a_real_engine(model_http: httpx2.Client, data: st.DataObject):
    body = ASKED | data.draw(st.sampled_from(FORMS))
    spot = data.draw(st.sampled_from(sorted(filter(None, spots(body)), key=repr)))
    sent = replaced(body, spot, data.draw(values)) | {"max_tokens": 3}
    if isinstance(sent.get("n"), int):
        sent.pop("n")
    answer = model_http.post("/v1/chat/completions", content=json.dumps(sent))
    assert answer.status_code in (200, 400), (sent, answer.text)
    assert '"server_error"' not in answer.text, (sent, answer.text)


def test_the_openapi_schema(server: Live):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen = set()

    for result in schema.get_all_operations():
        operation = result.ok()
        strategy = operation.as_strategy()

        @settings(BOUNDED, max_examples=8)
        @given(strategy)
        def run(case):
            answer = case.call(timeout=10)
            assert answer.status_code < 500, (case.operation.path, case.body, answer.text)

        run()
        seen.add(operation.path)
    assert {"/v1/chat/completions", "/v1/messages", "/metrics"} <= seen
    server.settle()
