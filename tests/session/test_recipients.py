"""A model whose answers are messages with recipients, through Python's door."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bough import LLM
from bough.errors import UsageError
from tests.gguf_edit import edited
from tests.text.test_recipients import MARKS, TEMPLATE

ASKED = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("muse") / "model.gguf"
    keys = {"tokenizer.chat_template": TEMPLATE}
    with LLM(
        edited(tiny_model("muse-glimmer"), path, keys=keys, controls=(*MARKS, "<|eot|>")),
        draft=None,
        max_ctx=512,
    ) as model:
        yield model


def test_without_reasoning_the_answer_is_the_message_to_the_user(llm: LLM) -> None:
    answer = llm.chat(ASKED, max_tokens=20, thinking=False)
    assert answer.text and not answer.reasoning and answer.finish_reason == "length"


def test_a_header_is_no_text(llm: LLM) -> None:
    """A random model writes no mark that would end it."""
    answer = llm.chat(ASKED, max_tokens=20)
    assert len(answer.tokens) == 20 and not answer.text and not answer.reasoning


def test_a_schema_is_for_the_message_to_the_user(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert set(llm.chat(ASKED, max_tokens=80, schema=schema).json()) == {"a"}


def test_a_call_cannot_be_enforced(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(UsageError, match="has no tool calls, so none can be enforced"):
        llm.chat(ASKED, tools=[tool], tool_choice="required")
