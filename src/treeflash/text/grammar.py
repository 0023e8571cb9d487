"""GrammarCompiler and Matcher: which tokens a grammar allows next. Imports no torch.

Parsing and masks come from llguidance; this wraps the part that sessions use, with our errors.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from treeflash.errors import ResourceError, UsageError
from treeflash.text.tokenizer import Tokenizer

# As json.dumps writes: familiar to models, mostly forced, and no output of endless whitespace.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Grammar:
    """`value`: the schema, the expression or the grammar's text; None for json_object."""

    kind: Literal["json_object", "json_schema", "regex", "lark", "gbnf"]
    value: str | Mapping[str, Any] | None = None
    field: str | None = None  # the request field that holds it, for errors


class Matcher:
    """The state of a grammar after some tokens, which can be advanced and rolled back."""

    def __init__(self, state: Any, words: int):
        self._state, self._words = state, words

    def mask(self) -> np.ndarray:
        """Return a bit for each token that may follow, end tokens included: [vocabulary / 32] int32."""
        words = np.frombuffer(self._state.compute_bitmask(), dtype=np.int32)[: self._words]
        if self._state.is_error():
            raise ResourceError(f"the grammar cannot be followed further: {_first_line(self._state)}")
        return words

    def advance(self, token: int) -> bool:
        """Advance by a token; return False, without advancing, where the grammar does not allow it."""
        return self._state.try_consume_tokens([token]) == 1

    def back(self, count: int = 1) -> None:
        moved = self._state.rollback(count)
        assert moved, self._state.get_error()

    @property
    def complete(self) -> bool:
        """Return whether nothing can follow."""
        return self._state.is_stopped()

    @property
    def may_end(self) -> bool:
        return self._state.is_accepting()

    def forced(self) -> list[int]:
        """Return the tokens of the only text that can follow."""
        return self._state.compute_ff_tokens()

    def fork(self) -> "Matcher":
        return Matcher(self._state.deep_copy(), self._words)


class GrammarCompiler:
    """Compiles grammars over one vocabulary, whose tables are built for the first grammar."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of a grammar; raise UsageError for an invalid grammar."""
        library, tables = self._library
        make = library.LLMatcher
        value = grammar.value
        match grammar.kind:
            case "json_object":
                text = make.grammar_from_json_schema({"type": "object"}, overrides=JSON_STYLE)
            case "json_schema":
                text = make.grammar_from_json_schema(_schema(value), overrides=JSON_STYLE)
            case "regex":
                text = make.grammar_from_regex(_string(grammar.kind, value))
            case "lark":
                text = make.grammar_from_lark(_string(grammar.kind, value))
            case "gbnf":
                text = _gbnf(_string(grammar.kind, value), library.grammar_from)
            case kind:
                raise UsageError(
                    f"the grammar's kind is {kind!r}, needed json_object, json_schema, regex, lark or gbnf"
                )
        state = make(tables, text, log_level=0)
        if state.is_error():
            raise UsageError(f"the {grammar.kind} grammar cannot be used: {_first_line(state)}")
        # Rules that only refer to themselves fail at the first mask.
        state.compute_bitmask()
        if state.is_error():
            raise UsageError(f"the {grammar.kind} grammar matches no text: {_first_line(state)}")
        return Matcher(state, -(-self._tokenizer.vocab_size // 32))

    @cached_property
    def _library(self) -> tuple[Any, Any]:
        try:
            import llguidance
        except ImportError as error:
            raise UsageError(
                "grammars and JSON schemas need the package llguidance, which is not installed",
                "pip install llguidance",
            ) from error
        vocabulary = _Vocabulary(self._tokenizer)
        ends = sorted(self._tokenizer.stop_ids) or None
        return llguidance, llguidance.LLTokenizer(vocabulary, eos_token=ends)  # ty: ignore[invalid-argument-type]


class _Vocabulary:
    """The tokenizer interface of llguidance."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = min(tokenizer.stop_ids, default=tokenizer.eos_id or 0)
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        # Control tokens are never text.
        self.special_token_ids = [id for id in ids if tokenizer.is_control(id)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, special=False)


def _first_line(state: Any) -> str:
    """Return the error without the parser dump that follows it."""
    return next(iter(state.get_error().strip().splitlines()), "?")


def _schema(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"the JSON schema is not readable as JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"the JSON schema is of type {type(value).__name__}, needed an object")
    return json.dumps(dict(value), ensure_ascii=False)


def _gbnf(text: str, convert: Callable[[str, str], str]) -> str:
    try:
        return convert("gbnf", text)
    except ValueError as error:
        reason = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        raise UsageError(f"the gbnf grammar cannot be used: {reason}") from error


def _string(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"the {kind} grammar is {value!r}, needed its text")
    return value
