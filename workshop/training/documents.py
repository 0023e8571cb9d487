"""Types of training text, and ChatML rendering of dialogues."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
# In the order of their ids, which are the last ones of the vocabulary.
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
USER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MASK_TOKEN = "<|mask|>"
SPECIAL_TOKENS = (*CONTROL_TOKENS, *USER_TOKENS, MASK_TOKEN)

Messages = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Document:
    """Text for one part of the mix; documents of one `key` stay on one side of the held-out split."""

    part: str
    text: str
    key: str


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation that ends with the assistant; `kind` is the type of request, for quotas and reports."""

    kind: str
    messages: tuple[tuple[str, str], ...]
    key: str

    def text(self) -> str:
        return chat_text(self.messages)

    def prompt(self) -> list[dict[str, str]]:
        """Return the messages before the last assistant message, as clients send them."""
        return [{"role": role, "content": content} for role, content in self.messages[:-1]]


def dialogue(kind: str, request: str, answer: str, *, key: str = "") -> Dialogue:
    """Return a dialogue of one user and one assistant message."""
    return Dialogue(kind, (("user", request.strip()), ("assistant", answer.strip())), key or request)


def chat_text(messages: Messages) -> str:
    """Render the conversation with the chat template."""
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages)


def spells_special(text: str) -> bool:
    """Return whether the text contains the spelling of a special token."""
    return any(token in text for token in SPECIAL_TOKENS)


def fingerprint(text: str) -> int:
    """Return a 64-bit hash that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"
