"""GrammarCompiler and Matcher: which tokens a grammar allows next. Imports no torch.

Parsing and masks come from llguidance; this wraps the part that sessions use, with our errors.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from bough.errors import UsageError
from bough.text.json_schema import prepare

# As json.dumps writes: familiar to models, mostly forced, and no output of endless whitespace.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PARTS = 64  # compiled patterns and tools: most are in several of a client's requests
MAX_STATES = 50_000  # of a lexer, some 2 kB each: a long enumeration has 10,000


@dataclass(frozen=True, slots=True)
class Grammar:
    """`value`: the schema, the expression or the grammar's text; None for json_object."""

    kind: Literal["json_object", "json_schema", "regex", "lark", "gbnf"]
    value: str | Mapping[str, Any] | None = None
    field: str | None = None  # the request field that holds it, for errors


class Matcher:
    """The state of a grammar after some tokens, which can be advanced and rolled back."""

    def __init__(self, state: Any, words: int, field: str | None = None):
        self._state, self._words, self._field = state, words, field

    def mask(self) -> np.ndarray:
        """Return a bit for each token that may follow, end tokens included: [vocabulary / 32] int32."""
        words = np.frombuffer(self._state.compute_bitmask(), dtype=np.int32)[: self._words]
        if self._state.is_error():
            raise self._too_large()
        return words

    def advance(self, token: int) -> bool:
        """Advance by a token; return False, without advancing, where the grammar does not allow it."""
        moved = self._state.try_consume_tokens([token]) == 1
        if not moved and self._state.is_error():
            raise self._too_large()
        return moved

    def _too_large(self) -> UsageError:
        return UsageError(
            f"the grammar cannot be followed further: {_reason(self._state)}", param=self._field
        )

    def back(self, count: int = 1) -> None:
        moved = self._state.rollback(count)
        assert moved, self._state.get_error()

    @property
    def complete(self) -> bool:
        return self._state.is_stopped()

    @property
    def may_end(self) -> bool:
        return self._state.is_accepting()

    def forced(self) -> list[int]:
        """Return the tokens of the only text that can follow."""
        return self._state.compute_ff_tokens()

    def fork(self) -> "Matcher":
        return Matcher(self._state.deep_copy(), self._words, self._field)


class Vocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def eos_id(self) -> int | None: ...
    def token_bytes(self, id: int, /) -> bytes: ...
    def is_control(self, id: int, /) -> bool: ...
    def encode(self, text: str, /, *, special: bool = True, begins: bool = True) -> list[int]: ...


class GrammarCompiler:
    """Compiles grammars over one vocabulary, whose tables are built for the first grammar."""

    def __init__(self, tokenizer: Vocabulary):
        self._tokenizer = tokenizer
        self._building = threading.Lock()

    def compile(self, grammar: Grammar, *, calls: Grammar | None = None) -> Matcher:
        """Return a matcher at the start of a grammar, or of `calls` as its alternative.

        Raise UsageError for an invalid grammar.
        """
        return self.matcher(self.state_of(self.source(grammar, calls=calls), grammar), grammar.field)

    def source(self, grammar: Grammar, *, calls: Grammar | None = None) -> str:
        """Return the library's form of a grammar, or of `calls` as its alternative."""
        try:
            source = self._source(grammar)
            return source if calls is None else _either(self._source(calls), source)
        except UsageError as error:
            raise UsageError(error.message, error.hint, param=error.param or grammar.field) from error

    def state_of(self, source: str, grammar: Grammar) -> Any:
        """Return the library's matcher at the start of what `source` has returned."""
        self.warm()
        try:
            return self._compile(source, grammar.kind)
        except UsageError as error:
            raise UsageError(error.message, error.hint, param=grammar.field) from error

    def check(self, grammar: Grammar) -> None:
        """Raise UsageError for an invalid grammar; parts of several grammars are compiled once."""
        self._compiled(self._source(grammar), grammar.kind)

    def warm(self) -> None:
        with self._building:
            _ = self._library

    def matcher(self, state: Any, field: str | None) -> Matcher:
        return Matcher(state.deep_copy(), -(-self._tokenizer.vocab_size // 32), field)

    def prepare(self, schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
        """Return a JSON schema that the grammar can represent; `lenient` drops patterns that it cannot."""
        return prepare(schema, check_pattern=self._check_pattern, lenient=lenient)

    def _source(self, grammar: Grammar) -> str:
        try:
            return self._converted(grammar)
        except ValueError as error:  # the library's
            reason = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
            raise UsageError(f"the {grammar.kind} grammar cannot be used: {reason}") from error

    def _converted(self, grammar: Grammar) -> str:
        library, _ = self._library
        make = library.LLMatcher
        value = grammar.value
        match grammar.kind:
            case "json_object":
                return make.grammar_from_json_schema({"type": "object"}, overrides=JSON_STYLE)
            case "json_schema":
                schema = json.dumps(self.prepare(_schema(value)), ensure_ascii=False)
                return make.grammar_from_json_schema(schema, overrides=JSON_STYLE)
            case "regex":
                return make.grammar_from_regex(_string(grammar.kind, value))
            case "lark":
                return make.grammar_from_lark(_string(grammar.kind, value))
            case "gbnf":
                return library.grammar_from("gbnf", _string(grammar.kind, value))
            case kind:
                raise UsageError(
                    f"the grammar's kind is {kind!r}, needed json_object, json_schema, regex, lark or gbnf"
                )

    @cached_property
    def _compiled(self) -> Any:
        return lru_cache(maxsize=_PARTS)(self._compile)

    def _compile(self, source: str, kind: str) -> Any:
        library, tables = self._library
        limits = library.LLParserLimits(max_lexer_states=MAX_STATES)
        state = library.LLMatcher(tables, source, log_level=0, limits=limits)
        if state.is_error():
            raise UsageError(f"the {kind} grammar cannot be used: {_reason(state)}")
        # Rules that only refer to themselves fail at the first mask.
        state.compute_bitmask()
        if state.is_error():
            raise UsageError(f"the {kind} grammar matches no text: {_reason(state)}")
        return state

    def _check_pattern(self, pattern: str) -> None:
        schema = json.dumps({"type": "string", "pattern": pattern})
        library, _ = self._library
        probe = self._compiled(library.LLMatcher.grammar_from_json_schema(schema), "regex").deep_copy()
        # The expression is expanded after the opening quote.
        probe.try_consume_tokens(self._tokenizer.encode('"', special=False, begins=False))
        probe.compute_bitmask()
        if probe.is_error():
            raise UsageError(f"it is too large: {_reason(probe)}")

    @cached_property
    def _library(self) -> tuple[Any, Any]:
        try:
            import llguidance
        except ImportError as error:
            raise UsageError(
                "grammars and JSON schemas need the package llguidance, which is not installed",
                "pip install llguidance",
            ) from error
        vocabulary = _Tokens(self._tokenizer)
        ends = sorted(self._tokenizer.stop_ids) or None
        return llguidance, llguidance.LLTokenizer(vocabulary, eos_token=ends)  # ty: ignore[invalid-argument-type]


class _Tokens:
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Vocabulary):
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = min(tokenizer.stop_ids, default=tokenizer.eos_id or 0)
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        # Control tokens are never text.
        self.special_token_ids = [id for id in ids if tokenizer.is_control(id)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, special=False, begins=False)


def _reason(state: Any) -> str:
    """Return the error in one line, without the parser dump that follows it."""
    lines = [line.strip() for line in state.get_error().strip().splitlines()] or ["?"]
    detail = next((line for line in lines[1:] if line.startswith("error:")), "")
    return f"{lines[0]} {detail.removeprefix('error:').strip()}".strip()


def _either(calls: str, answer: str) -> str:
    start = {"lark_grammar": "start: @calls | @answer"}
    parts = [{**_part(calls), "name": "calls"}, {**_part(answer), "name": "answer"}]
    return json.dumps({"grammars": [start, *parts]}, ensure_ascii=False)


def _part(source: str) -> dict[str, Any]:
    """Return a grammar as a member of a list of grammars; Lark text never begins with a brace."""
    return json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}


def _schema(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"the JSON schema is not readable as JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"the JSON schema is of type {type(value).__name__}, needed an object")
    return value


def _string(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"the {kind} grammar is {value!r}, needed its text")
    return value
