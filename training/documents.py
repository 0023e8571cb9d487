"""What a piece of training text is, and how a dialogue is written in ChatML; knows no token ids."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
# Order is the order of ids, which are the last ones of the vocabulary.
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
    """A conversation that ends with the assistant; `kind` is the sort of request, for quotas and reports."""

    kind: str
    messages: tuple[tuple[str, str], ...]
    key: str

    def text(self) -> str:
        return chat_text(self.messages)

    def prompt(self) -> list[dict[str, str]]:
        """The messages up to the last answer, as clients send them."""
        return [{"role": role, "content": content} for role, content in self.messages[:-1]]


def dialogue(kind: str, request: str, answer: str, *, key: str = "") -> Dialogue:
    """One question and its answer."""
    return Dialogue(kind, (("user", request.strip()), ("assistant", answer.strip())), key or request)


def chat_text(messages: Messages) -> str:
    """The conversation as the chat template writes it."""
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages)


def spells_special(text: str) -> bool:
    """Whether the text would be read as special tokens somewhere."""
    return any(token in text for token in SPECIAL_TOKENS)


def fingerprint(text: str) -> int:
    """A 64-bit hash that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"
