"""OpenAI responses, without memory of earlier ones: what comes in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treeflash.errors import UsageError
from treeflash.server import options
from treeflash.server.options import Thinking
from treeflash.server.schemas import Object, ResponsesBody
from treeflash.server.service import Service
from treeflash.session.requests import TextRequest

_REFUSED = {
    "previous_response_id": "nothing is kept here: send the whole conversation as input",
    "conversation": "nothing is kept here: send the whole conversation as input",
    "background": "nothing is kept here: stream the response instead",
    "prompt": "there are no stored prompts: send instructions and input",
}
# Free text stands in one argument of this name.
FREE_TEXT = "input"
_FREE_TEXT_SCHEMA = {
    "type": "object",
    "properties": {FREE_TEXT: {"type": "string"}},
    "required": [FREE_TEXT],
}


def to_request(body: ResponsesBody, service: Service) -> TextRequest:
    for field_name, reason in _REFUSED.items():
        if getattr(body, field_name):
            raise UsageError(f"{field_name} is set; {reason}", param=field_name)
    fields = body.__dict__
    thinking = _thinking(body.reasoning).otherwise(service.thinking)
    tools = tool_list(body.tools)
    form = (body.text or {}).get("format")
    wanted = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    return TextRequest(
        messages=to_messages(body),
        tools=tools or None,
        tool_choice=options.tool_choice(_choice(body.tool_choice), tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_tokens=options.token_limit(fields, "max_output_tokens"),
        sampling=options.sampling(
            service.defaults(thinking.on), fields, logprobs=(body.top_logprobs or 0) if wanted else None
        ),
        thinking=thinking.on,
        thinking_budget=thinking.budget,
        grammar=options.format_grammar(form, "text.format"),
        draft_budget=body.treeflash.budget if body.treeflash else None,
    )


def _thinking(reasoning: Mapping[str, Any] | None) -> Thinking:
    return options.effort((reasoning or {}).get("effort"), "reasoning.effort")


def tool_list(tools: list[Object] | None) -> list[dict[str, Any]]:
    """Functions, and tools that take free text; others are run by their provider and left out."""
    found = []
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        name, description = tool.get("name"), tool.get("description")
        match tool.get("type"):
            case "function":
                found.append(
                    options.function_tool(
                        name, description, tool.get("parameters"), tool.get("strict"), field=where
                    )
                )
            case "custom":
                found.append(options.function_tool(name, description, _FREE_TEXT_SCHEMA, field=where))
            case "namespace":
                found += tool_list(_members(tool))
    return found


def free_text_tools(tools: list[Object] | None) -> set[str]:
    alone = [tool["name"] for tool in tools or () if tool.get("type") == "custom"]
    return {*alone, *(name for group in _groups(tools) for name in free_text_tools(_members(group)))}


def namespaces(tools: list[Object] | None) -> dict[str, str]:
    """Which group a tool's name belongs to, where the client groups them."""
    return {
        each["name"]: str(group.get("name"))
        for group in _groups(tools)
        for each in _members(group)
        if isinstance(each.get("name"), str)
    }


def _groups(tools: list[Object] | None) -> list[Object]:
    return [tool for tool in tools or () if tool.get("type") == "namespace"]


def _members(group: Object) -> list[Object]:
    found = group.get("tools")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _choice(choice: str | Object | None) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return choice.get("name")
    if kind == "allowed_tools":
        return choice.get("mode", "auto")
    raise UsageError(
        f"tool_choice.type is {kind!r}; needs function, custom or allowed_tools", param="tool_choice.type"
    )


def to_messages(body: ResponsesBody) -> list[Object]:
    messages = _Messages()
    if body.instructions:
        messages.add({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.add({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            messages.item(item, f"input[{index}]")
    return messages.found


@dataclass(slots=True)
class _Messages:
    """Items in, messages out: what one turn of the assistant was cut into becomes one message again.

    A turn is reasoning, then words, then calls, any of them missing.
    """

    found: list[Object] = field(default_factory=list)

    def add(self, message: Object) -> None:
        self.found.append(message)

    def item(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                content = item.get("content")
                parts = content if isinstance(content, list) else []
                texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
                turn = self._turn(fresh=True)
                # One turn may have been cut into several.
                before = [turn["reasoning_content"]] if turn.get("reasoning_content") else []
                turn["reasoning_content"] = "\n".join(
                    [*before, *(text for text in texts if isinstance(text, str))]
                )
            case "function_call":
                self._call(item, item.get("arguments"), where)
            case "custom_tool_call":
                self._call(item, {FREE_TEXT: item.get("input")}, where)
            case "function_call_output" | "custom_tool_call_output":
                content = item.get("output")
                self.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "item_reference":
                raise UsageError(
                    f"{where}.type is 'item_reference'; nothing is kept here: send the item",
                    param=f"{where}.type",
                )
            case None:
                raise UsageError(
                    f"{where}.type is None; needs message, function_call or its output", param=f"{where}.type"
                )
            # Anything else is a call of a tool that its provider ran: its result is in the text around it.

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        if item.get("role") != "assistant":
            return self.add({"role": item.get("role"), "content": item.get("content")})
        self._turn(fresh=True)["content"] = item.get("content")

    def _call(self, item: Mapping[str, Any], arguments: Any, where: str) -> None:
        if not isinstance(item.get("name"), str):
            raise UsageError(
                f"{where}.name is {item.get('name')!r}; needs the name of the called tool",
                param=f"{where}.name",
            )
        call = {"id": item.get("call_id"), "function": {"name": item["name"], "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, *, fresh: bool = False) -> Object:
        """The assistant's message at the end; a `fresh` one where words were said or tools called in it."""
        last = self.found[-1] if self.found else {}
        said = last.get("content") or last.get("tool_calls")
        if last.get("role") != "assistant" or (fresh and said):
            self.add({"role": "assistant", "content": ""})
        return self.found[-1]
