"""What constrained text has to match, and a walk along it token by token; knows no model and no tensors.

Parsing and masks are llguidance's; this is the little of it that the engine uses, with our errors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from treeflash.errors import ResourceError, UsageError
from treeflash.text.tokenizer import Tokenizer

# Written as json.dumps writes it: models know it well, much of it is forced, and no answer is all spaces.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Grammar:
    """`value`: the schema, the expression, or the grammar's text; nothing for any JSON object."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    value: str | Mapping[str, Any] | None = None


class Matcher:
    """A place in a grammar. Moves forward over tokens and back again."""

    def __init__(self, state: Any, words: int):
        self._state, self._words = state, words

    def mask(self) -> np.ndarray:
        """Tokens that may follow, one bit each: [vocabulary / 32] int32. End tokens where it may end."""
        words = np.frombuffer(self._state.compute_bitmask(), dtype=np.int32)[: self._words]
        if self._state.is_error():
            raise ResourceError(f"the grammar cannot be followed further: {_first_line(self._state)}")
        return words

    def advance(self, token: int) -> bool:
        """False, and no move, where the grammar has no such token."""
        return self._state.try_consume_tokens([token]) == 1

    def back(self, count: int = 1) -> None:
        moved = self._state.rollback(count)
        assert moved, self._state.get_error()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return self._state.is_stopped()

    @property
    def may_end(self) -> bool:
        return self._state.is_accepting()

    def forced(self) -> list[int]:
        """Tokens of the text that has to follow, as far as there is no choice."""
        return self._state.compute_ff_tokens()

    def fork(self) -> "Matcher":
        return Matcher(self._state.deep_copy(), self._words)


class GrammarCompiler:
    """Grammars over one vocabulary; its tables are made when the first grammar comes."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning; a grammar that makes no sense is the request's mistake."""
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
            case kind:
                raise UsageError(
                    f"the grammar's kind is {kind!r}, needed json_object, json_schema, regex or lark"
                )
        state = make(tables, text, log_level=0)
        if state.is_error():
            raise UsageError(f"the {grammar.kind} grammar cannot be used: {_first_line(state)}")
        # Rules that only lead back to themselves are noticed by the first look for what may come.
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
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = min(tokenizer.stop_ids, default=tokenizer.eos_id or 0)
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        # Control tokens are no text, whatever their names spell.
        self.special_token_ids = [id for id in ids if tokenizer.is_control(id)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, special=False)


def _first_line(state: Any) -> str:
    """Of the error; a dump of the parser follows."""
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


def _string(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"the {kind} grammar is {value!r}, needed its text")
    return value
