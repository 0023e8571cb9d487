"""Ollama's own Python client."""

import cases
from cases import ASK, FRUIT, MODEL, PICK, URL, WEATHER, Fruit, run
from ollama import AsyncClient, Client, ResponseError

del FRUIT  # of programs whose answers nothing else constrains
client = Client(host=URL)
GREEDY = {"temperature": 0, "num_predict": 40}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]


def case_chat() -> None:
    answer = client.chat(model=MODEL, messages=HELLO, options=GREEDY)
    assert answer.done and answer.done_reason in ("stop", "length") and answer.model == MODEL
    assert answer.message.role == "assistant" and answer.message.content
    assert answer.prompt_eval_count > 5 and 0 < answer.eval_count <= 40 and answer.eval_duration > 0
    pieces = list(client.chat(model=MODEL, messages=HELLO, options=GREEDY, stream=True))
    assert len(pieces) > 2 and pieces[-1].done and not pieces[0].done
    assert "".join(each.message.content for each in pieces) == answer.message.content


def case_generate() -> None:
    answer = client.generate(
        model=MODEL, prompt="def add(a, b):", raw=True, options=GREEDY | {"stop": ["\n\n"]}
    )
    assert answer.response and "\n\n" not in answer.response
    pieces = list(client.generate(model=MODEL, prompt=ASK, system="Be brief.", options=GREEDY, stream=True))
    assert pieces[-1].done and "".join(each.response for each in pieces)
    assert client.generate(model=MODEL).done_reason == "load"


def case_format() -> None:
    asked = [{"role": "user", "content": PICK}]
    answer = client.chat(model=MODEL, messages=asked, format=Fruit.model_json_schema(), options=GREEDY)
    assert Fruit.model_validate_json(answer.message.content)


def case_tools() -> None:
    """The model cannot be forced to call here: what is sent back with a call is understood."""
    asked = [{"role": "user", "content": WEATHER}]
    first = client.chat(model=MODEL, messages=asked, tools=[cases.weather], options=GREEDY)
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    after = [
        *asked,
        {"role": "assistant", "content": first.message.content or "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "Rain in Paris"},
    ]
    second = client.chat(model=MODEL, messages=after, tools=[cases.weather], options=GREEDY)
    assert second.done and second.prompt_eval_count > first.prompt_eval_count


def case_about() -> None:
    (model,) = client.list().models
    assert model.model == "bough-40m" and model.size > 10_000_000 and model.details.format == "gguf"
    shown = client.show(MODEL)
    assert "tools" in shown.capabilities and shown.modelinfo["general.architecture"] == "qwen35"
    assert shown.template and client.ps().models[0].model == "bough-40m"


def case_errors() -> None:
    for wrong in ({"options": {"num_predict": 0}}, {"options": {"temperature": -1}}):
        try:
            client.chat(model=MODEL, messages=HELLO, **wrong)
        except ResponseError as error:
            assert error.status_code == 400 and error.error, wrong
        else:
            raise AssertionError(wrong)


async def case_async() -> None:
    made = AsyncClient(host=URL)
    text = ""
    async for piece in await made.chat(model=MODEL, messages=HELLO, options=GREEDY, stream=True):
        text += piece.message.content
    assert text


if __name__ == "__main__":
    run(globals())
