"""pydantic-ai over the chat, responses and Anthropic protocols."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cases import ASK, FRUIT, MODEL, PICK, URL, WEATHER, Fruit, run, weather
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, RunContext, ToolOutput, UsageLimits
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ModelResponse, ThinkingPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Rain(BaseModel):
    """Rain."""

    hard: bool


class Basket(BaseModel):
    """A schema with definitions, choices, bounds and defaults."""

    fruits: Annotated[list[Fruit], Field(max_length=2)]
    best: Fruit | Rain
    day: Literal["monday", "tuesday"] | None = None
    count: Annotated[int, Field(ge=0, le=9)] = 3


BODY = {"temperature": 0}
SETTINGS = ModelSettings(max_tokens=60, parallel_tool_calls=False, extra_body=BODY)


def chat() -> Model:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


def responses() -> Model:
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


def messages() -> Model:
    # By default only models with a name of Anthropic's are thought to have structured outputs.
    return AnthropicModel(
        MODEL,
        provider=AnthropicProvider(base_url=URL, api_key="none"),
        profile=ModelProfile(supports_json_schema_output=True),
    )


@dataclass
class FirstCalls(AbstractCapability[None]):
    """Requires a call of one of these tools in the first step; the next ones answer."""

    names: tuple[str, ...] = ("weather",)

    def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
        return lambda context: ModelSettings(
            tool_choice=list(self.names) if context.run_step == 1 else "none"
        )


def clock() -> str:
    """Says what time it is."""
    return "Noon"


def dice() -> str:
    """Rolls a die."""
    return "Six"


def forbidden(city: Literal["Paris", "Rome"]) -> str:
    """Says what the weather is like."""
    raise AssertionError(f"this tool was not allowed: {city}")


async def answers(model: Model) -> None:
    result = await Agent(model).run(ASK, model_settings=SETTINGS)
    assert result.output and result.response.finish_reason in ("stop", "length")
    assert result.usage.input_tokens and result.usage.output_tokens and result.usage.requests == 1


async def streams(model: Model) -> None:
    agent = Agent(model)
    whole = (await agent.run(ASK, model_settings=SETTINGS)).output
    async with agent.run_stream(ASK, model_settings=SETTINGS) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert len(pieces) > 1 and "".join(pieces) == whole == await stream.get_output()
        assert stream.usage.output_tokens and stream.response.finish_reason in ("stop", "length")


async def picks(model: Model, output: Any, **body: Any) -> None:
    agent = Agent(model, output_type=output)
    settings = SETTINGS | {"extra_body": BODY | body}
    assert isinstance((await agent.run(PICK, model_settings=settings)).output, Fruit)
    async with agent.run_stream(PICK, model_settings=settings) as stream:
        assert isinstance(await stream.get_output(), Fruit)


async def nests(model: Model) -> None:
    settings = SETTINGS | {"max_tokens": 400}
    for output in (ToolOutput(Basket), NativeOutput(Basket)):
        assert isinstance(
            (await Agent(model, output_type=output).run(PICK, model_settings=settings)).output, Basket
        )


async def chooses(model: Model) -> None:
    """Several types: one tool for each, or one schema for all."""
    for output in ([Fruit, Rain], NativeOutput([Fruit, Rain])):
        result = await Agent(model, output_type=output).run(PICK, model_settings=SETTINGS)
        assert isinstance(result.output, Fruit | Rain)


async def tries_again(model: Model) -> None:
    """The library answers the call of its output tool with what is wrong."""
    seen: list[Fruit] = []
    agent = Agent(model, output_type=ToolOutput(Fruit))

    @agent.output_validator
    def check(fruit: Fruit) -> Fruit:
        seen.append(fruit)
        if len(seen) == 1:
            raise ModelRetry("Pick another one.")
        return fruit

    result = await agent.run(PICK, model_settings=SETTINGS)
    assert len(seen) == result.usage.requests == 2


async def counts(model: Model) -> None:
    limits = UsageLimits(input_tokens_limit=1000, count_tokens_before_request=True)
    assert (await Agent(model).run(ASK, model_settings=SETTINGS, usage_limits=limits)).output
    few = UsageLimits(input_tokens_limit=5, count_tokens_before_request=True)
    try:
        await Agent(model).run(ASK, model_settings=SETTINGS, usage_limits=few)
    except UsageLimitExceeded:
        return
    raise AssertionError("a prompt of more than 5 tokens was sent")


async def calls(model: Model, output: Any = str, kind: type = str) -> None:
    agent = Agent(model, tools=[weather], capabilities=[FirstCalls()], output_type=output)
    result = await agent.run(WEATHER, model_settings=SETTINGS)
    parts = [part for message in result.all_messages() for part in message.parts]
    called = [part for part in parts if isinstance(part, ToolCallPart) and part.tool_name == "weather"]
    returned = [part for part in parts if isinstance(part, ToolReturnPart) and part.tool_name == "weather"]
    assert isinstance(result.output, kind) and result.usage.requests == 2
    assert len(called) == len(returned) == 1 and called[0].tool_call_id == returned[0].tool_call_id
    assert returned[0].content == f"Rain in {called[0].args_as_dict()['city']}"


async def stream_of_events(model: Model) -> None:
    agent = Agent(model, tools=[weather], capabilities=[FirstCalls()])
    async with agent.run_stream_events(WEATHER, model_settings=SETTINGS) as events:
        kinds = {event.event_kind async for event in events}
    assert {"function_tool_call", "function_tool_result", "part_delta", "agent_run_result"} <= kinds


def thoughts(message: ModelResponse) -> list[Any]:
    """Return the reasoning; over responses the library keeps apart what is no summary."""
    parts = [part for part in message.parts if isinstance(part, ThinkingPart)]
    return [part.content or (part.provider_details or {})["raw_content"] for part in parts]


async def thinks(model: Model, limit: int = 150, **body: Any) -> None:
    """Reasoning arrives apart from the text, and goes back with the next turn."""
    settings = SETTINGS | {"max_tokens": limit, "extra_body": BODY | body}
    agent = Agent(model)
    result = await agent.run(ASK, model_settings=settings)
    assert thoughts(result.response) and "think>" not in result.output
    async with agent.run_stream(ASK, model_settings=settings) as stream:
        assert await stream.get_output() == result.output
    assert thoughts(stream.response) == thoughts(result.response)
    again = await agent.run(ASK, message_history=result.all_messages(), model_settings=settings)
    assert again.output


async def calls_an_allowed_one(model: Model) -> None:
    agent = Agent(model, tools=[forbidden, clock, dice], capabilities=[FirstCalls(("clock", "dice"))])
    result = await agent.run(WEATHER, model_settings=SETTINGS)
    assert result.output and result.usage.requests == 2


async def case_chat():
    await answers(chat())


async def case_chat_stream():
    await streams(chat())


async def case_chat_tool_output():
    await picks(chat(), ToolOutput(Fruit))


async def case_chat_native_output():
    await picks(chat(), NativeOutput(Fruit))


async def case_chat_prompted_output():
    await picks(chat(), PromptedOutput(Fruit), response_format={"type": "regex", "pattern": FRUIT})


async def case_chat_nested_output():
    await nests(chat())


async def case_chat_choice_of_outputs():
    await chooses(chat())


async def case_chat_retry():
    await tries_again(chat())


async def case_chat_tools():
    await calls(chat())


async def case_chat_tools_and_native_output():
    await calls(chat(), NativeOutput(Fruit), Fruit)


async def case_chat_tools_and_tool_output():
    await calls(chat(), ToolOutput(Fruit), Fruit)


async def case_chat_stream_of_events():
    await stream_of_events(chat())


async def case_chat_thinking():
    await thinks(chat(), enable_thinking=True, thinking_budget=20)


async def case_chat_allowed_tools():
    await calls_an_allowed_one(chat())


async def case_responses():
    await answers(responses())


async def case_responses_stream():
    await streams(responses())


async def case_responses_tool_output():
    await picks(responses(), ToolOutput(Fruit))


async def case_responses_native_output():
    await picks(responses(), NativeOutput(Fruit))


async def case_responses_prompted_output():
    await picks(responses(), PromptedOutput(Fruit), text={"format": {"type": "regex", "pattern": FRUIT}})


async def case_responses_nested_output():
    await nests(responses())


async def case_responses_choice_of_outputs():
    await chooses(responses())


async def case_responses_retry():
    await tries_again(responses())


async def case_responses_count():
    await counts(responses())


async def case_responses_tools():
    await calls(responses())


async def case_responses_tools_and_native_output():
    await calls(responses(), NativeOutput(Fruit), Fruit)


async def case_responses_stream_of_events():
    await stream_of_events(responses())


async def case_responses_thinking():
    await thinks(responses(), 800, reasoning={"effort": "minimal"})


async def case_responses_allowed_tools():
    await calls_an_allowed_one(responses())


async def case_anthropic():
    await answers(messages())


async def case_anthropic_stream():
    await streams(messages())


async def case_anthropic_tool_output():
    await picks(messages(), ToolOutput(Fruit))


async def case_anthropic_native_output():
    await picks(messages(), NativeOutput(Fruit))


async def case_anthropic_prompted_output():
    form = {"format": {"type": "regex", "pattern": FRUIT}}
    await picks(messages(), PromptedOutput(Fruit), output_config=form)


async def case_anthropic_nested_output():
    await nests(messages())


async def case_anthropic_choice_of_outputs():
    await chooses(messages())


async def case_anthropic_retry():
    await tries_again(messages())


async def case_anthropic_count():
    await counts(messages())


async def case_anthropic_tools():
    await calls(messages())


async def case_anthropic_tools_and_native_output():
    await calls(messages(), NativeOutput(Fruit), Fruit)


async def case_anthropic_stream_of_events():
    await stream_of_events(messages())


async def case_anthropic_thinking():
    await thinks(messages(), thinking={"type": "enabled", "budget_tokens": 20})


async def case_anthropic_allowed_tools():
    await calls_an_allowed_one(messages())


if __name__ == "__main__":
    run(globals())
