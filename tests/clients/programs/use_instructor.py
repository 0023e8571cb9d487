"""instructor in every mode that it has for OpenAI and Anthropic."""

import warnings
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
from cases import FRUIT, MODEL, PICK, URL, Fruit, run
from instructor import Mode
from pydantic import BaseModel, ConfigDict

warnings.simplefilter("ignore", DeprecationWarning)  # old names of modes
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": PICK}],
    "max_tokens": 300,
    "max_retries": 0,
}
GREEDY = {"temperature": 0}  # in the body: anthropic's `create` has no such argument
# The mode leaves the choice to the model. The penalty ends the list of calls.
CALLS = GREEDY | {"tool_choice": "required", "frequency_penalty": 2}
# Some modes only ask in words, which so small a model does not follow.
ONLY_FRUIT = {"output_config": {"format": {"type": "regex", "pattern": FRUIT}}}


class Anything(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="allow")


class Weather(BaseModel):
    """Asks for the weather of a city."""

    rainy: bool


def chat(mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode)


def messages(mode: Mode) -> instructor.Instructor:
    return instructor.from_anthropic(
        anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0), mode=mode
    )


def picks(client: instructor.Instructor, **body: Any) -> None:
    """Check an answer, and the usage of the completion behind it."""
    fruit, whole = client.create_with_completion(response_model=Fruit, extra_body=GREEDY | body, **ASKED)
    assert isinstance(fruit, Fruit)
    spent = whole.usage
    assert getattr(spent, "completion_tokens", None) or spent.output_tokens
    assert getattr(spent, "prompt_tokens", None) or spent.input_tokens


def case_tools():
    picks(chat(Mode.TOOLS))


def case_tools_strict():
    picks(chat(Mode.TOOLS_STRICT))


def case_functions():
    picks(chat(Mode.FUNCTIONS))


def case_json():
    answer = chat(Mode.JSON).create(response_model=Anything, extra_body=GREEDY, **ASKED)
    assert isinstance(answer, Anything)


def case_json_o1():
    picks(chat(Mode.JSON_O1))


def case_json_schema():
    picks(chat(Mode.JSON_SCHEMA))


def case_md_json():
    picks(chat(Mode.MD_JSON), response_format={"type": "regex", "pattern": f"```json\n{FRUIT}\n```"})


def case_parallel_tools():
    client = chat(Mode.PARALLEL_TOOLS)
    found = list(client.create(response_model=Iterable[Fruit | Weather], extra_body=CALLS, **ASKED))
    assert len(found) > 1 and all(isinstance(each, Fruit | Weather) for each in found)


def case_responses_tools():
    picks(chat(Mode.RESPONSES_TOOLS))


def case_responses_tools_with_inbuilt_tools():
    picks(chat(Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS))


def partials(client: instructor.Instructor) -> None:
    *_, last = client.create_partial(response_model=Fruit, extra_body=GREEDY, **ASKED)
    assert Fruit(**last.model_dump())


def case_partial_tools():
    partials(chat(Mode.TOOLS))


def case_partial_json_schema():
    partials(chat(Mode.JSON_SCHEMA))


def case_partial_responses_tools():
    partials(chat(Mode.RESPONSES_TOOLS))


def case_iterable_tools():
    found = list(chat(Mode.TOOLS).create_iterable(response_model=Fruit, extra_body=GREEDY, **ASKED))
    assert all(isinstance(each, Fruit) for each in found)


async def case_async_tools():
    client = instructor.from_openai(
        openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), Mode.TOOLS
    )
    fruit = await client.create(response_model=Fruit, extra_body=GREEDY, **ASKED)
    assert isinstance(fruit, Fruit)


def case_anthropic_tools():
    picks(messages(Mode.ANTHROPIC_TOOLS))


def case_anthropic_reasoning_tools():
    picks(messages(Mode.ANTHROPIC_REASONING_TOOLS))


def case_anthropic_json():
    picks(messages(Mode.ANTHROPIC_JSON), **ONLY_FRUIT)


def case_anthropic_json_schema():
    # Without `output_format` in anthropic's `create` this mode, too, asks in words.
    picks(messages(Mode.JSON_SCHEMA), **ONLY_FRUIT)


def case_anthropic_parallel_tools():
    client, body = messages(Mode.ANTHROPIC_PARALLEL_TOOLS), CALLS | {"tool_choice": {"type": "any"}}
    found = list(client.create(response_model=Iterable[Fruit | Weather], extra_body=body, **ASKED))
    assert len(found) > 1 and all(isinstance(each, Fruit | Weather) for each in found)


def case_anthropic_partial_tools():
    partials(messages(Mode.ANTHROPIC_TOOLS))


if __name__ == "__main__":
    run(globals())
