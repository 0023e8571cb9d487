"""Answers in messages with recipients, as Muse-Glimmer writes them: ` to=self<|message|>...<|eom|>`.

Reasoning is a message to itself, the text one to the user, and a call one to a tool, in tags of its own.
"""

import re
from collections.abc import Callable, Sequence

from bough.text import tools as tags
from bough.text.output import END_THINK, THINK
from bough.text.stream import TextStream

START, MESSAGE, NEXT = "<|start|>", "<|message|>", "<|eom|>"
TO_USER, TO_ITSELF = f" to=user{MESSAGE}", f" to=self{MESSAGE}"
_CALLS = "<atem:function_calls>"
_INVOKE = re.compile(r'<atem:invoke name="([^"]*)">(.*?)</atem:invoke>', re.DOTALL)
_PARAMETER = re.compile(r'<atem:parameter name="([^"]*)">(.*?)</atem:parameter>', re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(\S+)")


def has_recipients(template: str) -> bool:
    """Return whether a chat template has such messages."""
    return _CALLS in template and NEXT in template


class RecipientStream(TextStream):
    """Detokenises such messages to the text and the tags that `OutputParser` reads."""

    def __init__(
        self, piece: Callable[[int], bytes], id_of: Callable[[str], int | None], *, recipient: str = ""
    ):
        """`recipient`: of the message that the prompt has begun; empty: the answer begins with a header."""
        super().__init__(piece)
        self._marks = {id_of(mark): mark for mark in (START, MESSAGE, NEXT)}
        self._recipient = recipient
        self._thinks = recipient == "self"
        self._held = ""  # of a header or a call

    def push(self, ids: Sequence[int]) -> str:
        """Return new text; headers and calls are held back until they are whole."""
        return "".join(map(self._pushed, ids))

    def flush(self) -> str:
        """Return what is left, without a call or a header that was cut off, and reset the stream."""
        left, self._recipient = self._take(super().flush()) + self._ended(), ""
        return left

    def _pushed(self, id: int) -> str:
        mark = self._marks.get(id)
        if mark is None:
            return self._take(super().push([id]))
        if mark == MESSAGE:
            return "" if self._recipient else self._begun()
        text, self._recipient, self._held = self._ended(), "", ""
        return text

    def _take(self, text: str) -> str:
        if self._recipient in ("self", "user"):
            return text
        self._held += text
        return ""

    def _begun(self) -> str:
        """Return what stands before the message whose header ends here."""
        header = _RECIPIENT.search(self._held)
        self._recipient, self._held = header[1] if header else "user", ""
        thought, self._thinks = self._thinks, self._recipient == "self"
        if thought:
            return "\n\n" if self._thinks else END_THINK
        return THINK if self._thinks else ""

    def _ended(self) -> str:
        """Return the calls of a message to a tool, in the tags of Qwen3.5."""
        if self._recipient in ("", "self", "user"):
            return ""
        return "\n".join(_call(name, body) for name, body in _INVOKE.findall(self._held))


def _call(name: str, body: str) -> str:
    parameters = "".join(
        f"{tags.PARAMETER}{key}>\n{value}\n{tags.END_PARAMETER}\n" for key, value in _PARAMETER.findall(body)
    )
    return f"{tags.OPEN}\n{tags.FUNCTION}{name}>\n{parameters}{tags.END_FUNCTION}\n{tags.CLOSE}"
