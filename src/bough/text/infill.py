"""Fill in the middle: the prompt of a text with a gap, from the tokens that a file has for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.errors import UsageError
from bough.text.infill_tokens import InfillTokens
from bough.text.tokenizer import EncodeLimit, Tokenizer

Encode = Callable[[str], list[int]]
PROJECT = "myproject"  # where repositories are named in a prompt, and the request names none
CURRENT = "filename"  # of the file with the gap
SNIPPET = "\n\n--- snippet ---\n\n"  # before another file's text, where the vocabulary has no token for it
_RESERVED = 256  # tokens that a fitted prompt leaves for the answer, where the request has no limit
_CHARACTERS = 32  # of a token, at most on average: longer texts are cut before they are encoded


@dataclass(frozen=True, slots=True)
class Infill:
    """A gap after a prompt: the text after it, and other files."""

    suffix: str
    extra: Sequence[tuple[str, str]] = ()  # names and texts of other files, the most important last
    begun: str = ""  # of the gap's text
    fit: bool = False  # leave out what does not fit: other files first, then what is far from the gap
    line_s: float | None = None  # after this time the text ends with its line
    indent: int = 0  # the text ends before a line that is indented less

    @property
    def ends_with_lines(self) -> bool:
        return self.line_s is not None or self.indent > 0


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens:
    """Return the tokens of a gap; raise UsageError where the model has none."""
    tokens = tokenizer.infill
    if tokens is None:
        raise UsageError(
            "the model cannot fill in the middle: its vocabulary has no tokens for it",
            "use a code model, such as Qwen2.5-Coder",
            param="suffix",
        )
    return tokens


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    gap: Infill,
    limit: EncodeLimit | None,
    answer: int | None,
) -> tuple[list[int], int]:
    """Return the prompt's ids, and how many of them are other files; `answer`: most tokens of the text."""
    tokens = infill_tokens(tokenizer)
    room = None
    if gap.fit and limit is not None:
        room = max(8, limit.tokens - min(answer or _RESERVED, limit.tokens // 2))
        gap, prefix = _shortened(gap, prefix, _CHARACTERS * room)
        limit = EncodeLimit(limit.tokens, limit.cancelled, stops_at_tokens=False, raisable=limit.raisable)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False, limit=None if room is not None else limit)

    before = encode(prefix) if isinstance(prefix, str) else list(prefix)
    after, begun = encode(gap.suffix), encode(gap.begun)
    others = _other_files(tokens, gap.extra, encode)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    if room is not None:
        inner = room - len(bos) - len(begun) - 3
        before, after = _nearest(before, after, inner)
        left = inner - len(before) - len(after)
        others = others[max(0, len(others) - left) :]
    head = [*bos, *others]
    return [*head, tokens.prefix, *before, *begun, tokens.suffix, *after, tokens.middle], len(head)


def _shortened(gap: Infill, prefix: str | Sequence[int], most: int) -> tuple[Infill, str | Sequence[int]]:
    """Cut texts that cannot fit, far from the gap, so that encoding them takes no long time."""
    extra, left = [], most
    for name, text in reversed(gap.extra):
        if left > 0:
            extra.append((name, text[:left]))
        left -= len(text)
    cut = Infill(gap.suffix[:most], extra[::-1], gap.begun[-most:])
    return cut, prefix[-most:]


def _nearest(before: list[int], after: list[int], room: int) -> tuple[list[int], list[int]]:
    """Return what is nearest to the gap; three quarters of it precede the gap, if both are long."""
    follows = max(room // 4, room - len(before))
    after = after[: max(0, follows)]
    return before[max(0, len(before) - (room - len(after))) :], after


def _other_files(tokens: InfillTokens, extra: Sequence[tuple[str, str]], encode: Encode) -> list[int]:
    """Return the tokens of other files, in the form that models of whole repositories were trained with."""
    if not extra:
        return []
    ids = [] if tokens.repository is None else [tokens.repository, *encode(f"{PROJECT}\n")]
    for name, text in extra:
        if tokens.file is None:
            ids += encode(SNIPPET + text)
        else:
            ids += [tokens.file, *encode(f"{name}\n"), *encode(text)]
    return ids if tokens.file is None else [*ids, tokens.file, *encode(f"{CURRENT}\n")]
