"""Pre-tokenizers: the named rules that split text into words before byte-level BPE."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Every rule below ends a word here, and composition (NFC) does not cross it.
_WORD_END = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=[A-Za-z])")
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_alphabet() -> dict[str, int]:
    """Map symbols of byte-level BPE to bytes: printable bytes map to themselves, the rest start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
SYMBOLS = {byte: symbol for symbol, byte in BYTE_OF.items()}


@dataclass(frozen=True, slots=True)
class WordRule:
    """The rule of one `tokenizer.ggml.pre`, and what its models assume besides the pattern."""

    pattern: str
    # Not in the files: these models were trained on text in Unicode's composed form (NFC).
    composes: bool = False
    # A word that is a token is encoded as such, even where the merges would not lead to it.
    whole_words: bool = False
    # The default of tokenizer.ggml.add_bos_token.
    adds_bos: bool = False
    # Digits are cut out before the pattern is applied, which then sees the text between them alone.
    single_digits: bool = False

    prefix: ClassVar[bool] = False
    cuts: ClassVar[re.Pattern[str]] = _WORD_END

    def escaped(self, text: str, *, begins: bool = True) -> str:
        return text

    def token_bytes(self, token: str) -> bytes:
        try:
            return bytes(map(BYTE_OF.__getitem__, token))
        except KeyError:
            return token.encode()

    def spelled(self, text: bytes) -> str:
        """Return a text's bytes as tokens have them."""
        return "".join(map(SYMBOLS.__getitem__, text))

    def pre_tokenizer(self) -> PreTokenizer:
        patterns = [r"\p{N}", self.pattern] if self.single_digits else [self.pattern]
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, as_bytes])

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.composes else None


_QWEN2 = WordRule(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE}",
    composes=True,
)
_QWEN35 = WordRule(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_WHITESPACE}",
    composes=True,
)
_LLAMA3 = WordRule(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE}",
    whole_words=True,
    adds_bos=True,
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = WordRule(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}",
    whole_words=True,
    adds_bos=True,
)
_O200K = WordRule(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}",
)
_GPT2 = WordRule(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_SMOLLM = replace(_GPT2, single_digits=True)

_NAMED = (
    (_QWEN2, "qwen2 deepseek-r1-qwen"),
    (_QWEN35, "qwen35"),
    (_LLAMA3, "llama-bpe llama3 llama-v3"),
    (_GPT2, "gpt-2 gpt2 default"),
    (_SMOLLM, "smollm"),
    (_TEKKEN, "tekken"),
    (_O200K, "gpt-4o llama4"),
)
WORD_RULES: dict[str, WordRule] = {name: rule for rule, names in _NAMED for name in names.split()}
