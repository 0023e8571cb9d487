"""OpenAI's agents SDK with its chat and its responses model."""

from dataclasses import replace
from typing import Any, Literal

from agents import (
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.items import HandoffOutputItem, ToolCallItem, ToolCallOutputItem
from agents.models.interface import Model
from cases import ASK, MODEL, PICK, URL, WEATHER, Fruit, run
from openai import AsyncOpenAI

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=300, parallel_tool_calls=False, include_usage=True)


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def chat() -> Model:
    return OpenAIChatCompletionsModel(MODEL, openai_client=client())


def responses() -> Model:
    return OpenAIResponsesModel(MODEL, openai_client=client())


def forced(name: str) -> ModelSettings:
    """The SDK goes back to `auto` after the call."""
    return replace(SETTINGS, tool_choice=name)


async def answers(model: Model) -> None:
    agent = Agent(name="writer", instructions="Be brief.", model=model, model_settings=SETTINGS)
    result = await Runner.run(agent, ASK)
    spent = result.context_wrapper.usage
    assert result.final_output and spent.requests == 1 and spent.input_tokens and spent.output_tokens
    again = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": ASK}])
    assert again.final_output


async def streams(model: Model) -> None:
    agent = Agent(name="writer", model=model, model_settings=SETTINGS)
    whole = (await Runner.run(agent, ASK)).final_output
    stream = Runner.run_streamed(agent, ASK)
    raw = [event.data async for event in stream.stream_events() if event.type == "raw_response_event"]
    pieces = [event.delta for event in raw if event.type == "response.output_text.delta"]
    assert len(pieces) > 1 and "".join(pieces) == whole == stream.final_output
    assert raw[-1].type == "response.completed" and stream.context_wrapper.usage.output_tokens


async def picks(model: Model) -> None:
    agent = Agent(name="picker", model=model, model_settings=SETTINGS, output_type=Fruit)
    assert isinstance((await Runner.run(agent, PICK)).final_output, Fruit)


def weather_tool(cities: list[str]) -> FunctionTool:
    """Return a tool that notes its calls and can be called twice: so small a model would never stop."""

    @function_tool(is_enabled=lambda context, agent: len(cities) < 2)
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Says what the weather is like."""
        cities.append(city)
        return f"Rain in {city}"

    return weather


async def calls(model: Model, kind: type = str) -> None:
    for stream in (False, True):
        cities: list[str] = []
        tools, output = [weather_tool(cities)], None if kind is str else kind
        settings = forced("weather")
        agent = Agent("clerk", model=model, model_settings=settings, tools=tools, output_type=output)
        if stream:
            result: Any = Runner.run_streamed(agent, WEATHER)
            assert [event async for event in result.stream_events()]
        else:
            result = await Runner.run(agent, WEATHER)
        called = [item.raw_item for item in result.new_items if isinstance(item, ToolCallItem)]
        returned = [item for item in result.new_items if isinstance(item, ToolCallOutputItem)]
        assert isinstance(result.final_output, kind) and called[0].name == "weather"
        assert [call.call_id for call in called] == [each.raw_item["call_id"] for each in returned]
        assert [each.output for each in returned] == [f"Rain in {city}" for city in cities]


async def hands_over(model: Model) -> None:
    writer = Agent(name="writer", model=model, model_settings=SETTINGS)
    first = Agent(name="clerk", model=model, model_settings=forced("transfer_to_writer"), handoffs=[writer])
    result = await Runner.run(first, ASK)
    assert result.last_agent is writer and result.final_output
    assert any(isinstance(item, HandoffOutputItem) for item in result.new_items)


async def remembers(model: Model) -> None:
    """A session sends all earlier items again."""
    agent = Agent(name="writer", model=model, model_settings=SETTINGS)
    session = SQLiteSession("one")
    for turn in (1, 2):
        assert (await Runner.run(agent, ASK, session=session)).final_output
        assert len(await session.get_items()) == 2 * turn


async def asks_another(model: Model) -> None:
    """An agent as the tool of another one."""
    writer = Agent(name="writer", model=model, model_settings=SETTINGS)
    tools = [writer.as_tool("write", "Writes a text.")]
    # The argument is a text without a limit; the penalty ends it.
    limited = replace(forced("write"), max_tokens=300, frequency_penalty=1)
    clerk = Agent(
        "clerk", model=model, model_settings=limited, tools=tools, tool_use_behavior="stop_on_first_tool"
    )
    assert (await Runner.run(clerk, ASK)).final_output


async def case_chat():
    await answers(chat())


async def case_chat_stream():
    await streams(chat())


async def case_chat_output_type():
    await picks(chat())


async def case_chat_tools():
    await calls(chat())


async def case_chat_tools_and_output_type():
    await calls(chat(), Fruit)


async def case_chat_session():
    await remembers(chat())


async def case_chat_agent_as_tool():
    await asks_another(chat())


async def case_chat_handoff():
    await hands_over(chat())


async def case_responses():
    await answers(responses())


async def case_responses_stream():
    await streams(responses())


async def case_responses_output_type():
    await picks(responses())


async def case_responses_tools():
    await calls(responses())


async def case_responses_tools_and_output_type():
    await calls(responses(), Fruit)


async def case_responses_session():
    await remembers(responses())


async def case_responses_agent_as_tool():
    await asks_another(responses())


async def case_responses_handoff():
    await hands_over(responses())


if __name__ == "__main__":
    run(globals())
