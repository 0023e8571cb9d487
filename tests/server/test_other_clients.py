"""Client libraries: litellm, llm, langchain-openai."""

import json
import os

import pydantic
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llm.default_plugins.openai_models import Chat

from tests.server.live import Live

ASK = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture(scope="module")
def litellm():
    # By default litellm fetches a price list from the network.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    return litellm


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(litellm, provider: str, pair_server: Live):
    base = f"{pair_server.url}/v1" if provider == "openai" else pair_server.url
    options = {"model": f"{provider}/some-model", "messages": ASK, "api_base": base, "api_key": "none"}
    options |= {"max_tokens": 6, "temperature": 0}
    whole = litellm.completion(**options).choices[0].message.content
    chunks = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert whole
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**options | {"temperature": 500})


def test_litellm_tools_and_reasoning(litellm, echo_server: Live):
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    answer = litellm.completion(
        model="openai/m",
        messages=ASK,
        tools=tools,
        api_base=f"{echo_server.url}/v1",
        api_key="none",
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message = answer.choices[0].message
    assert message.reasoning_content == "Hmm. Yes."
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_llm(pair_server: Live):
    model = Chat("local", key="none", model_name="some-model", api_base=f"{pair_server.url}/v1")
    texts = []
    for stream in (True, False):
        answer = model.prompt(ASK[0]["content"], stream=stream, max_tokens=6, temperature=0)
        texts.append("".join(answer))
        usage = answer.usage()
        assert usage.output == 6 and usage.input > 6
    assert texts[0] == texts[1] != ""


class Fruit(pydantic.BaseModel):
    """A fruit."""

    kind: str = pydantic.Field(pattern="^(apple|pear)$")
    ripe: bool


def langchain(server: Live, **options) -> ChatOpenAI:
    return ChatOpenAI(
        model="some-model",
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        **options,
    )


def test_langchain(pair_server: Live):
    chat = langchain(pair_server, max_completion_tokens=6)
    whole = chat.invoke(ASK[0]["content"])
    assert "".join(chunk.text for chunk in chat.stream(ASK[0]["content"])) == whole.text
    assert whole.usage_metadata["output_tokens"] == 6
    picked = langchain(pair_server, max_completion_tokens=60).with_structured_output(
        Fruit, method="json_schema", strict=True
    )
    assert picked.invoke("Pick a fruit.").kind in ("apple", "pear")


def test_langchain_tools(echo_server: Live):
    @tool
    def weather(city: str) -> str:
        """Says what the weather is like."""
        return f"Rain in {city}"

    answer = langchain(echo_server).bind_tools([weather]).invoke("The weather?")
    assert answer.tool_calls[0]["name"] == "weather" and answer.tool_calls[0]["args"] == {"city": "Paris"}
    responses = langchain(echo_server, use_responses_api=True).bind_tools([weather]).invoke("The weather?")
    assert responses.tool_calls[0]["args"] == {"city": "Paris"}
