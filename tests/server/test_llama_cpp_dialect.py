"""Requests in the dialects of llama.cpp, vLLM and Together: honoured, or refused with the field's name."""

import json
import re

import httpx2
import pytest

from bough.text.grammar import Grammar
from tests.server.live import Live
from tests.server.scripted import ScriptedSession

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
COLOUR = {
    "type": "object",
    "properties": {"c": {"enum": ["red", "blue"]}},
    "required": ["c"],
    "additionalProperties": False,
}
YES = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"'


@pytest.fixture(scope="module")
def model(pair_server: Live):
    with httpx2.Client(base_url=pair_server.url, timeout=60) as client:
        yield client


def seen(server: Live):
    assert isinstance(server.session, ScriptedSession)
    return server.session.seen[-1]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object", "schema": COLOUR}}, Grammar("json_schema", COLOUR)),
        ({"response_format": {"type": "json_schema", "schema": COLOUR}}, Grammar("json_schema", COLOUR)),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "grammar", "grammar": YES}}, Grammar("gbnf", YES)),
        ({"json_schema": COLOUR}, Grammar("json_schema", COLOUR)),
        ({"grammar": YES}, Grammar("gbnf", YES)),
        ({"grammar": LARK}, Grammar("lark", LARK)),
        ({"guided_json": COLOUR}, Grammar("json_schema", COLOUR)),
        ({"guided_json": json.dumps(COLOUR)}, Grammar("json_schema", COLOUR)),
        ({"guided_choice": ["a.", "b"]}, Grammar("regex", r"a\.|b")),
        ({"guided_regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"guided_grammar": YES}, Grammar("gbnf", YES)),
        ({"structured_outputs": {"grammar": YES}}, Grammar("gbnf", YES)),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"regex": "a", "disable_fallback": True}}, Grammar("regex", "a")),
        ({"response_format": {"type": "text"}, "grammar": YES}, Grammar("gbnf", YES)),
    ],
)
def test_constraints_reach_the_engine(echo_server: Live, http: httpx2.Client, route, fields, grammar):
    answer = http.post(route, json=CHAT | {"prompt": "x"} | fields)
    assert answer.status_code == 200, answer.text
    found = seen(echo_server).grammar
    assert (found.kind, found.value) == (grammar.kind, grammar.value)
    assert found.field.startswith(next(name for name in reversed(fields)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 123}}}, None),
        ({"json_schema": "x"}, "json_schema"),
        ({"grammar": ""}, "grammar"),
        ({"grammar": 5}, "grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"grammar": YES, "json_schema": COLOUR}, "grammar"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(33))}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"ignore_eos": True, "grammar": YES}, "ignore_eos"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
    ],
)
def test_constraints_that_cannot_be_honoured_are_refused(http: httpx2.Client, fields, param):
    for route in ("/v1/chat/completions", "/v1/completions"):
        answer = http.post(route, json=CHAT | {"prompt": "x"} | fields)
        assert answer.status_code == 400, answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param
            assert param.partition("[")[0] in answer.json()["error"]["message"]


@pytest.mark.parametrize(("route", "body"), [("/v1/responses", {"input": "x"}), ("/v1/messages", CHAT)])
@pytest.mark.parametrize(
    "fields", [{"grammar": YES}, {"guided_json": COLOUR}, {"json_schema": COLOUR}, {"ignore_eos": True}]
)
def test_other_protocols_refuse_them(http: httpx2.Client, route: str, body: dict, fields: dict):
    answer = http.post(route, json=body | fields)
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["error"]["message"]


def test_fields_of_other_names(echo_server: Live, http: httpx2.Client):
    more = {
        "repeat_penalty": 1.25,
        "n_predict": 7,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "min_tokens": 0,
    }
    http.post("/v1/chat/completions", json=CHAT | more).raise_for_status()
    request = seen(echo_server)
    assert request.sampling.repetition_penalty == 1.25 and request.max_tokens == 7
    assert request.stop_token_ids == {5, 6} and request.ignore_eos


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, '"42"'),
        ({"json_schema": COLOUR}, r'\{"c": "(red|blue)"\}'),
        ({"grammar": YES}, "yes|no"),
        ({"grammar": 'root ::= "a"{3} tail\ntail ::= [b-c] "."'}, r"aaa[bc]\."),
        ({"guided_choice": ["one.", "two"]}, r"one\.|two"),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_grammar": LARK}, "yes|no"),
    ],
)
def test_constraints_hold_with_a_model(model: httpx2.Client, fields: dict, pattern: str):
    body = {"prompt": "Say it:", "max_tokens": 30, "temperature": 0, **fields}
    answer = model.post("/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(pattern, answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("grammar", ['root ::= "a" [', 'x ::= "a"', "root ::= y", "no grammar at all"])
def test_an_invalid_grammar_is_refused(model: httpx2.Client, grammar: str):
    answer = model.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "grammar": grammar})
    assert answer.status_code == 400 and "grammar" in answer.json()["error"]["message"]


def test_end_tokens(model: httpx2.Client, pair_server: Live):
    body = CHAT | {"max_tokens": 24, "temperature": 0}
    plain = model.post("/v1/chat/completions", json=body | {"logprobs": True}).json()["choices"][0]
    tokens = [bytes(each["bytes"]) for each in plain["logprobs"]["content"]]
    tokenizer = pair_server.session.tokenizer
    third = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == tokens[2])
    first = tokens.index(tokens[2])
    cut = model.post("/v1/chat/completions", json=body | {"stop_token_ids": [third]}).json()
    assert cut["choices"][0]["message"]["content"] == b"".join(tokens[:first]).decode()
    assert cut["choices"][0]["finish_reason"] == "stop"
    # The first token has to be an end token, which is ignored.
    ends = {str(id): 100 for id in tokenizer.stop_ids}
    assert (
        model.post("/v1/chat/completions", json=body | {"logit_bias": ends}).json()["usage"][
            "completion_tokens"
        ]
        == 0
    )
    going = model.post("/v1/chat/completions", json=body | {"ignore_eos": True, "logit_bias": ends}).json()
    assert going["usage"]["completion_tokens"] == 24
    assert going["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["timings", "timings_per_token"])
def test_timings(http: httpx2.Client, name: str):
    for route in ("/v1/chat/completions", "/v1/completions"):
        body = CHAT | {"prompt": "Hello"}
        answer = http.post(route, json=body | {name: True}).json()
        timings, usage = answer["timings"], answer["usage"]
        assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
        assert timings["predicted_n"] == usage["completion_tokens"]
        assert timings["predicted_ms"] >= 0 and timings["prompt_ms"] > 0
        assert "timings" not in http.post(route, json=body).json()
        lines = http.post(route, json=body | {name: True, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert [chunk for chunk in chunks if "timings" in chunk] == [chunks[-1]]


def test_routes_without_v1(http: httpx2.Client):
    assert http.post("/chat/completions", json=CHAT).json()["object"] == "chat.completion"
    assert http.post("/completions", json={"prompt": "x"}).json()["object"] == "text_completion"
    assert http.post("/responses", json={"input": "x"}).json()["object"] == "response"
    assert http.post("/messages", json=CHAT).json()["type"] == "message"
    assert http.post("/messages", json={}).json()["type"] == "error"
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get("/models/a/b").json()["id"] == "a/b"
    listed = http.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in listed and "/chat/completions" not in listed


@pytest.mark.parametrize("path", ["/slots", "/embedding", "/v1/audio/speech", "/lora-adapters"])
def test_unknown_paths_are_not_found_by_any_method(http: httpx2.Client, path: str):
    for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
        assert http.request(method, path).status_code == 404, method


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/models", "/v1/models/x", "/props", "/app.js"])
def test_head(http: httpx2.Client, path: str):
    answer = http.head(path)
    assert answer.status_code == 200 and answer.content == b""


def test_fingerprint(http: httpx2.Client):
    marks = set()
    for route in ("/v1/chat/completions", "/v1/completions"):
        body = CHAT | {"prompt": "x"}
        marks.add(http.post(route, json=body).json()["system_fingerprint"])
        lines = http.post(route, json=body | {"stream": True}).text.splitlines()
        marks |= {json.loads(line[6:])["system_fingerprint"] for line in lines if line.startswith("data: {")}
    assert len(marks) == 1 and "bough" in marks.pop()


def test_the_first_chunk_has_no_text_before_calls_and_reasoning(http: httpx2.Client):
    def first(**fields) -> dict:
        lines = http.post("/v1/chat/completions", json=CHAT | {"stream": True} | fields).text.splitlines()
        return json.loads(next(line for line in lines if line.startswith("data: "))[6:])["choices"][0][
            "delta"
        ]

    assert first() == {"role": "assistant", "content": ""}
    assert first(enable_thinking=True) == {"role": "assistant", "content": None}


def test_pieces(http: httpx2.Client):
    tokens = http.post("/tokenize", json={"content": "aé", "with_pieces": True}).json()["tokens"]
    assert tokens == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]


def test_input_tokens_of_responses(http: httpx2.Client):
    body = {"input": "Hello", "instructions": "Be brief."}
    counted = http.post("/v1/responses/input_tokens", json=body).json()
    answer = http.post("/v1/responses", json=body).json()
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": answer["usage"]["input_tokens"],
    }


def test_echo_alone(http: httpx2.Client, echo_server: Live):
    before = len(echo_server.session.seen)
    body = {"prompt": ["Hello", "you"], "max_tokens": 0, "echo": True}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["Hello", "you"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 8 and answer["usage"]["completion_tokens"] == 0
    stream = http.post("/v1/completions", json=body | {"stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.endswith("data: [DONE]\n\n") and '"text":"Hello"' in stream.text
    assert len(echo_server.session.seen) == before
    assert http.post("/v1/completions", json=body | {"echo": False}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": [1]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ],
)
def test_errors_name_the_field_and_not_the_schema(http: httpx2.Client, fields: dict, param: str):
    error = http.post("/v1/chat/completions", json=CHAT | fields).json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param} is ")


def test_prompt_errors_name_the_prompt(http: httpx2.Client):
    error = http.post("/v1/completions", json={"prompt": {}}).json()["error"]
    assert error["param"] == "prompt"
    assert "valid string or input should be a valid list" in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"messages": "\xff"}', "not UTF-8: byte 14"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "more than 4300 digits"),
        (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "levels of nested"),
    ],
)
def test_unreadable_bodies_say_why(http: httpx2.Client, content: bytes, words: str):
    answer = http.post("/v1/chat/completions", content=content)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
