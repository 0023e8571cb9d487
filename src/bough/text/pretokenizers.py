"""Pre-tokenizers: the named rules that split text into words before byte-level BPE."""

from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


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
_GPT2 = WordRule(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_SMOLLM = replace(_GPT2, single_digits=True)

WORD_RULES: dict[str, WordRule] = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "default": _GPT2,
    "smollm": _SMOLLM,
}
