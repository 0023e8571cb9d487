"""Error objects of the protocols, with which official clients raise their typed exceptions."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.errors import BoughError, ModelNotFound, PromptTooLong, Unavailable, UsageError

_OPENAI = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
MAX_MESSAGE, MAX_PARAM = 2000, 200  # characters
_SETTING = re.compile(r"`([a-z_]+)`")
_UNION_TYPE = re.compile(r"str|int|bool|(list|dict)\[.*\]")


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def __post_init__(self) -> None:
        # Messages quote values of the request, which may have megabytes.
        object.__setattr__(self, "message", _cut(self.message, MAX_MESSAGE))
        object.__setattr__(self, "param", self.param and _cut(self.param, MAX_PARAM))

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def body(self, path: str) -> dict[str, Any]:
        """Return the error object of the protocol that `path` belongs to."""
        if path.startswith("/api/"):
            return self.ollama()
        return self.anthropic() if path.removeprefix("/v1").startswith("/messages") else self.openai()

    def ollama(self) -> dict[str, Any]:
        return {"error": self.message}

    def openai(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _OPENAI.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        return {
            "type": "error",
            "error": {"type": _ANTHROPIC.get(self.status, kind), "message": self.message},
        }


def unfit(field: str, value: object, needs: str) -> UsageError:
    """Return the error of a field of a request."""
    return UsageError(f"{field} is {value!r}; needs {needs}", param=field)


def without_backquotes(text: str) -> str:
    """Return an error's text with the names of settings as plain words."""
    return _SETTING.sub(r"\1", text)


def failure_of(error: Exception) -> Failure:
    if not isinstance(error, BoughError):
        # The text may quote other people's prompts, so only the log shows it.
        return Failure(500, f"the engine failed with {type(error).__name__}; the server's log says where")
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    param = error.param if isinstance(error, UsageError) else None
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    retry = None
    if isinstance(error, ModelNotFound):
        param, code = "model", "model_not_found"
    if isinstance(error, Unavailable):
        retry, code = error.retry_after_s, "queue_full" if error.http_status == 429 else "unavailable"
    return Failure(error.http_status, without_backquotes(message), param, code, retry)


def invalid(errors: Sequence[Mapping[str, Any]]) -> Failure:
    """Report the first invalid field of a body that does not match its schema."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return Failure(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    # A field of several types has an error for each; the deepest one is of the type that was meant.
    same = [each for each in errors if _names(each)[:1] == _names(first)[:1]]
    deepest = max(same, key=lambda each: len(_names(each)))
    names = _names(deepest)
    field = ".".join(names).replace(".[", "[")
    if deepest["type"] == "missing":
        return Failure(400, f"{field or 'the body'} is missing; needs a value", field or None)
    types = dict.fromkeys(_wanted(each) for each in same if _names(each) == names)
    seen = _short(deepest.get("input"))
    return Failure(400, f"{field or 'the body'} is {seen}; {' or '.join(types)}", field or None)


def unreadable(cause: BaseException | None) -> Failure:
    """Report a body that the JSON parser gave up on."""
    match cause:
        case UnicodeDecodeError(start=start):
            return Failure(400, f"the body is not UTF-8: byte {start} is invalid")
        case RecursionError():
            return Failure(400, "the body has too many levels of nested objects")
        case ValueError():
            limit = sys.get_int_max_str_digits()
            return Failure(400, f"the body has a number of more than {limit} digits")
    return Failure(400, "the body cannot be read as JSON")


def _names(error: Mapping[str, Any]) -> list[str]:
    """Return the path to a field, without the names that pydantic gives to the types of a union."""
    parts = [part for part in error["loc"] if part != "body" and not _UNION_TYPE.fullmatch(str(part))]
    return [part if isinstance(part, str) else f"[{part}]" for part in parts]


def _wanted(error: Mapping[str, Any]) -> str:
    limits = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"needs at least {limits['ge']}"
        case "less_than_equal":
            return f"needs at most {limits['le']}"
        case "too_short":
            return f"needs {limits['min_length']} or more items"
        case "model_attributes_type" | "model_type" | "dict_type":
            return "needs an object"
    return error["msg"][:1].lower() + error["msg"][1:]


def _cut(text: str, limit: int) -> str:
    """Return a text without its middle where it is longer; what helps is at its end."""
    return text if len(text) <= limit else f"{text[: limit * 3 // 4]} [...] {text[-limit // 5 :]}"


def _short(value: Any) -> str:
    if isinstance(value, str) and len(value) > MAX_MESSAGE:  # such as an image
        return f"a text of {len(value)} characters"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
