"""A scripted conversation of a coding agent with its tools, the same for every model.

Every turn is its own prompt made of the scripted messages before it, so that prompts do not depend on a
model's outputs.
"""

import json
from typing import Any

Message = dict[str, Any]

SYSTEM = (
    "You are a careful coding agent in a terminal. Look before you change anything, use the tools, "
    "keep changes small, and say in one or two sentences what you did."
)


MODULES = ("__init__", "carts", "coupons", "customers", "mail", "orders", "prices", "stock", "taxes")


def tools() -> list[Message]:
    def tool(name: str, about: str, **parameters: str) -> Message:
        properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(parameters)}
        return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}

    return [
        tool("list_files", "Lists the files below a folder.", folder="Relative path"),
        tool("read_file", "Shows a file with its line numbers.", path="Relative path"),
        tool("search", "Finds a regular expression in all files.", pattern="As Python's re takes it"),
        tool(
            "edit_file",
            "Replaces a piece of a file.",
            path="Relative path",
            old="As it is",
            new="As it is to be",
        ),
        tool("run", "Runs a command in the shell and shows its output.", command="One line"),
    ]


def turns() -> list[list[Message]]:
    """Return the messages before each turn of the agent."""
    conversation: list[Message] = [{"role": "system", "content": SYSTEM}]
    prompts = []
    for incoming, reply in _script():
        conversation.append(incoming)
        prompts.append(list(conversation))
        conversation.append(reply)
    return prompts


def _script() -> list[tuple[Message, Message]]:
    """Return pairs of an incoming message and the agent's scripted reply."""
    script = [
        (_user("The tests of our small shop fail since yesterday. Please find out why and repair it."),
         _call("run", command="python -m pytest -q")),
        (_result(_test_log(failing=True)), _call("list_files", folder="shop")),
        (_result("\n".join(f"shop/{name}.py" for name in MODULES)),
         _call("read_file", path="shop/orders.py")),
        (_result(_numbered(_orders(broken=True))), _call("search", pattern=r"def discount")),
        (_result("shop/orders.py:13:def discount(total, percent):\nshop/coupons.py:4:def discounts():"),
         _call("edit_file", path="shop/orders.py", old="return total * percent / 100",
               new="return total - total * percent / 100")),
        (_result("shop/orders.py: one place changed."), _call("run", command="python -m pytest -q")),
        (_result(_test_log(failing=False)),
         _said("`discount` returned the amount taken off instead of the new total. It returns the total now, "
               "and all tests pass.")),
        (_user("Good. Write out shop/orders.py as it is now, with a docstring for each function."),
         _said(f"```python\n{_orders(broken=False)}```")),
        (_user("Which of the modules in the list above have no tests? Answer with their names."),
         _said("coupons and mail.")),
    ]  # fmt: skip
    return script


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_1", "content": text}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def _test_log(*, failing: bool) -> str:
    names = ["carts", "customers", "orders", "prices", "stock", "taxes"]
    lines = [
        f"tests/test_{name}.py::test_{what}_{number} PASSED"
        for name in names
        for what in ("creation", "update", "total")
        for number in range(1, 4)
    ]
    if not failing:
        return "\n".join([*lines, f"{len(lines)} passed in 1.84s"])
    lines[24] = lines[24].replace("PASSED", "FAILED")
    trace = [
        "    def test_total_1():",
        "        order = Order([Line('cup', 2, 10.0), Line('pot', 1, 80.0)])",
        ">       assert order.total(percent=10) == 90.0",
        "E       assert 10.0 == 90.0",
        "tests/test_orders.py:31: AssertionError",
    ]
    return "\n".join([*lines, *trace, f"1 failed, {len(lines) - 1} passed in 1.91s"])


def _orders(*, broken: bool) -> str:
    taken = "return total * percent / 100" if broken else "return total - total * percent / 100"
    return f"""\
from dataclasses import dataclass


@dataclass
class Line:
    name: str
    count: int
    price: float


def discount(total, percent):
    {taken}


@dataclass
class Order:
    lines: list

    def total(self, percent=0):
        total = sum(line.count * line.price for line in self.lines)
        return discount(total, percent)

    def names(self):
        return [line.name for line in self.lines]

    def add(self, name, count, price):
        self.lines.append(Line(name, count, price))

    def remove(self, name):
        self.lines = [line for line in self.lines if line.name != name]
"""


def _numbered(text: str) -> str:
    return "\n".join(f"{number:4} {line}" for number, line in enumerate(text.splitlines(), 1))
