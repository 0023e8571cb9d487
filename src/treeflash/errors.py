"""Every error a user can cause, as one tree; knows nothing about terminals or HTTP beyond a code for each.

TreeFlashError
├── UsageError             a flag or a request field has a value that cannot be honoured
│   └── PromptTooLong      the prompt does not fit in the context
├── ModelNotFound          a name that is neither a file nor a repository we can read
│   └── DownloadFailed     the hub said no, or the network broke off
├── ModelFileError         a file that is damaged or not what it claims to be
│   ├── BadGGUF            the container: magic, version, counts, offsets, keys
│   ├── UnsupportedQuant   a tensor of a type we cannot read
│   └── UnsupportedModel   a sound file of an architecture or variant we do not run
├── TemplateFailed         the model's chat template refused the conversation
├── ResourceError          memory or disk is too small for what was asked
└── Unavailable            the server cannot take a request now: it loads, it stops, its model is gone
    └── QueueFull          as many requests wait as may
"""


class TreeFlashError(Exception):
    """What was wrong, the value seen and the value needed; `hint` is the command or flag that helps."""

    exit_code = 1
    http_status = 500

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TreeFlashError):
    exit_code = 2
    http_status = 400


class PromptTooLong(UsageError):
    """Carries both lengths, because protocol adapters repeat them in their own words."""

    def __init__(self, tokens: int, limit: int, hint: str = "shorten the prompt or raise --max-ctx"):
        super().__init__(f"the prompt has {tokens} tokens, the context holds {limit}", hint)
        self.tokens = tokens
        self.limit = limit


class ModelNotFound(TreeFlashError):
    exit_code = 3
    http_status = 404


class DownloadFailed(ModelNotFound):
    http_status = 502


class ModelFileError(TreeFlashError):
    exit_code = 4


class BadGGUF(ModelFileError):
    pass


class UnsupportedQuant(ModelFileError):
    pass


class UnsupportedModel(ModelFileError):
    pass


class TemplateFailed(TreeFlashError):
    exit_code = 5
    http_status = 400


class ResourceError(TreeFlashError):
    exit_code = 6
    http_status = 507


class Unavailable(TreeFlashError):
    http_status = 503

    def __init__(self, message: str, hint: str = "", *, retry_after_s: int = 5):
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class QueueFull(Unavailable):
    http_status = 429
