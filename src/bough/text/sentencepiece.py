"""SentencePiece vocabularies (`tokenizer.ggml.model = llama`): BPE over characters, ranked by scores."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from tokenizers.models import BPE

SPACE = "\u2581"  # stands for a space in tokens
BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2}  # of files that do not name them


@dataclass(frozen=True, slots=True)
class SentencePieceRule:
    """What a file says about its texts; characters without a token become the tokens of their bytes."""

    prefix: bool  # a text begins with a space, and so does one after a special token
    cuts: re.Pattern[str] | None  # where a text can be cut without changing its tokens; None: nowhere
    adds_bos: bool = True

    def escaped(self, text: str, *, begins: bool = True) -> str:
        text = text.replace(" ", SPACE)
        return SPACE + text if self.prefix and text and begins else text

    def token_bytes(self, token: str) -> bytes:
        return token.replace(SPACE, " ").encode()

    def spelled(self, text: bytes) -> str:
        return text.decode(errors="replace").replace(" ", SPACE)


def cuts_between_words(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Return the pattern of the beginnings of words, None if one of the tokens goes on into the next word."""
    inner_space = re.compile(f"[^{SPACE}]{SPACE}")
    crossing = any(inner_space.search(token) for token in tokens)
    return None if crossing else re.compile(f"(?<=[^{SPACE}])(?={SPACE})")


def ranked_bpe(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> BPE:
    """Return the model that merges any two neighbours whose concatenation has a score, the highest first.

    vocabulary: tokens of words and of bytes; scores: those of words. Every split of a token is a merge.
    """
    splits = {token: _splits(token, scores) for token in scores}
    # Of equal scores the leftmost pair is merged first. They are those of runs of one character, which grow
    # from the left if the longest is ranked first, and of it the split with the longest left part.
    ranked = sorted(scores, key=lambda token: (-scores[token], -len(token), vocabulary[token]))
    return BPE(dict(vocabulary), [pair for token in ranked for pair in splits[token]], byte_fallback=True)


def _splits(token: str, tokens: Container[str]) -> list[tuple[str, str]]:
    pairs = ((token[:at], token[at:]) for at in range(len(token) - 1, 0, -1))
    return [(left, right) for left, right in pairs if left in tokens and right in tokens]


def fault(scores: Mapping[str, float]) -> str | None:
    """Return why ranked merges would not find the tokens that SentencePiece does; None: they do."""
    characters = {character for token in scores for character in token}
    if missing := characters - scores.keys():
        token = next(token for token in scores if missing.intersection(token))
        return f"has {token!r}, but not each of its characters as a token"
    first: dict[float, str] = {}
    for token, score in scores.items():
        if len(set(token)) > 1 and _splits(token, scores) and first.setdefault(score, token) != token:
            return f"has {first[score]!r} and {token!r} with the same score; needs a rank for each"
    return None
