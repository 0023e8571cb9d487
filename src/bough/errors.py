"""Every error a user can cause, as one tree, with an exit code and an HTTP status for each.

A message or hint names a setting in backquotes, as a Python name: `max_ctx`. The CLI turns it into its flag,
the HTTP server drops the backquotes.

BoughError
├── UsageError             a setting or a request field has an invalid value
│   └── PromptTooLong      the prompt does not fit in the context
├── ModelNotFound          a name that is neither a file nor a repository we can read
│   └── DownloadFailed     the hub refused, or the connection broke
├── ModelFileError         a file that is damaged or not what it claims to be
│   ├── BadGGUF            the container: magic, version, counts, offsets, keys
│   ├── UnsupportedQuant   a tensor type that has no reader
│   └── UnsupportedModel   a valid file of an unsupported architecture or variant
├── TemplateFailed         the model's chat template refused the conversation
├── Cancelled              the client left before its prompt was tokenised
├── ResourceError          not enough memory or disk space
└── Unavailable            the server cannot take a request now: loading, stopping, or its model failed
    └── QueueFull          the queue of waiting requests is full
"""

import copyreg
import re
from typing import Any


class BoughError(Exception):
    """`message` says what is wrong, the value seen and the value needed; `hint` says what helps."""

    exit_code = 1
    http_status = 500

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields, not the arguments: errors also come from other processes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # ty: ignore[missing-attribute]


class UsageError(BoughError):
    """`param`: the request field or the setting at fault; None: the setting that the message begins with."""

    exit_code = 2
    http_status = 400

    def __init__(self, message: str, hint: str = "", *, param: str | None = None):
        super().__init__(message, hint)
        named = re.match(r"`(\w+)`", message)
        self.param = named[1] if param is None and named else param


class PromptTooLong(UsageError):
    """Carries both lengths for the protocol adapters, which word the message themselves.

    raisable: the model was made for a longer context, so that a larger `max_ctx` may help.
    at_least: the prompt was not tokenised to its end.
    """

    def __init__(
        self, tokens: int, limit: int, hint: str = "", *, raisable: bool = True, at_least: bool = False
    ):
        rest = " or raise `max_ctx`" if raisable else ": the model was made for no more tokens"
        hint = hint or f"shorten the prompt{rest}"
        count = f"at least {tokens}" if at_least else f"{tokens}"
        super().__init__(f"the prompt has {count} tokens, the context holds {limit}", hint)
        self.tokens = tokens
        self.limit = limit
        self.raisable, self.at_least = raisable, at_least


class ModelNotFound(BoughError):
    exit_code = 3
    http_status = 404


class DownloadFailed(ModelNotFound):
    http_status = 502


class ModelFileError(BoughError):
    exit_code = 4


class BadGGUF(ModelFileError):
    pass


class UnsupportedQuant(ModelFileError):
    pass


class UnsupportedModel(ModelFileError):
    pass


class TemplateFailed(BoughError):
    exit_code = 5
    http_status = 400


class Cancelled(BoughError):
    http_status = 499


class ResourceError(BoughError):
    exit_code = 6
    http_status = 507


class Unavailable(BoughError):
    http_status = 503

    def __init__(self, message: str, hint: str = "", *, retry_after_s: int = 5):
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class QueueFull(Unavailable):
    http_status = 429
