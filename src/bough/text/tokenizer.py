"""Tokenizer: encodes text and decodes ids, built from GGUF metadata. Imports no torch."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import islice
from typing import Any

import tokenizers
from tokenizers.models import BPE

from bough.errors import BadGGUF, Cancelled, PromptTooLong, UnsupportedModel, UsageError
from bough.text.infill_tokens import InfillTokens
from bough.text.pretokenizers import BYTE_OF, WORD_RULES, WordRule
from bough.text.sentencepiece import (
    BYTE_NAMES,
    SENTENCEPIECE_IDS,
    SentencePieceRule,
    cuts_between_words,
    fault,
    ranked_bpe,
)
from bough.text.stream import TextStream

KEY = "tokenizer.ggml."
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files name one end token; models end with any of these that they have as control tokens.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eot|>", "<|end_of_text|>", "<|eom_id|>", "</s>")
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SURROGATE = re.compile("[\ud800-\udfff]")
PIECE = 1 << 13  # characters that one thread encodes at once: some 3 ms
PIECES = 64  # encoded at once, by all cores
# Composed text (NFC) has at least a third of the bytes of what it was composed from.
COMPOSITION = 3


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Never decoded as text, never encoded from words.
NON_TEXT = (TokenType.CONTROL, TokenType.UNKNOWN)


# C0, C1 and F5 to FF occur in no UTF-8 text. A vocabulary made from text may also lack control characters,
# and the first bytes of planes without assigned characters (F1 to F4).
_NEEDED_BYTES = {*b"\t\n\r", *range(0x20, 0xF1)} - {0x7F, 0xC0, 0xC1}
NEEDED_SYMBOLS = [symbol for symbol, byte in BYTE_OF.items() if byte in _NEEDED_BYTES]


@dataclass(slots=True)
class EncodeLimit:
    """Bounds the work of encoding one prompt, possibly in several calls."""

    tokens: int  # most tokens of the prompt
    cancelled: Callable[[], bool] = lambda: False
    stops_at_tokens: bool = True  # False: only a text that cannot fit by its bytes is refused
    raisable: bool = True  # see PromptTooLong
    found: int = 0  # tokens so far

    def check(self, longest: int, text: str) -> None:
        """Raise for a text that has more bytes than `tokens` of the `longest` token."""
        size = len(text) if text.isascii() else len(text.encode(errors="replace")) // COMPOSITION
        if size > self.tokens * longest:
            raise self._too_long(-(-size // longest))

    def count(self, tokens: int, *, more: bool) -> None:
        self.found += tokens
        if self.cancelled():
            raise Cancelled("the request was cancelled while its prompt was tokenised")
        if more and self.stops_at_tokens and self.found > self.tokens:
            raise self._too_long(self.found)

    def _too_long(self, tokens: int) -> PromptTooLong:
        return PromptTooLong(tokens, self.tokens, raisable=self.raisable, at_least=True)


class Tokenizer:
    """BPE of bytes or of characters (SentencePiece), with special tokens."""

    vocab_size: int
    stop_ids: frozenset[int]
    # None unless the file asks for a BOS before every prompt.
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    adds_eos: bool  # the file asks for an EOS after a text whose vector is computed
    infill: InfillTokens | None  # None: the model cannot fill in the middle

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, source: str = "") -> "Tokenizer":
        """Build the tokenizer that `tokenizer.ggml.*` describes; `source` names the file in errors."""
        return cls(_Reader(metadata, source or "the metadata"))

    def __init__(self, reader: "_Reader"):
        self._tokens = reader.tokens()
        self._types = reader.types(len(self._tokens))
        self._rule = rule = reader.rule(self._tokens, self._types)
        self._ids = reader.ids(self._tokens, self._types)
        special = [
            (token, id) for id, token in enumerate(self._tokens) if self._types[id] != TokenType.NORMAL
        ]
        control = [token for token, id in special if token and self._types[id] in NON_TEXT]
        user_defined = [token for token, id in special if token and self._types[id] == TokenType.USER_DEFINED]
        self._user_defined_pattern = _any_of(user_defined)
        self._special_pattern = _any_of(control + user_defined)

        # The last texts whose ids were counted.
        self._counted: tuple[list[str], Sequence[tokenizers.Encoding]] = ([], [])
        vocabulary = self._ids.copy()
        for token in control:
            del vocabulary[token]
        if isinstance(rule, SentencePieceRule):
            self._words = tokenizers.Tokenizer(reader.ranked_model(vocabulary, self._types))
        else:
            self._words = tokenizers.Tokenizer(reader.model(vocabulary, rule))
            self._words.pre_tokenizer = rule.pre_tokenizer()
            if normalizer := rule.normalizer():
                self._words.normalizer = normalizer

        self.vocab_size = len(self._tokens)
        self.bos_id = reader.id("bos_token_id", self.vocab_size) if reader.adds_bos(rule) else None
        self.eos_id = reader.id("eos_token_id", self.vocab_size)
        self.pad_id = reader.id("padding_token_id", self.vocab_size)
        common_ends = {self._ids[token] for token in END_TOKENS if token in control}
        # Some files have these as user-defined tokens.
        special_ids = {token: self._ids[token] for token in control + user_defined}
        self.infill, infill_ends = InfillTokens.of(special_ids, lambda key: reader.id(key, self.vocab_size))
        self.stop_ids = reader.stop_ids(self.vocab_size) | common_ends | infill_ends
        self.adds_eos = reader.adds_eos()

    @cached_property
    def longest_token(self) -> int:
        return max(len(self.token_bytes(id)) for id in range(self.vocab_size))

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        literals: Sequence[tuple[int, int]] = (),
        limit: EncodeLimit | None = None,
        begins: bool = True,
    ) -> list[int]:
        """Return the ids of `text`, without a BOS; not `begins`: of one that goes on from other text.

        Strings of user-defined tokens always become their ids, strings of control tokens only with `special`
        and outside the character spans `literals` (see `Rendered.literals`).
        """
        text = _encodable(text)
        if limit is not None:
            limit.check(self.longest_token, text)
        ids: list[int] = []
        position = 0
        for start, end in _matches(
            self._special_pattern if special else self._user_defined_pattern, text, literals
        ):
            ids += self._encode_words(text[position:start], limit, begins=begins or position > 0)
            ids.append(self._ids[text[start:end]])
            if limit is not None:
                limit.count(1, more=False)
            position = end
        return ids + self._encode_words(text[position:], limit, begins=begins or position > 0)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many short texts, in which no string is a special token."""
        (counted, encodings), self._counted = self._counted, ([], [])
        return [each.ids for each in (encodings if counted == texts else self._encodings(texts))]

    def count_all(self, texts: Sequence[str]) -> list[int]:
        """Return how many ids each has; they are kept for a call of `encode_all` with the same texts."""
        encodings = self._encodings(texts)
        self._counted = list(texts), encodings
        return [len(each) for each in encodings]

    def encodes_like(self, other: "Tokenizer") -> bool:
        """Return whether both have the same vocabulary and the same rules."""
        first, second = ((t._ids, t._types, t.bos_id, t._rule) for t in (self, other))
        if first != second:
            return False
        return self._words.to_str() == other._words.to_str()

    def _encodings(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding]:
        escaped = [self._rule.escaped(_encodable(text)) for text in texts]
        return self._words.encode_batch_fast(escaped, add_special_tokens=False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`, invalid UTF-8 as U+FFFD; `skip_special` drops control tokens only."""
        piece = self._visible_bytes if skip_special else self.token_bytes
        if not self._rule.prefix:
            return b"".join(map(piece, ids)).decode("utf-8", errors="replace")
        data, begins = bytearray(), True
        for id in ids:
            data += piece(id).removeprefix(b" ") if begins and not self._is_special(id) else piece(id)
            begins = self._is_special(id)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Return the raw bytes of a token: its name for control tokens, nothing for unused ones."""
        if not 0 <= id < self.vocab_size:
            raise UsageError(
                f"token id {id} is not in the vocabulary; ids go from 0 to {self.vocab_size - 1}"
            )
        token, type = self._tokens[id], self._types[id]
        if type == TokenType.NORMAL:
            return self._rule.token_bytes(token)
        if type == TokenType.UNUSED:
            return b""
        if type == TokenType.BYTE and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode()

    def beginning(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that a text can begin with."""
        spelled = self._rule.spelled(text)
        names = [f"<0x{text[0]:02X}>"] if text else []
        names += [spelled[:end] for end in range(1, len(spelled) + 1)]
        ids = [self._ids[name] for name in names if name in self._ids]
        return [id for id in ids if text.startswith(self.token_bytes(id))]

    def id_of(self, token: str) -> int | None:
        """Return the id of the token with this string in the file (byte-level for normal ones), or None."""
        return self._ids.get(token)

    def is_control(self, id: int) -> bool:
        """Return whether the token is never part of a text."""
        return self._types[id] in NON_TEXT

    def stream(self, *, skip_special: bool = True) -> TextStream:
        return TextStream(self._visible_bytes if skip_special else self.token_bytes)

    def _is_special(self, id: int) -> bool:
        return self._types[id] in NON_TEXT or self._types[id] == TokenType.USER_DEFINED

    def _visible_bytes(self, id: int) -> bytes:
        data = self.token_bytes(id)
        return b"" if self._types[id] in NON_TEXT else data

    def _encode_words(self, text: str, limit: EncodeLimit | None, *, begins: bool) -> list[int]:
        ids: list[int] = []
        pieces = _pieces(self._rule.escaped(text, begins=begins), self._rule.cuts)
        while some := list(islice(pieces, PIECES)):
            # Unlike `encode`, the library's batch functions release the GIL.
            encodings = self._words.encode_batch_fast([piece for piece, _ in some], add_special_tokens=False)
            for encoding, (_, more) in zip(encodings, some, strict=True):
                ids += (piece := encoding.ids)
                if limit is not None:
                    limit.count(len(piece), more=more)
        return ids


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], source: str):
        self.metadata = metadata
        self.source = source

    def rule(self, tokens: list[str], types: list[int]) -> WordRule | SentencePieceRule:
        model = self._value("model")
        if model == "llama":
            prefix = bool(self.metadata.get(f"{KEY}add_space_prefix", True))
            normal = [token for token, type in zip(tokens, types, strict=True) if type == TokenType.NORMAL]
            return SentencePieceRule(prefix, cuts_between_words(normal))
        if model != "gpt2":
            raise UnsupportedModel(
                f"{self.source}: {KEY}model is {model!r}; supported are 'gpt2' (byte-level BPE)"
                " and 'llama' (SentencePiece)"
            )
        pre = self._value("pre")
        if not isinstance(pre, str) or pre not in WORD_RULES:
            raise UnsupportedModel(
                f"{self.source}: {KEY}pre is {pre!r}; supported are {', '.join(sorted(WORD_RULES))}"
            )
        return WORD_RULES[pre]

    def tokens(self) -> list[str]:
        return self._strings("tokens")

    def types(self, size: int) -> list[int]:
        types = self._integers("token_type")
        if len(types) != size:
            raise self._bad("token_type", f"has {len(types)} entries; needs {size}, as many as {KEY}tokens")
        valid = set(TokenType)
        if unknown := set(types) - valid:
            seen = min(unknown)
            raise self._bad("token_type", f"is {seen} for token {types.index(seen)}; needs 1 to {max(valid)}")
        return types

    def ids(self, tokens: list[str], types: list[int]) -> dict[str, int]:
        """Return the ids of all tokens in use; only unused and empty fillers may repeat a string."""
        used = [id for id, type in enumerate(types) if type != TokenType.UNUSED and tokens[id]]
        ids = {tokens[id]: id for id in used}
        if len(ids) < len(used):
            second = next(id for id in used if ids[tokens[id]] != id)
            token = tokens[second]
            raise self._bad("tokens", f"has {token!r} as both {second} and {ids[token]}; needs it once")
        return ids

    def model(self, vocabulary: dict[str, int], rule: WordRule) -> BPE:
        # The library silently drops text it has no symbol for.
        missing = [symbol for symbol in NEEDED_SYMBOLS if symbol not in vocabulary]
        if missing:
            raise self._bad(
                "tokens",
                f"lacks {len(missing)} of the {len(NEEDED_SYMBOLS)} symbols of single bytes,"
                f" among them {missing[0]!r}; byte-level BPE needs each as a normal token",
            )
        parts = (merge.partition(" ") for merge in self._strings("merges"))
        merges = [(left, right) for left, _, right in parts]
        try:
            return BPE(vocabulary, merges, ignore_merges=rule.whole_words)
        except Exception as error:  # the library raises its own Exception without a class or an index
            for index, merge in enumerate(merges):
                if not {*merge, "".join(merge)} <= vocabulary.keys():
                    raise self._bad(
                        "merges",
                        f"has {' '.join(merge)!r} at index {index}; needs 'LEFT RIGHT', both and their"
                        f" concatenation being normal tokens in {KEY}tokens",
                    ) from error
            raise

    def ranked_model(self, vocabulary: dict[str, int], types: list[int]) -> BPE:
        """Return the model of a SentencePiece vocabulary."""
        scores = self._list("scores")
        if len(scores) != len(types) or not all(isinstance(score, int | float) for score in scores):
            raise self._bad("scores", f"has {len(scores)} entries; needs {len(types)} numbers, one a token")
        if missing := [name for name in BYTE_NAMES if name not in vocabulary]:
            raise self._bad("tokens", f"lacks {len(missing)} of the 256 tokens of bytes, as {missing[0]}")
        words = {token: scores[id] for token, id in vocabulary.items() if types[id] == TokenType.NORMAL}
        if reason := fault(words):
            raise self._bad("tokens", reason)
        others = (*BYTE_NAMES, *words)
        return ranked_bpe({token: vocabulary[token] for token in others}, words)

    def adds_bos(self, rule: WordRule | SentencePieceRule) -> bool:
        return bool(self.metadata.get(f"{KEY}add_bos_token", rule.adds_bos))

    def adds_eos(self) -> bool:
        return bool(self.metadata.get(f"{KEY}add_eos_token", False))

    def stop_ids(self, size: int) -> frozenset[int]:
        stops = {id for name in END_KEYS if (id := self.id(name, size)) is not None}
        if f"{KEY}eos_token_ids" in self.metadata:
            listed = self._integers("eos_token_ids")
            stops.update(self._checked_id("eos_token_ids", id, size) for id in listed)
        return frozenset(stops)

    def id(self, name: str, size: int) -> int | None:
        ranked = self.metadata.get(f"{KEY}model") == "llama"
        value = self.metadata.get(KEY + name, SENTENCEPIECE_IDS.get(name) if ranked else None)
        return None if value is None else self._checked_id(name, value, size)

    def _checked_id(self, name: str, value: Any, size: int) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) < size:
            raise self._bad(name, f"is {value!r}; needs a token id from 0 to {size - 1}")
        return int(value)

    def _strings(self, name: str) -> list[str]:
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self._bad(name, "holds values that are not strings; needs an array of strings")
        return values

    def _integers(self, name: str) -> list[int]:
        values = self._list(name)
        if not all(isinstance(value, int) for value in values):
            raise self._bad(name, "holds values that are not integers; needs an array of integers")
        return values

    def _list(self, name: str) -> list[Any]:
        value = self._value(name)
        # A numpy array of numbers becomes plain integers.
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, list | tuple):
            raise self._bad(name, f"is of type {type(value).__name__}; needs an array")
        return list(value)

    def _value(self, name: str) -> Any:
        if KEY + name not in self.metadata:
            raise BadGGUF(f"{self.source}: key {KEY}{name} is missing; a tokenizer needs it")
        return self.metadata[KEY + name]

    def _bad(self, name: str, what: str) -> BadGGUF:
        return BadGGUF(f"{self.source}: {KEY}{name} {what}")


def _any_of(tokens: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the longest of `tokens`, None without tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if tokens else None


def _matches(
    pattern: re.Pattern[str] | None, text: str, literals: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield leftmost matches of `pattern` outside the spans `literals`, which are in order."""
    position = 0
    upcoming = iter(literals)
    literal = next(upcoming, None)
    while pattern is not None and (match := pattern.search(text, position)):
        start, end = match.span()
        while literal is not None and literal[1] <= start:
            literal = next(upcoming, None)
        if literal is not None and literal[0] < end:
            position = start + 1
        else:
            yield start, end
            position = end


def _pieces(text: str, cuts: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    start = 0
    while start < len(text):
        end = _cut(text, start + PIECE, cuts) if cuts is not None else len(text)
        yield text[start:end], end < len(text)
        start = end


def _cut(text: str, start: int, cuts: re.Pattern[str]) -> int:
    """Return the first position from `start` on at which cutting the text does not change its tokens."""
    # In windows, because a search over all of a long text would hold the GIL.
    for position in range(start, len(text), PIECE):
        if match := cuts.search(text, position, position + PIECE + 2):
            return match.start()
    return len(text)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which JSON can represent and UTF-8 cannot, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return SURROGATE.sub("\ufffd", text)
    return text
