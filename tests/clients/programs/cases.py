"""What the Python programs share: the server's address, questions, and the loop over their cases."""

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel

URL = os.environ["BOUGH_URL"]
MODEL = "some-model"
ASK = "Write a function that adds two numbers."
PICK = "Pick a fruit."
WEATHER = "What is the weather in Paris?"
FRUIT = r'\{"kind": "(apple|pear)", "ripe": (true|false)\}'  # for answers that nothing else constrains


class Fruit(BaseModel):
    """A fruit."""

    kind: Literal["apple", "pear"]
    ripe: bool


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Says what the weather is like."""
    assert city in ("Paris", "Rome"), city
    return f"Rain in {city}"


def run(namespace: Mapping[str, Any]) -> None:
    """Run the named cases of a program, or all of them; print one JSON line for each."""
    cases = {name: each for name, each in namespace.items() if name.startswith("case_")}
    for name in sys.argv[1:] or cases:
        started = time.perf_counter()
        error = failure(cases[name])
        seconds = round(time.perf_counter() - started, 2)
        print(json.dumps({"case": name, "seconds": seconds, "error": error}), flush=True)


def failure(case: Callable[[], Any]) -> str | None:
    """Return the traceback of a case that failed."""
    try:
        result = case()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Exception:
        return traceback.format_exc()
    return None
