import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import UsageError
from bough.text.messages import merge_neighbours, normalise

ASK = {"role": "user", "content": "Hi"}


def contents(*messages: dict) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in normalise(messages)]


def reply(**fields) -> dict:
    """What becomes of an assistant message with these fields."""
    return normalise([ASK, {"role": "assistant", **fields}])[1]


def test_leading_system_messages_become_one():
    assert contents(
        {"role": "developer", "content": "one"},
        {"role": "system", "content": ""},
        {"role": "system", "content": "two"},
        ASK,
    ) == [("system", "one\n\ntwo"), ("user", "Hi")]
    assert contents({"role": "system", "content": ""}, ASK) == [("system", ""), ("user", "Hi")]


def test_later_system_messages_become_user_text():
    assert contents(ASK, {"role": "developer", "content": "now this"}, ASK) == [
        ("user", "Hi"),
        ("user", "<system>\nnow this\n</system>"),
        ("user", "Hi"),
    ]


def test_the_billing_block_is_dropped():
    line = "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "You are an agent."}]
    assert contents({"role": "system", "content": blocks}, ASK)[0] == ("system", "You are an agent.")
    assert contents({"role": "system", "content": f"{line}\nYou are an agent."}, ASK)[0] == (
        "system",
        "You are an agent.",
    )
    assert contents({"role": "user", "content": line}) == [("user", line)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("plain", "plain"),
        ([], ""),
        (["a", {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}], "b"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        (({"type": "text", "text": "a"},), "a"),
    ],
)
def test_contents_become_text(content: object, text: str):
    assert contents({"role": "user", "content": content}) == [("user", text)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"sky": "grün"}, '{"sky": "grün"}'),
        ([1, 2], "[1, 2]"),
        ([{"name": "a"}], '[{"name": "a"}]'),
        (3.5, "3.5"),
        (True, "true"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_tool_results_become_text(content: object, text: str):
    assert contents(ASK, {"role": "tool", "content": content})[1] == ("tool", text)
    assert contents(ASK, {"role": "function", "name": "f", "content": content})[1] == ("tool", text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1, 2]", {"arguments": [1, 2]}),
        ('"text"', {"arguments": "text"}),
        ([1], {"arguments": [1]}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_become_an_object(arguments: object, expected: dict):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    expected_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": expected}}
    assert reply(tool_calls=[call])["tool_calls"] == [expected_call]
    assert reply(tool_calls=[{"name": "f", "arguments": arguments, "id": "1"}])["tool_calls"] == [
        expected_call
    ]
    del expected_call["id"]
    assert reply(function_call={"name": "f", "arguments": arguments})["tool_calls"] == [expected_call]


@given(value=st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_arguments_round_trip_through_json(value: object):
    call = {"function": {"name": "f", "arguments": json.dumps({"value": value})}}
    assert reply(tool_calls=[call])["tool_calls"][0]["function"]["arguments"] == {"value": value}


def test_empty_fields_are_left_out():
    message = reply(content="ok", tool_calls=[], refusal=None, audio=None, function_call=None, name="me")
    assert message == {"role": "assistant", "content": "ok", "name": "me"}
    assert reply(content="ok", tool_calls=None) == {"role": "assistant", "content": "ok"}


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ("<think>\nhm\n</think>\n\nanswer", "answer"),
        ("\n<think>a</think><think>b</think>\n    answer", "    answer"),
        ("a lone\n</think>\n\ntag", "a lone\n</think>\n\ntag"),
        ("<think>never finished", ""),
        ("<think></think>", ""),
        ("answer", "answer"),
        ("Write `<think>` before and `</think>` after.", "Write `<think>` before and `</think>` after."),
        ("<think>a</think>say </think>", "say </think>"),
    ],
)
def test_reasoning_is_split_from_earlier_replies(content: str, left: str):
    assert reply(content=content)["content"] == left
    assert normalise([{"role": "user", "content": content}])[0]["content"] == content


@pytest.mark.parametrize(
    ("content", "reasoning", "left"),
    [
        ("hm, still in thought\n</think>\n\nanswer", "hm, still in thought", "answer"),
        ("</think>\n\nanswer", None, "answer"),
        ("hm\n </think>", "hm", ""),
        ("The tag </think> ends it.", None, "The tag </think> ends it."),
        ("It ends with\n</think> as a tag.", None, "It ends with\n</think> as a tag."),
    ],
)
def test_a_lone_closing_tag_counts_where_the_prompt_has_the_other(
    content: str, reasoning: str | None, left: str
):
    message = {"role": "assistant", "content": content}
    cleaned = normalise([ASK, message], opens_reasoning=True)[1]
    assert (cleaned.get("reasoning_content"), cleaned["content"]) == (reasoning, left)
    assert normalise([ASK, message])[1] == message
    with_field = normalise([ASK, message | {"reasoning_content": "own"}], opens_reasoning=True)[1]
    assert with_field == message | {"reasoning_content": "own"}


def test_reasoning_fields():
    for name in ("reasoning_content", "reasoning"):
        kept = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
        assert reply(content="ok", **{name: "hm"}) == kept
        assert reply(content="<think>\nhm\n</think>\n\nok", **{name: ""}) == kept
        assert reply(content="<think>\nno\n</think>\n\nok", **{name: "hm"}) == kept
        # Whatever else a client puts there is not worth refusing its conversation.
        assert reply(content="ok", **{name: {"effort": "low"}}) == {"role": "assistant", "content": "ok"}


def test_neighbours_merge():
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    messages = normalise(
        [ASK, ASK, calls, calls, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    )
    merged = merge_neighbours(messages)
    assert [message["role"] for message in merged] == ["user", "assistant", "assistant", "tool", "tool"]
    assert merged[0]["content"] == "Hi\n\nHi"
    assert messages[0]["content"] == "Hi"


def test_the_caller_s_messages_are_not_changed():
    messages = [
        {"role": "developer", "content": ["a"]},
        {"role": "assistant", "content": "<think>a</think>b"},
    ]
    before = json.dumps(messages)
    normalise(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hello", "messages is of type str"),
        ({"role": "user"}, "messages is of type dict"),
        ([ASK, "hi"], r"messages\[1\] is of type str"),
        ([{"content": "x"}], r"messages\[0\]\.role is None; needs one of system, developer, user"),
        ([ASK, {"role": "robot", "content": "x"}], r"messages\[1\]\.role is 'robot'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role is \['user'\]"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is of type int"),
        ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\]\.content is of type dict"),
        ([{"role": "user", "content": [5]}], r"messages\[0\]\.content\[0\] is of type int"),
        (
            [ASK, {"role": "user", "content": ["see", {"type": "image_url", "image_url": {}}]}],
            r"messages\[1\]\.content\[1\] is an image, and only text is rendered here",
        ),
        ([{"role": "tool", "content": [{"type": "image"}]}], r"content\[0\] is an image"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "'input_audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is None; needs a string"),
        ([{"role": "user", "content": [{"text": "a"}]}], r"content\[0\]\.type is None"),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\[0\]\.tool_calls is of type str"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\]\.function\.name is None"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            r"tool_calls\[0\]\.function\.name is None",
        ),
        ([{"role": "assistant", "function_call": "f"}], r"tool_calls\[0\]\.function\.name is None"),
    ],
)
def test_bad_messages_are_named(messages: object, message: str):
    with pytest.raises(UsageError, match=message):
        normalise(messages)
