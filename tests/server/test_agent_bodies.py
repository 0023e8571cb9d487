"""Requests of coding agents, rendered by Qwen3.5's template."""

import json

import httpx2
import pytest

from bough.session.events import Reasoning, Text, ToolArguments, ToolCall
from tests.server.agent_bodies import claude_code, codex, opencode
from tests.server.live import Live, scripted

PATHS = {
    codex: "/v1/responses",
    claude_code: "/v1/messages?beta=true",
    opencode: "/v1/chat/completions",
}
# What every request of that agent begins with, whatever changed in it.
HEADERS = {"anthropic-version": "2026-10-21", "anthropic-beta": "a-1,b-2", "authorization": "Bearer none"}


def prompt(server: Live, body: dict, path: str) -> str:
    answer = httpx2.post(server.url + path, json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    request = server.session.seen[-1]
    return bytes(server.session.encode(request)).decode()


@pytest.mark.parametrize("agent, path", PATHS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_turns_share_their_prefix(echo_server: Live, agent, path: str):
    first = prompt(echo_server, agent(turn=1), path)
    second = prompt(echo_server, agent(turn=2), path)
    opening = first.removesuffix("<|im_start|>assistant\n<think>\n")
    assert opening != first and second.startswith(opening)
    assert first.count("<|im_start|>system") == 1
    assert "billing" not in second
    # In order and complete.
    story = ["List the files.", "A listing will do.", "I will look.", "<function=", "ls", "a.txt"]
    if agent is claude_code:
        story.remove("A listing will do.")  # a later user message follows, so the template drops it
    offsets = [second.index(part, len(opening) if part != story[0] else 0) for part in story]
    assert offsets == sorted(offsets)


def test_calls_and_results_of_codex_keep_their_order(echo_server: Live):
    text = prompt(echo_server, codex(turn=2), "/v1/responses")
    names = ["<parameter=cmd>\nls", "<parameter=cmd>\npwd", "a.txt", "/work", "*** Begin Patch", "Done."]
    offsets = [text.rindex(part) for part in names]
    assert offsets == sorted(offsets)
    request = echo_server.session.seen[-1]
    assert [tool["function"]["name"] for tool in request.tools] == [
        "exec_command",
        "apply_patch",
        "close_agent",
    ]
    assert [message["role"] for message in request.messages][4:] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]


def test_split_reasoning_items_are_joined(echo_server: Live):
    body = codex(turn=2)
    at = next(index for index, item in enumerate(body["input"]) if item["type"] == "reasoning")
    more = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Surely."}]}
    body["input"].insert(at + 1, more)
    text = prompt(echo_server, body, "/v1/responses")
    assert "<think>\nA listing will do.\nSurely.\n</think>\n\nI will look." in text


def test_invalid_namespaces_are_ignored(echo_server: Live):
    for members in (True, None, "x", [5], {}):
        body = codex(turn=1) | {"stream": False}
        body["tools"].append({"type": "namespace", "name": "odd", "tools": members})
        assert httpx2.post(f"{echo_server.url}/v1/responses", json=body).status_code == 200


def test_settings_of_claude_code(echo_server: Live):
    text = prompt(echo_server, claude_code(turn=2), "/v1/messages?beta=true")
    assert "The tool failed:\npermission denied" in text and "Go on." in text
    assert "<system>\nAgents that may be started: none.\n</system>" in text
    request = echo_server.session.seen[-1]
    assert request.thinking is None and request.effort == "medium"
    assert request.max_tokens == 32000
    assert [tool["function"]["name"] for tool in request.tools] == ["Bash"]


def test_title_requests_have_no_tools(echo_server: Live):
    text = prompt(echo_server, opencode(turn=0), "/v1/chat/completions")
    assert text.index("You make titles.") < text.index("Make a title") < text.index("List the files.")
    assert echo_server.session.seen[-1].tools is None


def test_free_text_tools_and_namespaces():
    def script(request):
        yield Reasoning("Hm.")
        yield ToolCall(0, "call_1", "apply_patch")
        yield ToolArguments(0, '{"input": "*** Begin')
        yield ToolArguments(0, ' Patch\\n"}')
        yield ToolCall(1, "call_2", "close_agent")
        yield ToolArguments(1, '{"id": "a"}')

    with scripted(script) as server:
        body = codex(turn=1)
        streamed = httpx2.post(f"{server.url}/v1/responses", json=body).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == ["reasoning", "custom_tool_call", "function_call"]
        assert done[1]["input"] == "*** Begin Patch\n"
        assert done[2]["namespace"] == "agents"
        whole = httpx2.post(f"{server.url}/v1/responses", json=body | {"stream": False}).json()
        assert [item["type"] for item in whole["output"]] == [item["type"] for item in done]
        assert events[-1]["response"]["output"][1]["input"] == "*** Begin Patch\n"


def test_text_around_calls_keeps_its_order():
    def script(request):
        yield Text("Before. ")
        yield ToolCall(0, "call_1", "bash")
        yield ToolArguments(0, '{"command": "ls"}')
        yield Text("After.")

    with scripted(script) as server:
        message = httpx2.post(
            f"{server.url}/v1/messages", json=claude_code(turn=1) | {"stream": False}
        ).json()
        assert [block["type"] for block in message["content"]] == ["text", "tool_use", "text"]
        streamed = httpx2.post(f"{server.url}/v1/messages", json=claude_code(turn=1)).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
        starts = [event for event in events if event["type"] == "content_block_start"]
        assert [event["index"] for event in starts] == [0, 1, 2]
        opened = None
        for event in events:
            if event["type"] == "content_block_start":
                assert opened is None
                opened = event["index"]
            elif event["type"] == "content_block_delta":
                assert event["index"] == opened
            elif event["type"] == "content_block_stop":
                assert event["index"] == opened
                opened = None
        assert opened is None and events[-1]["type"] == "message_stop"
