"""Answers in messages with recipients, and the templates that have them."""

from collections.abc import Sequence

import pytest

from bough.text.output import Delta, OutputParser
from bough.text.recipients import RecipientStream
from bough.text.template import ChatTemplate
from bough.text.tools import Tool

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endfor %}"
    "{{ 'Reasoning strength: ' + reasoning_strength | default('high') }}"
    "{% if tools %}<atem:function_calls><|eom|>{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKS = ("<|start|>", "<|message|>", "<|eom|>")
ADD = [Tool("add", {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}})]
CALL = (
    ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n'
    '<atem:parameter name="a">1</atem:parameter>\n'
    '<atem:parameter name="note">two\n "lines" </atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
ARGUMENTS = '{"a": 1, "note": "two\\n \\"lines\\" "}'


def pieces(text: str) -> list[str]:
    """Return a text as tokens: characters and marks."""
    tokens = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), text[0])
        tokens.append(mark)
        text = text.removeprefix(mark)
    return tokens


def parsed(text: str, *, begun: str = "", whole: bool = True, tools: Sequence[Tool] = ADD) -> dict[str, str]:
    """Return what a text is for the user, by kind; calls with their arguments."""
    tokens = pieces(text)
    ids = {token: number for number, token in enumerate(sorted({*tokens, *MARKS}))}
    names = {number: token for token, number in ids.items()}
    stream = RecipientStream(lambda id: names[id].encode(), ids.get, recipient=begun)
    state = {"": "possible", "self": "open", "user": "none"}[begun]
    parser, deltas = OutputParser(reasoning=state, tools=tools), list[Delta]()
    for token in tokens:
        deltas += parser.push(stream.push([ids[token]]))
    deltas += [*parser.push(stream.flush()), *parser.flush(whole=whole)]
    kinds: dict[str, str] = {}
    for delta in deltas:
        kinds[delta.kind] = kinds.get(delta.kind, "") + delta.text
    return kinds


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (" to=user<|message|>Hello,\nworld", {"content": "Hello,\nworld"}),
        ("<|message|>Hello", {"content": "Hello"}),
        (
            " to=self<|message|>Well.<|eom|><|start|>assistant to=user<|message|>Hello",
            {"reasoning": "Well.", "content": "Hello"},
        ),
        (
            " to=self<|message|>One<|eom|><|start|>assistant to=self<|message|>two<|eom|>"
            "<|start|>assistant to=user<|message|>Hello",
            {"reasoning": "One\n\ntwo", "content": "Hello"},
        ),
        (CALL, {"call": "add", "arguments": ARGUMENTS}),
        (
            " to=user<|message|>I add.<|eom|><|start|>assistant" + CALL,
            {"content": "I add.", "call": "add", "arguments": ARGUMENTS},
        ),
        (
            CALL + "<|eom|><|start|>assistant" + CALL,
            {"call": "addadd", "arguments": ARGUMENTS * 2},
        ),
        # Quoted, or in reasoning, it is no call.
        (CALL.replace("=add<", "=user<"), {"content": CALL.partition("<|message|>")[2]}),
        (
            CALL.replace("=add<", "=self<") + "<|eom|><|start|>assistant to=user<|message|>Hi",
            {"reasoning": CALL.partition("<|message|>")[2], "content": "Hi"},
        ),
        # A stray mark inside of a message is none.
        (" to=user<|message|>a<|message|>b", {"content": "ab"}),
    ],
)
def test_messages_are_sorted_by_recipient(text: str, kinds: dict[str, str]) -> None:
    assert parsed(text) == kinds


@pytest.mark.parametrize("end", [5, 30, len(CALL) - 40])
def test_what_was_cut_off_is_no_text(end: int) -> None:
    assert parsed(CALL[:end], whole=False) == {}
    assert parsed(" to=self<|message|>Well", whole=False) == {"reasoning": "Well"}


def test_an_answer_goes_on_in_the_message_that_the_prompt_began() -> None:
    assert parsed("world", begun="user") == {"content": "world"}
    after = parsed("more<|eom|><|start|>assistant to=user<|message|>Hello", begun="self")
    assert after == {"reasoning": "more", "content": "Hello"}


def rendered(**options) -> str:
    messages = [{"role": "user", "content": "Hi"}, *options.pop("messages", [])]
    return ChatTemplate(TEMPLATE).render(messages, **options).text


def test_the_prompt_begins_the_message_that_is_wanted() -> None:
    template = ChatTemplate(TEMPLATE)
    assert template.has_recipients and template.supports_thinking
    assert rendered().endswith("strength: high<|start|>assistant")
    assert rendered(effort="low").endswith("strength: low<|start|>assistant")
    assert rendered(effort="max").endswith("strength: xhigh<|start|>assistant")
    assert rendered(thinking=False).endswith("<|start|>assistant to=user<|message|>")
    answer = {"role": "assistant", "content": "Hello"}
    begun = rendered(messages=[answer], continue_final=True)
    assert begun.endswith("<|start|>assistant to=user<|message|>Hello")
    begun = rendered(messages=[{**answer, "reasoning_content": "Well."}], continue_final=True)
    ending = " to=self<|message|>Well.<|eom|><|start|>assistant to=user<|message|>Hello"
    assert begun.endswith("<|start|>assistant" + ending)
