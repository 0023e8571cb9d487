"""Anthropic messages: what comes in."""

import json
from collections.abc import Mapping
from typing import Any

from treeflash.errors import UsageError
from treeflash.server import options
from treeflash.server.options import Thinking
from treeflash.server.schemas import MessagesBody, Object
from treeflash.server.service import Service
from treeflash.session.requests import TextRequest


def to_request(body: MessagesBody, service: Service) -> TextRequest:
    fields = body.__dict__
    thinking = _thinking(body).otherwise(service.thinking)
    tools = tool_list(body.tools)
    choice = body.tool_choice or {}
    form, where = body.output_format, "output_format"
    if form is None:
        form, where = (body.output_config or {}).get("format"), "output_config.format"
    return TextRequest(
        messages=to_messages(body),
        tools=tools or None,
        tool_choice=options.tool_choice(_choice(choice), tools),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        max_tokens=options.token_limit(fields, "max_tokens"),
        sampling=options.sampling(service.defaults(thinking.on), fields),
        stop=options.stops(body.stop_sequences),
        thinking=thinking.on,
        thinking_budget=thinking.budget,
        grammar=options.format_grammar(form, where),
        draft_budget=body.treeflash.budget if body.treeflash else None,
    )


def _thinking(body: MessagesBody) -> Thinking:
    asked = body.thinking or {}
    budget = asked.get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise UsageError(
            f"thinking.budget_tokens is {budget!r}; needs a number of tokens", param="thinking.budget_tokens"
        )
    effort = options.effort((body.output_config or {}).get("effort"), "output_config.effort")
    match asked.get("type"):
        case "enabled":
            return Thinking(True, budget)
        case "disabled":
            return Thinking(on=False)
        case "adaptive" | None:
            # The model decides: its default stands, and the effort is only a limit.
            return Thinking(None, effort.budget)
    raise UsageError(
        f"thinking.type is {asked.get('type')!r}; needs enabled, disabled or adaptive", param="thinking.type"
    )


def tool_list(tools: list[Object] | None) -> list[dict[str, Any]]:
    """Tools of the client; those with another type are run by their provider and left out."""
    return [
        options.function_tool(
            tool.get("name"),
            tool.get("description"),
            tool.get("input_schema"),
            tool.get("strict"),
            field=f"tools[{index}]",
        )
        for index, tool in enumerate(tools or ())
        if tool.get("type", "custom") == "custom" or "input_schema" in tool
    ]


def _choice(choice: Mapping[str, Any]) -> Any:
    match choice.get("type"):
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "any":
            return "required"
        case "tool":
            return choice.get("name")
    raise UsageError(
        f"tool_choice.type is {choice.get('type')!r}; needs auto, any, tool or none", param="tool_choice.type"
    )


def to_messages(body: MessagesBody) -> list[Object]:
    messages: list[Object] = []
    if body.system:
        messages.append({"role": "system", "content": body.system})
    for index, message in enumerate(body.messages):
        messages += _split(message, f"messages[{index}]")
    return messages


def _split(message: Mapping[str, Any], where: str) -> list[Object]:
    """Results of tools are messages of their own here; everything else stays in its order."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: list[Object] = []
    parts: list[Any] = []
    calls: list[Object] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        match kind:
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "function": function})
            case "tool_result":
                results.append(
                    {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block, at)}
                )
            case "thinking" if isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            case "thinking" | "redacted_thinking":
                pass
            case _:
                parts.append(block)
    if calls or thoughts or role == "assistant":
        turn: Object = {"role": role, "content": parts}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        return [*results, turn]
    return [*results, {"role": role, "content": parts}] if parts or not results else results


def _result(block: Mapping[str, Any], where: str) -> Any:
    content = block.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("image", "document"):
                raise UsageError(
                    f"{where}.content[{index}].type is {kind!r}; the model reads text only",
                    param=f"{where}.content[{index}].type",
                )
            if kind not in ("text", None):
                # References and the like: kept whole, as the data they are.
                return json.dumps(content, ensure_ascii=False, default=str)
    if block.get("is_error"):
        return [{"type": "text", "text": "The tool failed:"}, *_parts(content)]
    return content


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]
