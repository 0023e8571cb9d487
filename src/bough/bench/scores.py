"""Scoring of answers: code that passes its tests, the exact number or formula, valid JSON.

Generated code runs in a separate process, in an empty temporary folder, with limits on time and memory, no
child processes and no file writes. This is not a sandbox: use a container where files matter. Systems without
such limits (Windows) do not run it: there code has no score.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

SECONDS, BYTES = 5, 1 << 30

Item = Mapping[str, Any]
Score = Callable[[Item, str], bool]


def code_of(answer: str) -> str:
    """Return the first fenced block, complete or not, or else the whole answer."""
    fenced = re.search(r"```(?:\w+)?\n(.*?)(?:```|$)", answer, re.DOTALL)
    return fenced[1] if fenced else answer


def passes(program: str) -> bool:
    """Return whether a program exits with 0 within the limits."""
    with tempfile.TemporaryDirectory(prefix="bough-bench-") as folder:
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


def limited() -> bool:
    """Return whether this system can limit what generated code does."""
    try:
        import resource  # noqa: F401
    except ImportError:
        return False
    return True


def _limits() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Counts all of the user's processes, so that none can be added; does not apply to root.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def humaneval(item: Item, answer: str) -> bool:
    # The prompt's imports and helpers go first: the answer may repeat only the function.
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
    expression = boxed(answer)
    return expression is not None and _plain(expression) == _plain(item["answer"])


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, whose braces may be nested."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def _plain(formula: str) -> str:
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
    """Return whether the answer is a JSON object, fenced or bare, with exactly the item's keys."""
    try:
        value = json.loads(code_of(answer))
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == set(item["keys"])


_RUN_CODE = (humaneval, mbpp, own_tests)


def score(judge: Score | None, item: Item, answer: str) -> bool | None:
    """Return whether an answer is right; None: nothing can judge it here."""
    if judge is None or (judge in _RUN_CODE and not limited()):
        return None
    return judge(item, answer)
