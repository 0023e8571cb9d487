"""A scripted conversation of a coding agent with its tools, the same for every model: agent.toml.

Every turn is its own prompt made of the scripted messages before it, so that prompts do not depend on a
model's outputs.
"""

import json
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

Message = dict[str, Any]


@cache
def _script() -> dict[str, Any]:
    return tomllib.loads(files("bough.bench").joinpath("agent.toml").read_text(encoding="utf-8"))


def tools() -> list[Message]:
    def tool(name: str, description: str, parameters: dict[str, str]) -> Message:
        properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(parameters)}
        function = {"name": name, "description": description, "parameters": schema}
        return {"type": "function", "function": function}

    return [tool(**entry) for entry in _script()["tool"]]


def turns() -> list[list[Message]]:
    """Return the messages before each turn of the agent."""
    conversation: list[Message] = [{"role": "system", "content": _script()["system"]}]
    prompts = []
    for turn in _script()["turn"]:
        conversation.append(_incoming(turn))
        prompts.append(list(conversation))
        conversation.append(_reply(turn))
    return prompts


def _incoming(turn: dict[str, Any]) -> Message:
    if "user" in turn:
        return {"role": "user", "content": turn["user"]}
    return {"role": "tool", "tool_call_id": "call_1", "content": turn["result"]}


def _reply(turn: dict[str, Any]) -> Message:
    if "said" in turn:
        return {"role": "assistant", "content": turn["said"]}
    function = {"name": turn["call"], "arguments": json.dumps(turn["arguments"])}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}
