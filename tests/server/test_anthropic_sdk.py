"""Anthropic's own client against a live server: with a script, and with the pair inside the package."""

import asyncio

import anthropic
import pytest

from bough.config import ServerConfig
from bough.engine.stats import RequestStats
from bough.errors import BoughError
from bough.session.events import Finished, Text
from tests.server.conftest import anthropic_client
from tests.server.live import Live, scripted

ASK = [{"role": "user", "content": "Write a function that adds two numbers."}]
WEATHER = {
    "name": "weather",
    "description": "Says what the weather is like.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_whole_and_streamed(pair_server: Live):
    client = anthropic_client(pair_server)
    options = {"model": "any", "max_tokens": 10, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**options)
    assert whole.content[0].type == "text" and whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 10
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 10
    counted = client.messages.count_tokens(model="any", messages=ASK)
    total = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == total


def test_async_stream_with_thinking_and_a_tool(echo_server: Live):
    async def main():
        client = anthropic.AsyncAnthropic(base_url=echo_server.url, api_key="none", max_retries=0)
        async with client.messages.stream(
            model="m",
            max_tokens=2000,
            messages=ASK,
            tools=[WEATHER],
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_message()

    kinds, final = asyncio.run(main())
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Paris"}
    assert final.stop_reason == "tool_use"
    assert echo_server.session.seen[-1].thinking_budget == 1024


def test_a_forced_tool_and_its_result(pair_server: Live):
    client = anthropic_client(pair_server)
    options = {"model": "m", "max_tokens": 80, "tools": [WEATHER], "extra_body": {"temperature": 0}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = client.messages.create(messages=ASK, tool_choice=choice, **options)
    call = next(block for block in asked.content if block.type == "tool_use")
    assert call.input["city"] in ("Paris", "Rome") and asked.stop_reason == "tool_use"
    history = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in asked.content]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": "Rain."}],
                    "is_error": True,
                },
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    after = client.messages.create(**{**options, "max_tokens": 4}, messages=history)
    assert after.role == "assistant" and after.usage.output_tokens <= 4


def test_a_schema(pair_server: Live):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["apple", "pear"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    answer = anthropic_client(pair_server).messages.create(
        model="m",
        max_tokens=40,
        messages=ASK,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    assert answer.content[0].text.replace(" ", "") in ('{"kind":"apple"}', '{"kind":"pear"}')


def test_a_stop_sequence():
    def script(request):
        yield Text("until ")
        yield Finished(reason="stop", stop_string="END", tokens=[], stats=RequestStats())

    with scripted(script) as server:
        client = anthropic_client(server)
        options = {"model": "m", "max_tokens": 9, "messages": ASK, "stop_sequences": ["END"]}
        whole = client.messages.create(**options)
        assert whole.stop_reason == "stop_sequence" and whole.stop_sequence == "END"
        with client.messages.stream(**options) as stream:
            assert stream.get_final_message().stop_sequence == "END"
        assert list(server.session.seen[-1].stop) == ["END"]


def test_the_models(echo_server: Live):
    models = anthropic_client(echo_server).models.list()
    assert [model.id for model in models] == ["bough-test"]
    assert anthropic_client(echo_server).models.retrieve("some/model").id == "some/model"


def test_errors_have_their_types(echo_server: Live):
    client = anthropic_client(echo_server)
    with pytest.raises(anthropic.BadRequestError, match="temperature is -1"):
        client.messages.create(model="m", max_tokens=5, messages=ASK, extra_body={"temperature": -1})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] is an image"):
        client.messages.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]
        )
    with pytest.raises(anthropic.BadRequestError, match=r"thinking.type is 'later'"):
        client.messages.create(model="m", max_tokens=5, messages=ASK, thinking={"type": "later"})
    with scripted(config=ServerConfig(api_keys=("right",))) as server:
        with pytest.raises(anthropic.AuthenticationError):
            anthropic_client(server, api_key="wrong").messages.create(model="m", max_tokens=5, messages=ASK)
        answer = anthropic_client(server, api_key="right").messages.create(
            model="m", max_tokens=5, messages=ASK
        )
        assert answer.content


def test_an_error_inside_a_stream():
    def script(request):
        yield Text("so far ")
        yield 0.1
        yield BoughError("the card is gone")

    with scripted(script) as server:
        client = anthropic_client(server)
        with (
            pytest.raises(anthropic.APIStatusError, match="the card is gone"),
            client.messages.stream(model="m", max_tokens=5, messages=ASK) as stream,
        ):
            for _ in stream:
                pass
