"""OpenAI's own client against a live server: with a script, and with the pair inside the package."""

import asyncio
import json

import httpx2
import openai
import pydantic
import pytest

from bough.engine.stats import RequestStats
from bough.errors import BoughError, PromptTooLong
from bough.server.failures import failure_of
from bough.session.events import Finished, Text
from tests.server.conftest import openai_client
from tests.server.live import Live, scripted

CODE = "```python\ndef add(a, b):\n"
ASK = [{"role": "user", "content": "Write a function that adds two numbers."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says what the weather is like.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Pick(pydantic.BaseModel):
    kind: str
    count: int


def test_streamed_and_whole_responses_are_equal(pair_server: Live):
    client = openai_client(pair_server)
    options = {"model": "any/name", "messages": ASK, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.model == "any/name" and whole.object == "chat.completion"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage and whole.usage.completion_tokens == 12
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_repeated_prompt_is_cached(pair_server: Live):
    client = openai_client(pair_server)
    first = [{"role": "user", "content": "Name a colour, please."}]
    one = client.chat.completions.create(model="m", messages=first, max_tokens=6, temperature=0)
    answer = one.choices[0].message.content
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And another?"}]
    two = client.chat.completions.create(model="m", messages=second, max_tokens=6, temperature=0)
    assert two.usage and two.usage.prompt_tokens_details
    assert two.usage.prompt_tokens_details.cached_tokens >= 8


def test_budget_zero_gives_the_same_text(pair_server: Live):
    client = openai_client(pair_server)
    options = {"model": "m", "messages": ASK, "max_tokens": 10, "seed": 7, "temperature": 0.9}
    plain = client.chat.completions.create(**options, extra_body={"bough": {"budget": 0}})
    trees = client.chat.completions.create(**options)
    assert plain.choices[0].message.content == trees.choices[0].message.content
    assert plain.usage and plain.usage.speculation["drafted_tokens"] == 0


def test_concurrent_streams(any_server: Live):
    async def main() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{any_server.url}/v1", api_key="none", max_retries=0)

        async def one() -> str:
            stream = await client.chat.completions.create(
                model="m", messages=ASK, max_tokens=6, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return await asyncio.gather(one(), one(), one())

    texts = asyncio.run(main())
    assert texts[0] and len(set(texts)) == 1


def test_streamed_and_forced_tool_calls(any_server: Live):
    client = openai_client(any_server)
    options = {
        "model": "m",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
        "max_tokens": 80,
    }
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
    call = whole.message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    history = [
        *options["messages"],
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "Rain."}]},
    ]
    after = client.chat.completions.create(model="m", messages=history, tools=[WEATHER], max_tokens=4)
    assert after.choices[0].message.role == "assistant"


def test_a_json_schema_is_enforced(pair_server: Live):
    client = openai_client(pair_server)
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["apple", "pear"]}, "count": {"enum": [1, 2, 3]}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pick", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model="m", messages=ASK, response_format=form, max_tokens=60, temperature=1, seed=3
    )
    picked = Pick.model_validate_json(answer.choices[0].message.content or "")
    assert picked.kind in ("apple", "pear") and picked.count in (1, 2, 3)
    response = client.responses.create(
        model="m",
        input="Pick one.",
        text={"format": {"type": "json_schema", "name": "pick", "schema": schema}},
        max_output_tokens=60,
    )
    assert json.loads(response.output_text)["kind"] in ("apple", "pear")


def test_choice_and_regex(pair_server: Live):
    client = openai_client(pair_server)
    options = {"model": "m", "messages": ASK, "max_tokens": 12, "temperature": 0}
    chosen = client.chat.completions.create(
        **options, extra_body={"structured_outputs": {"choice": ["red.", "blue."]}}
    )
    assert chosen.choices[0].message.content in ("red.", "blue.")
    matched = client.chat.completions.create(
        **options, extra_body={"response_format": {"type": "regex", "pattern": "[0-9]{3}-[a-c]"}}
    )
    text = matched.choices[0].message.content or ""
    assert len(text) == 5 and text[:3].isdigit() and text[3] == "-"


def test_choices_have_consecutive_seeds(pair_server: Live):
    client = openai_client(pair_server)
    options = {"model": "m", "messages": ASK, "max_tokens": 5, "temperature": 1.5}
    three = client.chat.completions.create(**options, n=3, seed=40)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    alone = client.chat.completions.create(**options, seed=42)
    assert three.choices[2].message.content == alone.choices[0].message.content
    assert three.usage and alone.usage
    assert three.usage.prompt_tokens == alone.usage.prompt_tokens
    assert three.usage.completion_tokens == 15
    indices = {
        chunk.choices[0].index for chunk in client.chat.completions.create(**options, n=2, stream=True)
    }
    assert indices == {0, 1}


def test_logprobs(pair_server: Live):
    client = openai_client(pair_server)
    options = {"model": "m", "messages": ASK, "max_tokens": 4, "temperature": 0}
    options |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.logprobs and whole.logprobs.content
    assert len(whole.logprobs.content) == 4
    first = whole.logprobs.content[0]
    assert first.logprob <= 0 and first.top_logprobs[0].token == first.token
    assert "".join(each.token for each in whole.logprobs.content) == whole.message.content
    streamed = [
        each
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content or ()
    ]
    assert [each.token for each in streamed] == [each.token for each in whole.logprobs.content]


def test_stop_strings_and_bias(pair_server: Live):
    client = openai_client(pair_server)
    options = {"model": "m", "messages": ASK, "max_tokens": 12, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content or ""
    stop = text[len(text) // 2 :][:4]
    stopped = client.chat.completions.create(**options, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == text[: text.index(stop)]
    first = client.chat.completions.create(**options | {"max_tokens": 1}, logprobs=True).choices[0]
    assert first.logprobs and first.logprobs.content
    answer = httpx2.post(f"{pair_server.url}/tokenize", json={"content": first.message.content})
    ids = answer.json()["tokens"]
    banned = client.chat.completions.create(**options | {"max_tokens": 1}, logit_bias={ids[0]: -100})
    assert banned.choices[0].message.content != first.message.content


def test_completions(pair_server: Live):
    client = openai_client(pair_server)
    options = {"model": "m", "temperature": 0, "max_tokens": 5}
    whole = client.completions.create(**options, prompt=CODE, logprobs=1)
    assert whole.choices[0].text and whole.choices[0].logprobs
    assert len(whole.choices[0].logprobs.tokens or ()) == 5
    streamed = client.completions.create(**options, prompt=CODE, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    two = client.completions.create(**options, prompt=[CODE, "1, 2, 3,"], echo=True)
    assert two.choices[0].text == CODE + whole.choices[0].text
    assert two.choices[1].text.startswith("1, 2, 3,") and two.usage
    assert two.usage.completion_tokens == 10


def test_responses(any_server: Live):
    client = openai_client(any_server)
    tools = [{"type": "function", **WEATHER["function"]}]
    with client.responses.stream(
        model="m",
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "The weather in Paris?"}]}],
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=80,
        store=False,
    ) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    call = next(item for item in response.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert response.usage and response.usage.output_tokens > 0
    again = client.responses.create(
        model="m",
        input=[
            {"role": "user", "content": "The weather in Paris?"},
            *[item.model_dump(exclude_none=True) for item in response.output],
            {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."},
        ],
        tools=tools,
        tool_choice="none",
        max_output_tokens=4,
    )
    assert again.output_text


def test_reasoning_is_separate(echo_server: Live):
    client = openai_client(echo_server)
    chat = client.chat.completions.create(model="m", messages=ASK, reasoning_effort="low")
    assert chat.choices[0].message.reasoning_content == "Hmm. Yes."
    assert chat.usage and chat.usage.completion_tokens_details
    assert chat.usage.completion_tokens_details.reasoning_tokens == 9
    seen = echo_server.session.seen
    assert (seen[-1].effort, seen[-1].thinking, seen[-1].thinking_budget) == ("low", True, None)
    response = client.responses.create(model="m", input="Hello", reasoning={"effort": "high"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert seen[-1].effort == "high" and seen[-1].break_loops
    client.chat.completions.create(model="m", messages=ASK, reasoning_effort="none")
    assert (seen[-1].effort, seen[-1].thinking) == (None, False)
    body = {"bough": {"break_loops": False}, "thinking_budget": 9}
    client.chat.completions.create(model="m", messages=ASK, reasoning_effort="low", extra_body=body)
    assert (seen[-1].break_loops, seen[-1].thinking_budget) == (False, 9)


def test_only_a_chat_that_asks_for_no_sampling_has_the_recommended_one(echo_server: Live):
    client, seen = openai_client(echo_server), echo_server.session.seen
    for options in ({}, {"seed": 7}, {"logit_bias": {"5": 1.0}}, {"n": 2}):
        client.chat.completions.create(model="m", messages=ASK, **options)
        assert seen[-1].sampling.recommended, options
    for options in ({"temperature": 0.7}, {"top_p": 0.8}, {"presence_penalty": 0.0}, {"temperature": 0}):
        client.chat.completions.create(model="m", messages=ASK, **options)
        assert not seen[-1].sampling.recommended, options
    client.responses.create(model="m", input="Hello")
    assert seen[-1].sampling.recommended
    client.completions.create(model="m", prompt="Hello")
    assert not seen[-1].sampling.recommended


def test_trees_are_sent_on_request(pair_server: Live):
    client = openai_client(pair_server)
    options = {"model": "m", "messages": ASK, "max_tokens": 8, "temperature": 0, "stream": True}
    chunks = list(client.chat.completions.create(**options, extra_body={"bough": {"trees": True}}))
    trees = [chunk.bough["tree"] for chunk in chunks if "tree" in getattr(chunk, "bough", {})]
    assert trees and all(tree["parents"][0] == -1 and tree["accepted"][0] == 0 for tree in trees)
    assert all(len(tree["tokens"]) == len(tree["parents"]) for tree in trees)
    assert chunks[-1].bough["stats"]["tok_s"] > 0
    assert not any(hasattr(chunk, "bough") for chunk in client.chat.completions.create(**options))


@pytest.mark.parametrize(
    "change, field",
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 3}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra_body": {"audio": {"voice": "a"}}}, "audio"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
)
def test_errors_name_the_invalid_field(echo_server: Live, change: dict, field: str):
    client = openai_client(echo_server)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "m", "messages": ASK, **change})
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("field", ["previous_response_id", "background", "conversation", "prompt"])
def test_stateful_fields_are_rejected(echo_server: Live, field: str):
    value = {"background": True, "prompt": {"id": "p"}}.get(field, "id_1")
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client(echo_server).responses.create(model="m", input="x", **{field: value})
    assert caught.value.param == field


def test_errors_have_their_types(echo_server: Live, pair_server: Live):
    client = openai_client(echo_server)
    with pytest.raises(openai.NotFoundError):
        client.post("/nothing", cast_to=object)
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client(pair_server).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a b c " * 1000}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "the context holds 1024; shorten the prompt or raise max_ctx" in caught.value.message


def test_a_context_that_cannot_be_raised_is_not_advised():
    message = failure_of(PromptTooLong(9009, 8192, raisable=False)).message
    assert message == (
        "the prompt has 9009 tokens, the context holds 8192; "
        "shorten the prompt: the model was made for no more tokens"
    )


def test_an_engine_error_fails_only_its_request():
    def script(request):
        if "bad" in request.messages[-1]["content"]:
            yield Text("so far ")
            yield (
                ZeroDivisionError("secret details")
                if "odd" in request.messages[-1]["content"]
                else (BoughError("the card is gone", "reboot"))
            )
        yield Text("fine")

    with scripted(script) as server:
        client = openai_client(server)

        def ask(text: str, **options):
            return client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text}], **options
            )

        with pytest.raises(openai.InternalServerError, match="the card is gone; reboot"):
            ask("bad")
        with pytest.raises(openai.InternalServerError) as caught:
            ask("odd bad")
        assert "secret" not in str(caught.value)
        assert caught.value.response.headers["connection"] == "close"  # the server ends it after an error
        with pytest.raises(openai.APIError, match="the card is gone"):
            list(ask("bad", stream=True))
        with client.responses.stream(model="m", input="bad") as stream:
            assert [event.type for event in stream][-1] == "response.failed"
        assert ask("good").choices[0].message.content == "fine"


def test_a_truncated_response_is_incomplete():
    stats = RequestStats()

    def script(request):
        yield Text("half an ans")
        yield Finished(reason="length", tokens=[], stats=stats)

    with scripted(script) as server:
        client = openai_client(server)
        response = client.responses.create(model="m", input="x", max_output_tokens=3)
        assert response.status == "incomplete" and response.incomplete_details
        assert response.incomplete_details.reason == "max_output_tokens"
        with client.responses.stream(model="m", input="x") as stream:
            assert [event.type for event in stream][-1] == "response.incomplete"
