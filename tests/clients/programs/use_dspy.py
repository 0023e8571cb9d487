"""dspy: its adapters and modules, with typed outputs, over the chat, responses and Anthropic protocols."""

import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else fetched from the network

import dspy
from cases import ASK, FRUIT, PICK, URL, WEATHER, Fruit, run, weather

# dspy asks for schemas only from models that it knows.
NAME = "openai/gpt-4o-mini"


class Pick(dspy.Signature):
    """Pick a fruit."""

    question: str = dspy.InputField()
    kind: Literal["apple", "pear"] = dspy.OutputField()
    ripe: bool = dspy.OutputField()


class PickWhole(dspy.Signature):
    """Pick a fruit."""

    question: str = dspy.InputField()
    fruit: Fruit = dspy.OutputField()


class Ask(dspy.Signature):
    """Find out what the weather is like."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


class Report(dspy.Signature):
    """Say what the weather is like."""

    question: str = dspy.InputField()
    rainy: bool = dspy.OutputField()


def lm(name: str = NAME, **options: Any) -> dspy.LM:
    given = {"api_base": f"{URL}/v1", "max_tokens": 200, "temperature": 0} | options
    return dspy.LM(name, api_key="none", cache=False, num_retries=0, **given)


def only(pattern: str, **options: Any) -> dspy.LM:
    """ChatAdapter and XMLAdapter ask in words, which so small a model does not follow."""
    return lm(extra_body={"response_format": {"type": "regex", "pattern": pattern}}, **options)


def fields(**patterns: str) -> str:
    """Return the pattern of an answer to ChatAdapter."""
    parts = [rf"\[\[ ## {name} ## \]\]\n{pattern}\n\n" for name, pattern in patterns.items()]
    return "".join(parts) + r"\[\[ ## completed ## \]\]"


WORDS, KINDS, TRUTH = "[a-z ]{1,30}", "(apple|pear)", "(True|False)"
CHAT = dspy.ChatAdapter(use_json_adapter_fallback=False)


def picks(model: dspy.LM, adapter: dspy.Adapter, module: type[dspy.Module] = dspy.Predict) -> dspy.Prediction:
    with dspy.context(lm=model, adapter=adapter, track_usage=True):
        found = module(Pick)(question=PICK)
    assert found.kind in ("apple", "pear") and isinstance(found.ripe, bool)
    (spent,) = found.get_lm_usage().values()
    assert spent["completion_tokens"] and spent["prompt_tokens"]
    return found


def case_lm():
    (answer,) = lm()(ASK)
    assert answer


def case_lm_litellm():
    (answer,) = lm(engine="litellm")(ASK)
    assert answer


def case_lm_text():
    (answer,) = lm(model_type="text", max_tokens=20)("def add(a, b):")
    assert answer


def case_lm_responses():
    (answer,) = lm(model_type="responses")(ASK)
    assert answer["text"] if isinstance(answer, dict) else answer


def case_lm_anthropic():
    (answer,) = lm("anthropic/claude-3-haiku-20240307", api_base=URL)(ASK)
    assert answer


def case_json_adapter():
    picks(lm(), dspy.JSONAdapter())


def case_json_adapter_litellm():
    picks(lm(engine="litellm"), dspy.JSONAdapter())


def case_json_adapter_responses():
    picks(lm(model_type="responses"), dspy.JSONAdapter())


def case_json_adapter_object():
    with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(PickWhole)(question=PICK).fruit, Fruit)


def case_json_adapter_chain_of_thought():
    found = picks(lm(max_tokens=600, frequency_penalty=1), dspy.JSONAdapter(), dspy.ChainOfThought)
    assert isinstance(found.reasoning, str)


def case_chat_adapter():
    picks(only(fields(kind=KINDS, ripe=TRUTH)), CHAT)


def case_chat_adapter_object():
    with dspy.context(lm=only(fields(fruit=FRUIT)), adapter=CHAT):
        assert isinstance(dspy.Predict(PickWhole)(question=PICK).fruit, Fruit)


def case_chat_adapter_chain_of_thought():
    found = picks(only(fields(reasoning=WORDS, kind=KINDS, ripe=TRUTH)), CHAT, dspy.ChainOfThought)
    assert found.reasoning


def case_chat_adapter_falls_back():
    """Free text does not parse; the adapter then asks again with a schema."""
    picks(lm(), dspy.ChatAdapter())


def case_xml_adapter():
    picks(only(r"<kind>(apple|pear)</kind>\n<ripe>(True|False)</ripe>"), dspy.XMLAdapter())


def case_react():
    """The tool is called twice, then the answer is extracted."""
    city = r"\{\"city\": \"(Paris|Rome)\"\}"
    module = dspy.ReAct(Report, tools=[weather], max_iters=2)
    module.react.set_lm(only(fields(next_thought=WORDS, next_tool_name="weather", next_tool_args=city)))
    module.extract.set_lm(only(fields(reasoning=WORDS, rainy=TRUTH)))
    with dspy.context(adapter=CHAT):
        found = module(question=WEATHER)
    path = found.trajectory
    assert isinstance(found.rainy, bool) and path["tool_name_0"] == path["tool_name_1"] == "weather"
    assert path["observation_1"] == f"Rain in {path['tool_args_1']['city']}"


def calls_natively(**options: Any) -> None:
    model = lm(tool_choice="required", parallel_tool_calls=False, **options)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Ask)(question=WEATHER, tools=[dspy.Tool(weather)])
    (call,) = found.calls.tool_calls
    assert call.name == "weather" and call.args["city"] in ("Paris", "Rome")


def case_native_tools():
    calls_natively(engine="lm15")


def case_native_tools_litellm():
    calls_natively(engine="litellm")


async def case_async():
    with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
        assert (await dspy.Predict(Pick).acall(question=PICK)).kind in ("apple", "pear")


async def case_stream():
    listener = dspy.streaming.StreamListener(signature_field_name="kind")
    with dspy.context(lm=only(fields(kind=KINDS, ripe=TRUTH)), adapter=CHAT):
        stream = dspy.streamify(dspy.Predict(Pick), stream_listeners=[listener])
        *pieces, last = [piece async for piece in stream(question=PICK)]
    assert isinstance(last, dspy.Prediction) and "".join(piece.chunk for piece in pieces).strip() == last.kind


if __name__ == "__main__":
    run(globals())
