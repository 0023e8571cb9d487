"""Whether an answer is right: code that passes its tests, the exact number or formula, sound JSON.

Knows no models. Code that a model wrote runs in a process of its own, in an empty folder that is removed
afterwards, with little time and memory, no child processes and no files of any size. It is not a prison: on a
machine whose files matter, use a container.
"""

import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

SECONDS, BYTES = 5, 1 << 30

Item = Mapping[str, Any]
Score = Callable[[Item, str], bool]


def code_of(answer: str) -> str:
    """The first fenced block, whole or broken off, else all of it."""
    fenced = re.search(r"```(?:\w+)?\n(.*?)(?:```|$)", answer, re.DOTALL)
    return fenced[1] if fenced else answer


def passes(program: str) -> bool:
    """Whether a program ends well within the limits."""
    with tempfile.TemporaryDirectory(prefix="treeflash-bench-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", program],
                cwd=folder,
                env={"PATH": ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2 * SECONDS,
                start_new_session=True,
                preexec_fn=_limits,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Counted over all of the user's processes, so that none can be added; root is not bound by it.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def humaneval(item: Item, answer: str) -> bool:
    # The prompt's own imports and helpers stand before the answer, which may repeat only the function.
    head = item["prompt"][: item["prompt"].rindex("def " + item["entry_point"])]
    return passes(f"{head}\n{code_of(answer)}\n{item['test']}\ncheck({item['entry_point']})\n")


def mbpp(item: Item, answer: str) -> bool:
    return passes("\n".join([*item.get("test_imports", ()), code_of(answer), *item["test_list"]]))


def own_tests(item: Item, answer: str) -> bool:
    return passes(f"{code_of(answer)}\n{item['tests']}\n")


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    if not numbers:
        return None
    number = numbers[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def gsm8k(item: Item, answer: str) -> bool:
    return last_number(answer) == last_number(item["answer"].rpartition("####")[2])


def math500(item: Item, answer: str) -> bool:
    found = boxed(answer)
    return found is not None and _plain(found) == _plain(item["answer"])


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, whose braces may be nested."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


def _plain(formula: str) -> str:
    """Without differences that change only how it looks."""
    for old, new in (
        (r"\dfrac", r"\frac"),
        (r"\tfrac", r"\frac"),
        (r"\left", ""),
        (r"\right", ""),
        ("$", ""),
    ):
        formula = formula.replace(old, new)
    return "".join(formula.split()).rstrip(".")


def json_keys(item: Item, answer: str) -> bool:
    """An object, fenced or bare, with exactly these keys."""
    try:
        found = json.loads(code_of(answer))
    except ValueError:
        return False
    return isinstance(found, dict) and set(found) == set(item["keys"])
