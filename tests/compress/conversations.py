"""Random conversations with documents, code, tables and tools, and a plain way to count their tokens."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

_NOUNS = """
river stone market winter letter harbour engine window garden captain method village record thunder copper
signal teacher mountain bridge paper silver journey forest kitchen harvest number circle
"""
WORDS = _NOUNS.split()


def tokens(text: str) -> int:
    return len(re.findall(r"\w{1,6}|[^\w\s]|\n+", text))


def count(texts: Sequence[str]) -> list[int]:
    return [tokens(text) for text in texts]


def measure(messages: Sequence[Any]) -> int:
    """Count a plain template: roles, texts, calls."""
    return sum(
        5 + tokens(json.dumps(message.get("tool_calls", ""))) + _content(message) for message in messages
    )


def _content(message: Any) -> int:
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    return sum(tokens(part if isinstance(part, str) else part["text"]) for part in parts)


def sentence(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(4, 16))
    return " ".join(words).capitalize() + rng.choice([".", "!", "?", "."])


def prose(rng: random.Random, sentences: int) -> str:
    paragraphs = [[sentence(rng) for _ in range(rng.randint(1, 7))] for _ in range(1 + sentences // 4)]
    return "\n\n".join(" ".join(each) for each in paragraphs)


def code(rng: random.Random, functions: int) -> str:
    parts = ["import os\nimport sys\n"]
    for _ in range(functions):
        name = "_".join(rng.choices(WORDS, k=2))
        body = "\n".join(
            f"    {rng.choice(WORDS)} = {rng.choice(WORDS)}({rng.randint(0, 99)})"
            for _ in range(rng.randint(1, 60))
        )
        head = f'def {name}({rng.choice(WORDS)}):\n    """{sentence(rng)}"""'
        parts.append(f"{head}\n{body}\n    return {rng.choice(WORDS)}\n")
    return "\n\n".join(parts)


def table(rng: random.Random, rows: int) -> str:
    lines = ["| name | count | place |", "|---|---|---|"]
    lines += [f"| {rng.choice(WORDS)} | {rng.randint(0, 999)} | {rng.choice(WORDS)} |" for _ in range(rows)]
    return "\n".join(lines)


def records(rng: random.Random, rows: int) -> str:
    return json.dumps(
        {"rows": [{"id": i, "name": rng.choice(WORDS), "note": sentence(rng)} for i in range(rows)]}
    )


def document(rng: random.Random) -> str:
    size = rng.randint(20, 120)
    kind = rng.choice([prose, prose, code, table, records])
    return kind(rng, size // 8 if kind is code else size)


def question(rng: random.Random) -> str:
    return f"What about the {rng.choice(WORDS)} and the {rng.choice(WORDS)} {rng.choice(WORDS)}?"


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation that ends with a question, a document with one, or the result of a tool."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.6:
        messages.append(
            {"role": rng.choice(["system", "developer"]), "content": prose(rng, rng.randint(2, 30))}
        )
    for _ in range(rng.randint(0, 3)):
        match rng.randint(0, 2):
            case 0:
                messages.append({"role": "user", "content": document(rng)})
                messages.append({"role": "assistant", "content": prose(rng, 6)})
            case 1:
                call = {"function": {"name": "read", "arguments": {"path": rng.choice(WORDS)}}}
                messages.append({"role": "user", "content": question(rng)})
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "content": document(rng)})
            case 2:
                parts = [{"type": "text", "text": document(rng)}, {"type": "text", "text": question(rng)}]
                messages.append({"role": "user", "content": parts})
                messages.append({"role": "assistant", "content": prose(rng, 2)})
    last = rng.choice(
        [question(rng), f"{document(rng)}\n\n{question(rng)}", f"{question(rng)}\n\n{document(rng)}"]
    )
    messages.append({"role": "user", "content": last})
    return messages
