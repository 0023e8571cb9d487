"""`from bough import LLM, SamplingParams`."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import bough
from bough import LLM, SamplingParams
from bough.errors import ModelNotFound, PromptTooLong, UsageError
from tests.hub.fake_hub import FakeHub
from tests.hub.fake_pairs import DRAFT, add_pair, use_hub

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/python.md"
PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_ctx=1024, device="cpu") as made:
        yield made


def test_the_page_runs(capsys):
    """All blocks of the page as one program, which is what readers paste."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) > 7
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "page"})
    assert "tokens a step" in capsys.readouterr().out


def test_importing_is_quick_and_the_names_are_there():
    script = "import sys, bough; print('torch' in sys.modules, 'LLM' in dir(bough))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "True"], result.stderr
    assert all(hasattr(bough, name) for name in bough.__all__)


def test_the_text_and_the_draft_are_those_of_the_command_line(llm):
    command = [sys.executable, "-m", "bough", "run", "-p", PROMPT, "-n", "60", "--greedy", "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    answer = llm.chat(PROMPT, SamplingParams(max_tokens=60))
    assert answer == answer.text == shown["text"] and answer.tokens == shown["tokens"]
    assert str(llm.draft) == shown["draft"]  # how often it is called follows from measured costs
    assert answer.outputs[0] is answer and answer.finish_reason == "stop"


def test_sampling_is_the_recommended_one_unless_given(llm):
    assert llm.chat("Hi", max_tokens=3).stats.seed != llm.chat("Hi", max_tokens=3).stats.seed
    seeded = SamplingParams(temperature=0.9, seed=3, max_tokens=12)
    assert llm.chat("Hi", seeded) == llm.chat("Hi", seeded)
    assert len(llm.chat("Hi", seeded, max_tokens=2).tokens) == 2  # what the call says wins


def test_a_stream_is_the_answer_and_can_be_left(llm):
    whole = llm.chat(PROMPT, SamplingParams(max_tokens=30))
    stream = llm.chat(PROMPT, SamplingParams(max_tokens=30), stream=True)
    assert "".join(stream) == whole and stream.answer() == whole and stream.reasoning == ""
    with llm.chat("Tell a story.", SamplingParams(max_tokens=900), stream=True) as left:
        next(left)
    assert list(left) == []
    assert llm.chat(PROMPT, SamplingParams(max_tokens=30)) == whole


def test_prompts_are_answered_in_order(llm):
    prompts = ["def a(", "def b(", llm.tokenizer.encode("def c(")]
    params = [SamplingParams(max_tokens=count) for count in (2, 3, 4)]
    outputs = llm.generate(prompts, params)
    assert [len(each.tokens) for each in outputs] == [2, 3, 4]
    assert [each.prompt for each in outputs] == prompts
    assert llm.generate("def a(", params[0])[0] == outputs[0]
    assert llm.generate(prompts[2], params[2])[0] == outputs[2]
    with pytest.raises(UsageError, match="sampling has 3 entries, needed 1"):
        llm.generate("x", params)


def test_stops_schemas_tools_and_log_probabilities(llm):
    cut = llm.generate("a b c d a b c d a b c", SamplingParams(max_tokens=20, stop="d"))[0]
    assert "d" not in cut
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    assert llm.chat("n?", schema=schema).json()["n"] in (1, 2)
    assert re.fullmatch("[ab]{3}", llm.chat("n?", regex="[ab]{3}"))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    called = llm.chat("n?", tools=[tool], tool_choice="f")
    assert called.finish_reason == "tool_calls" and called == ""
    (call,) = called.tool_calls
    assert call.name == "f" and call.arguments["n"] in (1, 2) and call.id
    with_logprobs = llm.chat("Hi", SamplingParams(logprobs=2, max_tokens=3))
    assert [each.id for each in with_logprobs.logprobs] == with_logprobs.tokens
    first = with_logprobs.logprobs[0]
    assert len(first.top) == 2 and first.top[first.text] == first.logprob < 0


def test_pydantic_models_are_schemas(llm):
    from pydantic import BaseModel

    class Point(BaseModel):
        x: bool

    assert Point.model_validate_json(llm.chat("x?", schema=Point)).x in (True, False)
    with pytest.raises(UsageError, match="needed a JSON schema or a pydantic model"):
        llm.chat("x?", schema=int)


def test_from_an_event_loop_and_from_threads(llm):
    whole = llm.chat(PROMPT, SamplingParams(max_tokens=20))

    async def several() -> list[str]:
        streamed = "".join([piece async for piece in llm.astream(PROMPT, SamplingParams(max_tokens=20))])
        jobs = [llm.achat(PROMPT, SamplingParams(max_tokens=20)) for _ in range(3)]
        return [streamed, *await asyncio.gather(*jobs)]

    assert asyncio.run(several()) == [whole] * 4
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(llm.chat(PROMPT, SamplingParams(max_tokens=20))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [whole] * 3


def test_mistakes_raise_and_leave_the_model_usable(llm):
    with pytest.raises(PromptTooLong):
        llm.chat("x " * 3000)
    with pytest.raises(UsageError, match="there is no option temperature"):
        llm.chat("x", temperature=1)
    with pytest.raises(UsageError, match="top_p is 2"):
        SamplingParams(top_p=2)
    with pytest.raises(UsageError, match="both given"):
        llm.chat("x", schema={}, regex="a")
    for messages in (5, "", ["hi"], None):
        with pytest.raises(UsageError, match=r"messages is|the message is empty"):
            llm.chat(messages)
    with pytest.raises(UsageError, match="effort is 'much'"):
        llm.chat("x", effort="much")
    assert llm.chat("Hi", max_tokens=1).tokens


def test_a_closed_one_says_so(tiny_model):
    other = LLM(tiny_model(), draft=None, progress=False)
    assert repr(other) == f"<LLM {tiny_model().stem}>"
    other.close()
    assert repr(other).endswith(", closed>")
    with pytest.raises(UsageError, match="is closed"):
        other.chat("Hi")


def test_the_package_shows_its_public_names():
    assert set(dir(bough)) == {*bough.__all__, "__version__"}


@pytest.mark.parametrize("name", ["nope.gguf", "no-such-model"])
def test_a_model_that_is_not_there(name):
    with pytest.raises(ModelNotFound, match="no such file"):
        LLM(name)


def test_drafts_by_name(tiny_model, tmp_path, monkeypatch):
    """A short name brings its draft; None and `lookup` propose without one."""
    hub = FakeHub()
    add_pair(hub, tiny_model(), tmp_path / "made")
    use_hub(monkeypatch, tmp_path / "hub", hub.endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        with LLM("qwen3.6-27b", device="cpu") as llm:
            assert llm.name == "qwen3.6-27b" and DRAFT.replace("/", "--") in str(llm.draft)
            drafted = llm.generate("hello", SamplingParams(max_tokens=8))
    finally:
        hub.close()
    for draft in (None, "lookup"):
        with LLM(tiny_model(), draft=draft, device="cpu") as llm:
            assert llm.draft is None and llm.generate("hello", SamplingParams(max_tokens=8)) == drafted
