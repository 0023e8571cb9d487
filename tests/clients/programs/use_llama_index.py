"""LlamaIndex over the completions, chat, responses and Anthropic protocols."""

import contextlib
from typing import Any

import cases
import openai
from cases import ASK, FRUIT, MODEL, PICK, URL, WEATHER, Fruit, run
from llama_index.core.agent.workflow import AgentOutput, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program import FunctionCallingProgram, LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=ASK)]
WHICH = PromptTemplate(PICK)
SERVER: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}


def chat(**options: Any) -> OpenAILike:
    given = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 60} | options
    return OpenAILike(model=MODEL, **SERVER, **given)


def responses() -> OpenAILikeResponses:
    return OpenAILikeResponses(
        model=MODEL, is_function_calling_model=True, max_output_tokens=60, context_window=4096, **SERVER
    )


def messages() -> Anthropic:
    # The class takes its limits from a list of models.
    return Anthropic(
        model="claude-3-haiku-20240307",
        base_url=URL,
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=60,
    )


def answers(llm: FunctionCallingLLM) -> None:
    whole = llm.chat(HELLO)
    *_, last = pieces = list(llm.stream_chat(HELLO))
    assert whole.message.content and len(pieces) > 1
    assert "".join(piece.delta or "" for piece in pieces) == last.message.content == whole.message.content
    *_, ended = llm.stream_complete(ASK)
    assert llm.complete(ASK).text == ended.text != ""


def picks(llm: Any) -> None:
    assert isinstance(llm.structured_predict(Fruit, WHICH), Fruit)
    raw = llm.as_structured_llm(Fruit).chat([ChatMessage(role="user", content=PICK)]).raw
    assert isinstance(raw, Fruit)


def program(llm: FunctionCallingLLM, choice: Any) -> FunctionCallingProgram:
    """Where `structured_predict` would leave the choice to the model."""
    return FunctionCallingProgram.from_defaults(output_cls=Fruit, prompt=WHICH, llm=llm, tool_choice=choice)


def calls(llm: FunctionCallingLLM) -> None:
    """One call, and the answer to its result."""
    tool = FunctionTool.from_defaults(cases.weather)
    first = llm.chat_with_tools([tool], user_msg=WEATHER, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(first)
    result = tool.call(**call.tool_kwargs)
    assert call.tool_name == "weather" and result.content.startswith("Rain in ")
    reply = ChatMessage(role="tool", content=result.content, additional_kwargs={"tool_call_id": call.tool_id})
    asked = ChatMessage(role="user", content=WEATHER)
    assert llm.chat([asked, first.message, reply]).message.content


def calls_the_named_one(llm: FunctionCallingLLM) -> None:
    first = llm.chat_with_tools([FunctionTool.from_defaults(cases.weather)], WEATHER, tool_choice="weather")
    assert [call.tool_name for call in llm.get_tool_calls_from_response(first)] == ["weather"]


def calls_in_a_stream(llm: FunctionCallingLLM) -> None:
    tool = FunctionTool.from_defaults(cases.weather)
    *_, last = llm.stream_chat_with_tools(
        [tool], user_msg=WEATHER, tool_required=True, allow_parallel_tool_calls=False
    )
    (call,) = llm.get_tool_calls_from_response(last)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Paris", "Rome")


async def agent(llm: FunctionCallingLLM, required: str = "required", *, streaming: bool) -> None:
    """The agent calls the tool, then answers."""
    worker = FunctionAgent(
        tools=[FunctionTool.from_defaults(cases.weather)],
        llm=llm,
        initial_tool_choice=required,
        allow_parallel_tool_calls=False,
        streaming=streaming,
    )
    running = worker.run(WEATHER)
    events = [event async for event in running.stream_events()]
    output = await running
    results = [event for event in events if isinstance(event, ToolCallResult)]
    assert isinstance(output, AgentOutput) and results and output.response.content
    assert results[0].tool_output.content.startswith("Rain in ")


def case_completions():
    llm = OpenAILike(model=MODEL, is_chat_model=False, max_tokens=20, **SERVER)
    *_, last = pieces = list(llm.stream_complete("def add(a, b):"))
    whole = llm.complete("def add(a, b):")
    assert "".join(piece.delta or "" for piece in pieces) == last.text == whole.text != ""


def case_chat():
    answers(chat())


async def case_chat_async():
    llm = chat()
    whole = await llm.achat(HELLO)
    pieces = [piece.delta or "" async for piece in await llm.astream_chat(HELLO)]
    assert "".join(pieces) == whole.message.content != ""


def case_chat_usage():
    counts = chat().chat(HELLO).additional_kwargs
    assert counts["prompt_tokens"] > 0 and counts["completion_tokens"] > 0


def case_chat_structured_by_tool():
    picks(chat())


def case_chat_structured_by_schema():
    picks(chat(should_use_structured_outputs=True))


def case_chat_structured_by_words():
    only = {"extra_body": {"response_format": {"type": "regex", "pattern": FRUIT}}}
    llm = chat(is_function_calling_model=False, additional_kwargs=only)
    assert isinstance(
        LLMTextCompletionProgram.from_defaults(output_cls=Fruit, prompt=WHICH, llm=llm)(), Fruit
    )


def case_chat_structured_stream():
    *_, last = program(chat(), "required").stream_call()
    assert Fruit(**last.model_dump())


def case_chat_tools():
    calls(chat())


def case_chat_named_tool():
    calls_the_named_one(chat())


def case_chat_tools_stream():
    calls_in_a_stream(chat())


async def case_chat_agent():
    await agent(chat(), streaming=False)


async def case_chat_agent_stream():
    await agent(chat(), streaming=True)


def case_openai_class():
    """OpenAI's own class, which knows its models by name."""
    llm = OpenAI(model="gpt-4o", max_tokens=60, **SERVER)
    answers(llm)
    picks(llm)
    calls(llm)


def case_responses():
    answers(responses())


def case_responses_structured():
    picks(responses())


def case_responses_tools():
    calls(responses())


def case_responses_named_tool():
    """LlamaIndex names the tool as chat does, which a server may refuse but not ignore."""
    with contextlib.suppress(openai.BadRequestError):
        calls_the_named_one(responses())


async def case_responses_agent():
    await agent(responses(), streaming=False)


async def case_responses_agent_stream():
    await agent(responses(), streaming=True)


def case_anthropic():
    answers(messages())


def case_anthropic_structured():
    assert isinstance(program(messages(), {"type": "any"})(), Fruit)


def case_anthropic_tools():
    calls(messages())


def case_anthropic_tools_stream():
    calls_in_a_stream(messages())


if __name__ == "__main__":
    run(globals())
