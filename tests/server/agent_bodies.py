"""Requests in the formats that three coding agents send, with our own text."""

from typing import Any

SHELL_SCHEMA = {
    "type": "object",
    "properties": {
        "cmd": {"type": "string", "description": "What to run."},
        "tty": {"type": "boolean"},
        "prefix_rule": {"type": "array", "items": {"type": "string"}},
        "yield_time_ms": {"type": "number"},
    },
    "required": ["cmd"],
    "additionalProperties": False,
}


def codex(*, turn: int) -> dict[str, Any]:
    """/v1/responses: two developer messages, tools of four kinds, everything resent each turn."""
    items: list[dict[str, Any]] = [
        {
            "type": "message",
            "id": "msg_a",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You work in a terminal."}],
        },
        {
            "type": "message",
            "id": "msg_b",
            "role": "developer",
            "content": [
                {"type": "input_text", "text": "<skills>none</skills>"},
                {"type": "input_text", "text": "<permissions>all</permissions>"},
            ],
        },
        {
            "type": "message",
            "id": "msg_c",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment><cwd>/work</cwd></environment>"}],
        },
        {
            "type": "message",
            "id": "msg_d",
            "role": "user",
            "content": [{"type": "input_text", "text": "List the files."}],
        },
    ]
    if turn > 1:
        items += [
            {
                "type": "reasoning",
                "id": "rs_0",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "A listing will do."}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "status": "completed",
                "id": "msg_1",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "I will look.", "annotations": [], "logprobs": []}
                ],
            },
            {
                "type": "function_call",
                "status": "completed",
                "id": "fc_2",
                "name": "exec_command",
                "arguments": '{"cmd": "ls"}',
                "call_id": "call_1",
            },
            {
                "type": "function_call",
                "id": "fc_3",
                "name": "exec_command",
                "arguments": '{"cmd": "pwd"}',
                "call_id": "call_2",
            },
            {
                "type": "function_call_output",
                "id": "fco_1",
                "call_id": "call_1",
                "output": "Exit code 0\nOutput:\na.txt\n",
            },
            {
                "type": "function_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "/work"}],
            },
            {
                "type": "custom_tool_call",
                "call_id": "call_3",
                "name": "apply_patch",
                "input": "*** Begin Patch",
            },
            {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Done."},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        ]
    return {
        "model": "some-model",
        "stream": True,
        "input": items,
        "tools": [
            {
                "type": "function",
                "name": "exec_command",
                "description": "Runs a command.",
                "strict": False,
                "parameters": SHELL_SCHEMA,
            },
            {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar"}},
            {
                "type": "namespace",
                "name": "agents",
                "description": "Helpers.",
                "tools": [
                    {
                        "type": "function",
                        "name": "close_agent",
                        "strict": False,
                        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
                    }
                ],
            },
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0-1-2",
        "client_metadata": {"turn_id": "0", "x-codex-window-id": "0:0"},
        "service_tier": "auto",
        "text": {"verbosity": "low"},
    }


def claude_code(*, turn: int) -> dict[str, Any]:
    """/v1/messages?beta=true: a billing line that changes, a system message after the question."""
    ephemeral = {"type": "ephemeral"}
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>"},
                {"type": "text", "text": "List the files.", "cache_control": ephemeral},
            ],
        },
        {"role": "system", "content": "Agents that may be started: none."},
    ]
    if turn > 1:
        messages += [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A listing will do.", "signature": ""},
                    {"type": "text", "text": "I will look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "pwd"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "a.txt"}],
                    },
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": "permission denied",
                        "is_error": True,
                        "cache_control": ephemeral,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ]
    return {
        "model": "some-model",
        "messages": messages,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: version=2.1; entry=cli; cch={turn}abc;"},
            {"type": "text", "text": "You are an agent.", "cache_control": ephemeral},
            {"type": "text", "text": "\nYou help with software.", "cache_control": ephemeral},
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command.",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {
                        "command": {"type": "string"},
                        "timeout": {"type": "number", "exclusiveMinimum": 0},
                        "model": {"type": "string", "enum": ["a", "b"]},
                    },
                    "required": ["command"],
                    "additionalProperties": False,
                },
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": '{"device_id":"0"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }


def opencode(*, turn: int) -> dict[str, Any]:
    """/v1/chat/completions: turn 0 is its request for a title, between whose user messages nobody answers."""
    if turn == 0:
        return {
            "model": "some-model",
            "max_tokens": 32000,
            "messages": [
                {"role": "system", "content": "You make titles."},
                {"role": "user", "content": "Make a title for this:\n"},
                {"role": "user", "content": "List the files."},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You help with software."},
        {"role": "user", "content": "List the files."},
    ]
    if turn > 1:
        messages += [
            {
                "role": "assistant",
                "content": "I will look.",
                "reasoning_content": "A listing will do.",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "bash", "arguments": '{"command":"ls"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "a.txt\n"},
        ]
    return {
        "model": "some-model",
        "max_tokens": 32000,
        "messages": messages,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "bash",
                    "description": "Runs a command.",
                    "parameters": {
                        "$schema": "https://json-schema.org/draft/2020-12/schema",
                        "type": "object",
                        "properties": {
                            "command": {"type": "string"},
                            "timeout": {
                                "minimum": -9007199254740991,
                                "exclusiveMinimum": 0,
                                "type": "integer",
                                "maximum": 9007199254740991,
                            },
                        },
                        "required": ["command"],
                    },
                },
            }
        ],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
