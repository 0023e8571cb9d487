"""Whether two files have the same tokens, so that one model can propose for the other. Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from bough.text.pretokenizers import WORD_RULES
from bough.text.tokenizer import KEY

# As llama.cpp has it: files of one family are padded to different sizes, and the first tokens are control
# tokens, which differ between base and chat models.
MOST_EXTRA, FIRST_COMPARED = 128, 5


def vocabulary_gap(target: Mapping[str, Any], draft: Mapping[str, Any]) -> str | None:
    """Return how the tokens of two files' metadata differ, in words; None: a draft's ids are the target's."""
    kinds = [_text(metadata, "model") for metadata in (target, draft)]
    if kinds[0] != kinds[1]:
        return f"its tokenizer is {kinds[1]}, the target's {kinds[0]}"
    for name, adds in (("bos", _adds_bos), ("eos", lambda metadata: metadata.get(f"{KEY}add_eos_token"))):
        marks = [
            metadata.get(f"{KEY}{name}_token_id") if adds(metadata) else None for metadata in (target, draft)
        ]
        if marks[0] != marks[1]:
            mine, its = ("none" if mark is None else f"token {mark}" for mark in marks)
            return f"it adds {its} as {name.upper()} to a text, the target {mine}"
    ours, its = (metadata.get(f"{KEY}tokens", []) for metadata in (target, draft))
    if not its:
        return "it has no tokens"
    token = _first_difference(ours, its)
    if abs(len(ours) - len(its)) > MOST_EXTRA:
        return (
            f"it has {len(its):,} tokens, the target {len(ours):,}, at most {MOST_EXTRA} may be extra{token}"
        )
    return token.removeprefix("; ") or None


def _first_difference(target: Sequence[str], draft: Sequence[str]) -> str:
    pairs = zip(target[FIRST_COMPARED:], draft[FIRST_COMPARED:], strict=False)
    for id, (ours, its) in enumerate(pairs, FIRST_COMPARED):
        if ours != its:
            return f"; its token {id} is {its[:40]!r}, the target's {ours[:40]!r}"
    return ""


def _text(metadata: Mapping[str, Any], key: str) -> str:
    return str(metadata.get(KEY + key, "none"))


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    rule = WORD_RULES.get(_text(metadata, "pre"))
    usual = _text(metadata, "model") == "llama" or (rule is not None and rule.adds_bos)
    return bool(metadata.get(f"{KEY}add_bos_token", usual))
